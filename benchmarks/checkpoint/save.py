"""What a checkpoint costs: how long training stands still, and how long until the state is safe on the disk.

Ours against `torch.save`, the safetensors library, PyTorch's distributed checkpointing (`save`, and `async_save` with a
thread and with a process), Lightning and the Trainer of Hugging Face, all on the same state of one worker: the weights
and AdamW's two moments of a stack of matrices, in fp32. All take turns in rounds; medians are shown.

Two floors: `copy` copies the state within memory (what a stall cannot be below), `disk` writes as many bytes to one
file and flushes it, as programs write files. `disk direct` does that past the page cache, from memory where the bytes
lie as the disk wants them: nothing is safe sooner, and it is how we write large files. `durable` says whether a method
flushes what it wrote; those that do not are safe from a crash of the program only, and their totals are shown as they
are and with a flush after.

The host of a virtual machine takes back memory that is not used, and to get it again for the page cache takes up to
three times as long as to write it to the disk. It hits whoever asks first, so totals of what goes through the page
cache are spread widely there, the floor's too; the quickest rounds are those that had memory, and their ratio is told
besides that of the medians. `--only copy disk headway` is quick enough for many rounds.

A stall or a total beyond its limit is told as MISSED, and the exit code is 1 then.

Lightning and the Trainer need an environment of their own, whose Python is given with `--peers`; they run in it in the
same rounds.

    python benchmarks/checkpoint/save.py --only copy disk headway --rounds 15
    python benchmarks/checkpoint/save.py --megabytes 600 --rounds 5 --peers peers/bin/python --output save.json
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.save.messages import WriterSettings
from headway.checkpoint.save.writer import CheckpointWriter
from headway.core.types import Block

#: What the stall may be of the copy, and the total of the disk's floor.
STALL_LIMIT = TOTAL_LIMIT = 1.2
_WIDTH, _DIRECT_BYTES = 1024, 16 * 2**20


@dataclass
class Measured:
    """One save."""

    stall_seconds: float
    total_seconds: float


State = dict[str, torch.Tensor]
Method = Callable[[State, Path, int], Measured]


def make_state(megabytes: int) -> State:
    """Weights and moments, in as many matrices of 4 MiB as there is room for."""
    generator = torch.Generator().manual_seed(0)
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * _WIDTH**2)))
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return {f"{kind}.{i}": torch.randn(_WIDTH, _WIDTH, generator=generator) for kind in kinds for i in range(layers)}


def flush(folder: Path) -> None:
    """Bring to the disk what a method left in the page cache."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(action: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def blocking(write: Callable[[State, Path], object]) -> Method:
    """A method that returns when it has written: all of it is a stall."""

    def save(state: State, folder: Path, step: int) -> Measured:
        seconds = timed(lambda: write(state, folder))
        return Measured(seconds, seconds)

    return save


class Ours:
    """A writer as training has it: its memory is ready before the first save, and lives as long as the run."""

    def __init__(self, state: State, folder: Path) -> None:
        self._folder = folder / "checkpoints"
        self._writer = CheckpointWriter(WriterSettings(self._folder, keep=1))
        self._writer.get_ready({name: Block.whole(tensor) for name, tensor in state.items()})
        time.sleep(2.0)  # the pages come on a thread; a run has at least an interval of time for it

    def save(self, state: State, folder: Path, step: int) -> Measured:
        """Hand over, then wait as nobody does but who measures."""
        start = time.perf_counter()
        blocks = {name: Block.whole(tensor) for name, tensor in state.items()}
        stall = self._writer.submit(step, blocks, {"step": step}, {"attempt": 1})
        self._writer.wait()
        total = time.perf_counter() - start
        while len(list(self._folder.iterdir())) > 1:  # the old one goes after that, here as elsewhere before the next
            time.sleep(0.01)
        return Measured(stall, total)

    def close(self) -> None:
        """End the process beside."""
        self._writer.close()


