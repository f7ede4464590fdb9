"""However training is started on one machine, nobody else can reach it: it listens on the loopback interface alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import write_config, write_corpus
from support.sockets import Listener, Sockets

HEADWAY = (sys.executable, "-m", "headway")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "headway")
#: A kill of a worker, and of the one in its place: every start is seen.
AGAIN = {"HEADWAY_FAULTS": "kill@step=2%1"}

#: Has every Python note what it looks up for a pickle (an audit event of the standard library).
_NOTES_PICKLES = """
import os, sys

def note(text):
    with open(os.environ["PICKLES"], "a") as file:
        file.write(text + "\\n")

note("a process began")
sys.addaudithook(lambda event, args: note(f"unpickled {args}") if event == "pickle.find_class" else None)
"""


@pytest.fixture
def sockets(tmp_path: Path) -> Sockets:
    return Sockets(tmp_path)


def open_ones(found: list[Listener]) -> list[Listener]:
    return [listener for listener in found if listener.is_open]


def test_the_look_itself_sees_every_kind_of_door(sockets: Sockets) -> None:
    script = """
import socket
tcp, six, udp, path = (socket.socket(*kind) for kind in (
    (socket.AF_INET,), (socket.AF_INET6,), (socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX,)))
tcp.bind(("127.0.0.1", 0)); tcp.listen(); six.bind(("::", 0)); six.listen(); udp.bind(("0.0.0.0", 0))
path.bind("\\0headway-test"); path.listen()
"""
    found = sockets.of(sys.executable, "-c", script)
    assert {(one.host, one.is_open) for one in found} == {
        ("127.0.0.1", False), ("::", True), ("0.0.0.0", True), ("abstract", True),
    }  # fmt: skip


@pytest.mark.slow
def test_two_workers_that_are_started_again_meet_without_a_door_or_a_pickle(
    sockets: Sockets, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    config, unpickled = tiny(supervise={"max_failures": 1}), tmp_path / "unpickled"
    (tmp_path / "sitecustomize.py").write_text(_NOTES_PICKLES)
    python = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    found = sockets.of(*HEADWAY, "train", config, "-w", "2", variables={**AGAIN, **python, "PICKLES": str(unpickled)})
    assert "a process began" in unpickled.read_text() and "unpickled" not in unpickled.read_text()
    assert len(list((tmp_path / "runs/tiny/attempts").iterdir())) == 2
    assert not open_ones(found), found
    # What gloo listens on: without a line of it nobody would have looked.
    assert len({listener.pid for listener in found}) == 4


def test_one_worker_listens_on_nothing(sockets: Sockets, tiny: Callable[..., Path]) -> None:
    assert sockets.of(*HEADWAY, "train", tiny(train={"steps": 2})) == []


_TRAINER = """
import sys
import torch
import headway

model = torch.nn.Linear(1, 1)
rows = [(torch.tensor([x]), torch.tensor([2 * x])) for x in (0.0, 1.0, 2.0, 3.0)]
loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
headway.Trainer(model, rows, loss, headway.load_config(sys.argv[1])).fit()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [
        ("train", "-w", "1:2", "determinism=elastic", "train.lanes=2"),
        ("train", "parallel.strategy=zero3", "-w", "2"),
        ("profile", "parallel.workers=2", "--steps", "2", "--warmup", "1"),
        ("train", "train.steps=2", "supervise.enabled=false"),
        ("train", "train.compile=true", "train.steps=2"),
        ("verify", "--steps", "4", "determinism=elastic", "train.lanes=2", "--other-workers", "2"),
        ("chaos", "--kills", "2", "--workers", "1,2", "determinism=elastic", "train.lanes=2"),
        ("data", "prepare", "data.workers=2"),
        ("plan",),
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_every_verb_on_one_machine(
    sockets: Sockets, tmp_path: Path, tiny: Callable[..., Path], command: tuple[str, ...]
) -> None:
    config = tiny()
    if command[0] == "data":
        write_corpus(tmp_path / "texts")
        config = write_config(tmp_path / "texts")
    verb, words = (command[:2], command[2:]) if command[0] == "data" else (command[:1], command[1:])
    found = sockets.of(*HEADWAY, *verb, config, *words)
    assert not open_ones(found), found


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_deepspeed_listens_on_the_loopback_interface_alone(
    sockets: Sockets, tiny: Callable[..., Path], workers: str
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    found = sockets.of(*HEADWAY, "train", tiny(), "parallel.strategy=deepspeed_zero1", "-w", workers)
    assert found and not open_ones(found), found


@pytest.mark.slow
def test_trainer_in_a_script(sockets: Sockets, tmp_path: Path, tiny: Callable[..., Path]) -> None:
    (tmp_path / "script.py").write_text(_TRAINER)
    assert sockets.of(sys.executable, tmp_path / "script.py", tiny(train={"global_batch": 4})) == []


@pytest.mark.slow
def test_bench_and_doctor(sockets: Sockets, tmp_path: Path) -> None:
    suite = {
        "strategy": ["ddp"], "workers": 2, "model": "1m", "micro_batch": 1, "sequence_length": 32, "vocab_size": 256,
        "warmup_steps": 1, "steps": 1, "profiled_steps": 0, "repeats": 1,
        "config": {"train": {"device": "cpu"}, "parallel": {"threads": 1}},
    }  # fmt: skip
    (tmp_path / "suite.yaml").write_text(repr(suite))
    found = sockets.of(*HEADWAY, "bench", tmp_path / "suite.yaml", "--output", tmp_path / "out")
    assert found and not open_ones(found), found
    found = sockets.of(*HEADWAY, "doctor", "--communication", "-w", "2", "--device", "cpu", "--sizes", "4Ki")
    assert found and not open_ones(found), found


@pytest.mark.slow
def test_under_torchrun_the_open_port_is_torchruns(sockets: Sockets, tiny: Callable[..., Path]) -> None:
    """Its store, which the documentation says; what Headway's workers listen on is local there too."""
    found = sockets.of(*TORCHRUN, "train", tiny())
    theirs = [listener for listener in found if "torch.distributed.run" in listener.command]
    assert open_ones(theirs) == open_ones(found)
    assert len({listener.pid for listener in found} - {listener.pid for listener in theirs}) == 2
