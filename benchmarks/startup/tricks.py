"""What each trick of a start saves: a command as it is, and with one trick switched off, in turns.

Every measurement is a whole process. CPU seconds are those of the process and of all that it has waited for. Machines
drift, so all variants of a command run once in each round, and the medians of paired differences count.

    python benchmarks/startup/tricks.py
    python benchmarks/startup/tricks.py --rounds 10 --only prepare
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase


@dataclass(frozen=True)
class Command:
    """A command and its tricks: by name the Python code that switches one off before the command begins."""

    words: tuple[str, ...]
    tricks: dict[str, str]
    remove: tuple[str, ...] = ()
    """Folders to remove before each measurement."""


_TRAIN = ("train", "config.yaml", "--restart")
_COMPILER = "import headway.training.setup.compiler_start as start\n"
_COLLECTING = "import gc\ngc.disable = lambda: None"
COMMANDS = {
    "list": Command(
        ("runs", "list", "."),
        {
            "only the verb is imported": "import headway.cli.application as a\na.wanted = lambda words: a.VERBS",
        },
    ),
    "prepare": Command(
        ("data", "prepare", "given.yaml", "--force"),
        {
            "code loads without a search for garbage": _COLLECTING,
            "the vocabulary is loaded ahead": (
                "import headway.data.tokenizing.preload as p\np.begin_loading_file = lambda path, encoder: None"
            ),
        },
    ),
    "train": Command(_TRAIN, {"code loads without a search for garbage": _COLLECTING}, ("runs",)),
    "compiled": Command(
        (*_TRAIN, "train.compile=true"),
        {
            "the compiler is loaded ahead, in all ways below": _COMPILER + "start.start_compiler = lambda kind: None",
            "which vector instructions work is kept": _COMPILER + "start._cache_instruction_checks = lambda: None",
        },
        ("runs",),
    ),
}

CONFIG = """
name: start
model: {dim: 64, layers: 2, heads: 2, ffn_dim: 128}
data:
  sources: [text.txt]
  store: store
train: {sequence_length: 32, global_batch: 2, lanes: 1, steps: 2, device: cpu, precision: fp32, compile: false}
evaluation: {every: 1000000}
checkpoint: {every: 1000000}
track: []
"""


#: Size of the vocabulary that `prepare` loads: that of Llama 3.
VOCABULARY = 128_000


def write_vocabulary(folder: Path) -> None:
    """Train a vocabulary on random words: what counts is how long it takes to load."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    letters = random.Random(0)
    words = ("".join(letters.choices(ascii_lowercase, k=letters.randint(3, 9))) for _ in range(200_000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def run(command: Command, patch: str, folder: Path) -> tuple[float, float]:
    """Run a command with a patch; return its wall-clock and its CPU seconds."""
    for name in command.remove:
        shutil.rmtree(folder / name, ignore_errors=True)
    code = f"import sys\nsys.argv = ['headway', *sys.argv[1:]]\n{patch}\nfrom headway.cli.main import main\nmain()"
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command.words],
            cwd=folder,
            # An installed package has bytecode.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command.words)}: exit code {process.returncode}\n{output.read().decode()}")
    return seconds, used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=[*COMMANDS], nargs="+", default=[*COMMANDS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(CONFIG)
        given = "  store: given\n  tokenizer: {path: vocabulary}\n"
        (folder / "given.yaml").write_text(CONFIG.replace("  store: store\n", given))
        (folder / "text.txt").write_text("".join(f"line {n}: a start is measured\n\n" for n in range(2000)))
        if "prepare" in options.only:
            write_vocabulary(folder / "vocabulary")
        run(Command(("data", "prepare", "config.yaml"), {}), "", folder)
        for chosen in options.only:
            measure(chosen, options.rounds, folder)


def measure(name: str, rounds: int, folder: Path) -> None:
    """Measure a command with all its tricks, and without each; print what each saves."""
    command = COMMANDS[name]
    variants = {"": "", **command.tricks}
    for patch in variants.values():  # fills caches
        run(command, patch, folder)
    found: dict[str, list[tuple[float, float]]] = {trick: [] for trick in variants}
    for _ in range(rounds):
        for trick, patch in variants.items():
            found[trick].append(run(command, patch, folder))
    wall, cpu = (statistics.median(one[kind] for one in found[""]) for kind in (0, 1))
    sys.stdout.write(f"headway {' '.join(command.words)}: {wall:.2f} s, {cpu:.2f} s of CPU\n")
    for trick in command.tricks:
        saved = [
            [without[kind] - with_it[kind] for with_it, without in zip(found[""], found[trick], strict=True)]
            for kind in (0, 1)
        ]
        spread = statistics.quantiles(saved[0], n=4) if rounds > 1 else [saved[0][0]] * 3
        sys.stdout.write(
            f"  {trick}: saves {statistics.median(saved[0]):+.2f} s ({spread[0]:+.2f} to {spread[2]:+.2f}),"
            f" {statistics.median(saved[1]):+.2f} s of CPU\n"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
