"""What tests share: a small learnable corpus, a tiny config, and the command line as a user runs it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli.main import _run as run_command_line
from headway.core.coordination.heartbeat import read_heartbeat
from headway.core.errors import HeadwayError
from headway.core.process import faults as core_faults
from headway.core.process.table import STOPPED, process_state
from headway.core.process.waiting import wait_until
from support import preloaded
from support.ports import free_ports
from support.waits import LONG

#: The command line, whose supervisor leaves a worker alone that is stopped, and waits for what it tells at the end, for
#: longer than a test takes.
PATIENCE = (
    "from headway.core import alerts; from headway.run.supervisor import watchdog;"
    " watchdog._STOPPED_SECONDS = 600.0; alerts._END_SECONDS = 60.0"
)
PATIENT_HEADWAY = (sys.executable, "-c", f"{PATIENCE}; from headway.cli.main import main; main()")

WORDS = ("red", "green", "blue", "stone", "river", "cloud", "under", "over", "seven", "eight")


def skip_without(module: str, reason: str = "") -> None:
    """Skip a file of tests where a library is missing, as `pytest.importorskip` does, but without loading it.

    Each tester collects all files, and would load what takes seconds to load for tests that others run.
    """
    if find_spec(module) is None:
        pytest.skip(reason or f"there is no {module}", allow_module_level=True)


def write_corpus(folder: Path, documents: int = 60) -> Path:
    """Text with structure to learn: counting sentences whose next word follows from the last ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for document in range(documents):
            words = [WORDS[(document + 3 * position) % len(WORDS)] for position in range(120)]
            file.write(json.dumps({"text": f"{document}: " + " ".join(words)}) + "\n")
    return path


def config_values(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of seconds: about 30k parameters, dropout on, a checkpoint every two steps."""
    values: dict[str, Any] = {
        "name": "tiny",
        "runs": str(folder / "runs"),
        "seed": 3,
        "data": {
            "sources": [str(folder / "corpus.jsonl")],
            "store": str(folder / "store"),
            "tokenizer": {"vocab_size": 300},
            "validation": 0.1,
            "workers": 1,
        },
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "dropout": 0.1},
        "train": {"steps": 10, "sequence_length": 32, "global_batch": 8, "micro_batch": 1, "device": "cpu"},
        "optimizer": {"learning_rate": 1e-2},
        "parallel": {"threads": 1},
        "checkpoint": {"every": "2 steps"},
        "evaluation": {"rows": 8},
        "supervise": {"max_failures": 0},
        "telemetry": {"report": False},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(values.get(name), dict) else section
    return values


def write_config(folder: Path, **sections: Any) -> Path:
    """The config as a file."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config_values(folder, **sections)), encoding="utf-8")
    return path


def headway(
    *arguments: str | Path,
    faults: str = "",
    timeout: float = LONG,
    patient: bool = False,
    fresh: bool = False,
    strategies: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, `patient` with workers that are stopped.

    It is `fresh` where it matters that it loads everything itself; see `preloaded`. What most `strategies` load is
    loaded too where that is asked for, or where several workers train.
    """
    environment = preloaded.environment_for(HEADWAY_FAULTS=faults)
    if options.keys() <= {"cwd"} and not fresh:
        folder, before = options.get("cwd") or Path.cwd(), PATIENCE if patient else ""
        order = preloaded.Order("headway", list(map(str, arguments)), environment, str(folder), before)
        modules = _OF_STRATEGIES if strategies or _several_workers(order) else ()
        if (done := preloaded.run([order], timeout, modules)) is not None:
            return done
    command = PATIENT_HEADWAY if patient else (sys.executable, "-m", "headway")
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
        **options,
    )


def start_headway(
    *arguments: str | Path, faults: str = "", before: str = "", fresh: bool = False, strategies: bool = False
) -> preloaded.Copy | subprocess.Popen[str]:
    """Start the command line and return its process, whose standard error can be read.

    Args:
        faults: Orders for it.
        before: Code that its process executes first.
        fresh: Let it load everything itself.
        strategies: Load what most of them load, too: for several workers, each of which would do it by itself.
    """
    environment, words = preloaded.environment_for(HEADWAY_FAULTS=faults), list(map(str, arguments))
    # The tests may run under `nohup`.
    before = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n{before}\n"
    order = preloaded.Order("headway", words, environment, str(Path.cwd()), before)
    modules = _OF_STRATEGIES if strategies else ()
    if not fresh and preloaded.can_start(order, modules):
        return preloaded.Copy(order, modules)
    command = [sys.executable, "-c", f"{before}from headway.cli.main import main\nmain()", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def _several_workers(order: preloaded.Order) -> bool:
    """Whether it trains with several workers, each of which would load PyTorch's compiler for the sake of DDP."""
    if order.words[:1] != ["train"]:
        return False
    said = re.search(r"(?:^-w|^parallel\.workers=)\s?([0-9]+)$", "\n".join(order.words).replace("-w\n", "-w "), re.M)
    if said is not None:
        return int(said[1]) > 1
    configs = [Path(order.folder, word) for word in order.words[1:] if word.endswith(".yaml")]
    # As `write_config` writes it: what is in a file may also be no YAML, or no text.
    several = re.compile(rb"^parallel:\n(?:  .*\n)*?  workers: (?!1\n)", re.M)
    return any(path.is_file() and several.search(path.read_bytes()) for path in configs)


def headway_in_copy(*arguments: str | Path, seconds: int = 60, gib: float = 1.0) -> tuple[int, str]:
    """Run the command line in a copy of this process, which takes no time to start, but may not take long or much.

    Args:
        arguments: The words behind `headway`.
        seconds: After which it is killed.
        gib: How much more memory it may take than this process has.

    Returns:
        Its exit code, negative for the signal that killed it, and all that it has printed.
    """
    with tempfile.TemporaryFile() as printed:
        copy = os.fork()
        if not copy:
            code = 99
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(seconds)
                used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
                resource.setrlimit(resource.RLIMIT_DATA, (used + int(gib * 2**30),) * 2)
                for number, name in ((1, "stdout"), (2, "stderr")):
                    os.dup2(printed.fileno(), number)
                    setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace"))
                sys.argv = ["headway", *map(str, arguments)]
                code = run_command_line() or 0
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 98)
        status = os.waitpid(copy, 0)[1]
        printed.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read().decode(errors="backslashreplace")


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, error_of: Callable[[Path], OSError | None]) -> None:
    """Let files not be opened (`core.files.foreign`) of which a function gives an error: root may open any."""
    opened = os.open

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        error = error_of(Path(path))
        if error is not None:
            raise error
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)