def distributed(kind: str) -> Method:
    """PyTorch's distributed checkpointing; `kind` is save, thread or process."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(state: State, folder: Path, step: int) -> Measured:
        start = time.perf_counter()
        if kind == "save":
            dcp.save(state, checkpoint_id=folder)
            stall = time.perf_counter() - start
        else:
            future: Any = dcp.async_save(
                state, checkpoint_id=folder, async_checkpointer_type=AsyncCheckpointerType[kind.upper()]
            )
            stall = time.perf_counter() - start
            future.result()
        return Measured(stall, time.perf_counter() - start)

    return save


def copy_floor(state: State, folder: Path, step: int, _room: State = {}) -> Measured:  # noqa: B006 - memory in use
    """The state copied to memory that is there."""
    if not _room:
        _room.update({name: tensor.clone() for name, tensor in state.items()})

    def copy() -> None:
        for name, tensor in state.items():
            _room[name].copy_(tensor)

    seconds = timed(copy)
    return Measured(seconds, seconds)


def disk_floor(state: State, folder: Path, step: int) -> Measured:
    """The same bytes, one after the other, in one file, flushed."""

    def write() -> None:
        with (folder / "floor").open("wb", buffering=0) as file:
            for tensor in state.values():
                file.write(tensor.numpy().data)
            os.fsync(file.fileno())

    seconds = timed(write)
    return Measured(seconds, seconds)


def direct_floor(state: State, folder: Path, step: int, _room: list[mmap.mmap] = []) -> Measured:  # noqa: B006
    """The same from memory that is laid out for it, past the page cache."""
    if not _room:
        _room.append(mmap.mmap(-1, sum(tensor.nbytes for tensor in state.values()) // 4096 * 4096))
        for tensor in state.values():
            _room[0].write(tensor.numpy().data.cast("B")[: len(_room[0]) - _room[0].tell()])
    content = memoryview(_room[0])
    descriptor = os.open(folder / "floor", os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))

    def write() -> None:
        done = 0
        while done < len(content):
            done += os.write(descriptor, content[done : done + _DIRECT_BYTES])
        os.fsync(descriptor)

    seconds = timed(write)
    os.close(descriptor)
    return Measured(seconds, seconds)


class Peer:
    """A library in an environment of its own, which saves when it is told to."""

    def __init__(self, python: str, name: str, megabytes: int) -> None:
        script = Path(__file__).parent / "peers" / f"{name}.py"
        self._process = subprocess.Popen(
            [python, str(script), str(megabytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.works = self._answer() == {"ready": True}

    def save(self, state: State, folder: Path, step: int) -> Measured:
        """Have it save to a folder."""
        assert self._process.stdin is not None
        print(folder, file=self._process.stdin, flush=True)
        seconds = float(self._answer()["seconds"])
        return Measured(seconds, seconds)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(
    methods: dict[str, Method], durable: set[str], state: State, folder: Path, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Take turns, each round beginning with another: what one leaves in memory and on the disk's queue tells on the
    next. The first round is not counted."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        names = list(methods)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            save = methods[name]
            # All keep what they have saved until the next one is there, as a run does. It is no detail: memory that a
            # removed file has just left costs the next one nothing.
            target = folder / name / str(number)
            target.mkdir(parents=True)
            os.sync()
            result = save(state, target, number + 1)
            flushed = 0.0 if name in durable else timed(lambda target=target: flush(target))  # type: ignore[misc]
            shutil.rmtree(folder / name / str(number - 1), ignore_errors=True)
            if number:
                found[name].append({**vars(result), "flushed_seconds": result.total_seconds + flushed})
            print(f"round {number}: {name} {result.stall_seconds:.3f} s", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=600, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder if not given")
    parser.add_argument("--peers", default=None, help="Python that has lightning and transformers with accelerate")
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    parser.add_argument(
        "--only", nargs="+", default=None, metavar="METHOD", help="those alone, as the table names them"
    )
    options = parser.parse_args()
    import safetensors.torch

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="headway-save-") as name:
        folder, state = Path(name), make_state(options.megabytes)
        (folder / "headway").mkdir()
        ours = Ours(state, folder / "headway")
        methods: dict[str, Method] = {
            "copy": copy_floor,
            "disk": disk_floor,
            "disk direct": direct_floor,
            "headway": ours.save,
            "torch.save": blocking(lambda state, folder: torch.save(state, folder / "state.pt")),
            "safetensors": blocking(
                lambda state, folder: safetensors.torch.save_file(state, str(folder / "state.safetensors"))
            ),
            "dcp": distributed("save"),
            "dcp async (thread)": distributed("thread"),
            "dcp async (process)": distributed("process"),
        }
        missing = []
        peers = {}
        for peer in ("lightning", "transformers"):
            made = Peer(options.peers, f"{peer}_peer", options.megabytes) if options.peers else None
            if made is not None and made.works:
                peers[peer], methods[peer] = made, made.save
            else:
                missing.append(peer)
        if options.only:
            if not {"copy", "disk", "headway"} <= set(options.only) <= methods.keys():
                parser.error(f"--only takes copy, disk, headway and any others of {', '.join(methods)}")
            methods = {name: methods[name] for name in options.only}
        # PyTorch's file system writer flushes (sync_files=True is its default).
        durable = {"copy", "disk", "disk direct", "headway", "dcp", "dcp async (thread)", "dcp async (process)"}
        found = measure(methods, durable, state, folder, options.rounds)
        ours.close()
        for made in peers.values():
            made.close()
    medians = {n: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for n, runs in found.items()}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    quickest = {name: min(run["total_seconds"] for run in runs) for name, runs in found.items()}
    _show(medians, durable, missing, nbytes)
    kept = promises(medians, quickest)
    for promise in kept:
        verdict = "met" if promise["times"] <= promise["at_most"] else "MISSED"
        print(f"{promise['what']}: {promise['times']:.2f} times, {verdict} (at most {promise['at_most']})")
    record = {
        "bytes": nbytes,
        "promises": kept,
        "medians": medians,
        "rounds": found,
        "missing": missing,
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if options.output:
        options.output.write_text(json.dumps(record, indent=1))
    if any(promise["times"] > promise["at_most"] for promise in kept):
        sys.exit(1)


def promises(medians: dict[str, dict[str, float]], quickest: dict[str, float]) -> list[dict[str, Any]]:
    """How many times as long as the floors we take, and as we may."""
    ours = medians["headway"]
    times = {
        "stall of a copy": (ours["stall_seconds"] / medians["copy"]["stall_seconds"], STALL_LIMIT),
        "total of the disk's floor": (ours["total_seconds"] / medians["disk"]["total_seconds"], TOTAL_LIMIT),
        "the same of the quickest rounds": (quickest["headway"] / quickest["disk"], TOTAL_LIMIT),
    }
    return [{"what": what, "times": ratio, "at_most": limit} for what, (ratio, limit) in times.items()]


def _show(medians: dict[str, dict[str, float]], durable: set[str], missing: list[str], nbytes: int) -> None:
    ours = medians["headway"]
    print(f"{nbytes / 1e6:.0f} MB, medians; load {os.getloadavg()[0]:.1f}")
    print(f"{'':22}{'stall s':>9}{'x ours':>8}{'total s':>9}{'flushed s':>11}{'x ours':>8}  durable")
    for name, row in medians.items():
        stall, total = row["stall_seconds"], row["flushed_seconds"]
        print(
            f"{name:22}{stall:9.3f}{stall / ours['stall_seconds']:8.1f}{row['total_seconds']:9.3f}{total:11.3f}"
            f"{total / ours['flushed_seconds']:8.1f}  {'yes' if name in durable else 'no'}"
        )
    for name in missing:
        print(f"{name:22}{'n/a':>9}")


if __name__ == "__main__":
    main()
