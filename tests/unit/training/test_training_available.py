"""What a machine lacks, and what it has in vain."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.api import train
from headway.config import Config, MeshShape, find_strategy, load_config, resolve
from headway.core.errors import ConfigError
from headway.core.machine.system import Machine
from headway.run.session import join, preview
from headway.training.setup import available
from headway.training.setup.available import check_attention, check_available, unused_gpus
from headway.training.setup.compiling import compile_model
from headway.training.setup.determinism import determinism_restored

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def config(determinism: str = "run", **train: object) -> Config:
    return resolve(Config.model_validate({"determinism": determinism, "train": {"steps": 1, **train}}))


def check(wanted: Config, device: torch.device) -> None:
    check_available(wanted.train, wanted.optimizer, find_strategy(wanted.parallel.strategy), device)


def machine(folder: Path, devices: int, **environment: str) -> Machine:
    for index in range(devices):
        place = folder / f"sys/bus/pci/devices/0000:0{index}:00.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text("0x10de\n")
        (place / "class").write_text("0x030200\n")
    return Machine(root=folder, environment=environment)


def test_gpus_that_cannot_be_used_are_no_secret(tmp_path: Path) -> None:
    two = machine(tmp_path / "two", 2)
    said = unused_gpus(config().train, CPU, two)
    assert said is not None and "this run is on cpu" in said and "the 2 NVIDIA GPUs" in said and "doctor" in said
    assert unused_gpus(config(device="cpu").train, CPU, two) is None, "as asked for"
    assert unused_gpus(config().train, GPU, two) is None
    assert unused_gpus(config().train, CPU, machine(tmp_path / "none", 0)) is None
    for hidden in ("", "-1"):
        assert (
            unused_gpus(config().train, CPU, machine(tmp_path / f"hidden{hidden}", 1, CUDA_VISIBLE_DEVICES=hidden))
            is None
        )
    assert unused_gpus(config().train, CPU, machine(tmp_path / "shown", 1, CUDA_VISIBLE_DEVICES="0")) is not None


def test_they_are_told_of_before_a_run_and_when_it_begins(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(available, "unused_gpus", lambda config, device: f"GPUs in vain beside the {device.type}")
    wanted = load_config(tiny(), ["supervise.enabled=false", "train.steps=1"])
    preview.preview(wanted)
    assert capsys.readouterr().err.count("GPUs in vain beside the cpu") == 1
    train(wanted)
    assert capsys.readouterr().err.count("GPUs in vain beside the cpu") == 1


@pytest.mark.parametrize("determinism", ["run", "off"])
def test_nccl_is_told_what_the_run_promises(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, determinism: str
) -> None:
    asked: list[tuple[object, ...]] = []

    def apply(*arguments: object, topology: str | None) -> None:
        asked.append(arguments)
        raise KeyError

    monkeypatch.setattr(join, "apply_nccl_profile", apply)
    wanted = load_config(tiny(), [f"determinism={determinism}"])
    with determinism_restored(), pytest.raises(KeyError), join.join_workers(wanted, MeshShape()):
        pass
    assert asked == [("auto", "cpu", determinism)]


@pytest.mark.parametrize(
    ("found", "compiler", "headers", "lacking"),
    [
        ("gcc", None, True, None),
        ("clang", None, True, None),
        (None, "/opt/cc", True, None),
        (None, None, True, "needs a C compiler,"),
        ("gcc", None, False, "needs Python's header files,"),
        (None, None, False, "needs a C compiler and Python's header files,"),
    ],
)
def test_compiling_for_gpus_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: str | None,
    compiler: str | None,
    headers: bool,
    lacking: str | None,
) -> None:
    """In a slim container Triton would end the run with a traceback, after the data are there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(available.shutil, "which", lambda name: f"/usr/bin/{name}" if name == found else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler:
        monkeypatch.setenv("CC", compiler)
    if headers:
        (tmp_path / "Python.h").touch()
    if lacking is None:
        check(config(compile=True), GPU)
        return
    with pytest.raises(ConfigError, match=lacking) as error:
        check(config(compile=True), GPU)
    assert "train.compile=false" in (error.value.fix or "")
    for compiles, device in ((True, CPU), (False, GPU), ("auto", GPU)):
        check(config(compile=compiles), device)


@pytest.mark.parametrize(
    ("attention", "precision", "device", "lacks"),
    [
        ("flash_attention_2", "bf16", CPU, "needs a GPU, and the device is cpu"),
        ("flash_attention_3", "fp32", GPU, "computes in bf16 or fp16, and train.precision is fp32"),
        ("flash_attention_2", "bf16", GPU, None),
        ("flex", "fp32", CPU, "has no backward pass on a CPU"),
        ("flex", "fp32", GPU, None),
        ("eager", "fp32", CPU, None),
    ],
)
def test_attention_needs_its_device_and_precision(
    attention: str, precision: str, device: torch.device, lacks: str | None
) -> None:
    if lacks is None:
        check_attention(attention, precision, device)
        return
    with pytest.raises(ConfigError, match=lacks):
        check_attention(attention, precision, device)


def test_the_mode_of_compiling_is_passed_on_and_breaks_no_promise() -> None:
    class Noted(torch.nn.Linear):
        def compile(self, *args: object, **options: object) -> None:
            found.append(options)

    found: list[dict[str, object]] = []
    for wanted in (True, "max-autotune", "max-autotune-no-cudagraphs"):
        settings = config(compile=wanted, determinism="off")
        assert settings.train.compiles
        compile_model(settings.parallel, Noted(2, 2), settings.train.compile_mode)
    modes = [options["mode"] for options in found]
    assert modes == [None, "max-autotune", "max-autotune-no-cudagraphs"]
    for promise in ("run", "elastic"):
        with pytest.raises(ConfigError, match="may compute other bits than determinism"):
            config(compile="max-autotune", determinism=promise)
    with pytest.raises(ConfigError, match="cannot keep it in host memory"):
        config(compile=True, activation_checkpointing="offload")