def stopped_worker(run: Path, seconds: float = LONG) -> int:
    """The process of the first attempt's first worker, once it has stopped itself (`freeze`)."""
    found: list[int] = []

    def has_stopped() -> bool:
        reading = read_heartbeat(run / "attempts/001/heartbeat-0")
        state = process_state(reading.pid) if reading is not None else None
        if state is not None and state.state == STOPPED:
            found.append(state.pid)
        return bool(found)

    assert wait_until(has_stopped, seconds), "it was to stop itself"
    return found[0]


def torchrun(workers: int, *command: str | Path, timeout: float = LONG) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m` and a module, in so many workers that torchrun starts (one without it); it must succeed."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)] if workers > 1 else []
    result = subprocess.run(
        [sys.executable, *start, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=preloaded.environment_for(OMP_NUM_THREADS=1),
        check=False,
    )
    assert result.returncode == 0, result.stderr[-9000:]
    return result


#: What most workers of strategies load, PyTorch's compiler among them.
_OF_STRATEGIES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "headway.parallel.fsdp",
    "headway.parallel.pipeline",
)


def run_workers(workers: int, script: Path, *words: str | Path, timeout: float = LONG) -> str:
    """Run a script in so many workers that find each other as under torchrun, but load nothing first; all of them must
    succeed. Returns what they say on standard error."""
    (port,) = free_ports(1)
    meeting = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    orders = []
    for rank in range(workers):
        variables = {**meeting, "RANK": rank, "LOCAL_RANK": rank} if workers > 1 else {}
        environment = preloaded.environment_for(**variables)
        orders.append(preloaded.Order(str(script), list(map(str, words)), environment, str(Path.cwd())))
    done = preloaded.run(orders, timeout, _OF_STRATEGIES)
    if done is None:
        return torchrun(workers, script, *words, timeout=timeout).stderr
    assert done.returncode == 0, f"{done.stderr[:6000]}\n...\n{done.stderr[-6000:]}"
    return done.stderr


def in_child(action: Callable[[], object], faults: str = "") -> int:
    """Run something in a forked child, which costs a hundredth of a new process; its exit code, negative for a signal.

    An error of Headway has its own code, any other has 1.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ["HEADWAY_FAULTS"] = faults
            core_faults._passed.clear()
            action()
            code = 0
        except HeadwayError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def manifest(run: Path, step: int | None = None) -> dict[str, Any]:
    """Manifest of a checkpoint, the newest when no step is given."""
    folders = sorted((run / "checkpoints").glob("step-*"))
    folder = folders[-1] if step is None else run / "checkpoints" / f"step-{step:08d}"
    return json.loads((folder / "manifest.json").read_text())  # type: ignore[no-any-return]


def state_hash(run: Path, step: int | None = None) -> str:
    """SHA-256 over weights, moments and cursor of a checkpoint."""
    return str(manifest(run, step)["state_sha256"])


def saved_step(run: Path) -> int:
    """The step of the newest checkpoint that is there, 0 if there is none: retention removes those before it."""
    return max((int(path.parent.name[5:]) for path in run.glob("checkpoints/step-*/manifest.json")), default=0)


def store_contents(folder: Path) -> dict[str, bytes]:
    """The files of a token store, without what only preparation needs."""
    names = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in names.items() if not name.startswith(".work/")}
