"""Training from Python leaves the process of whoever called it as it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import deterministic

import headway
from headway.config import load_config
from headway.core.errors import ConfigError
from headway.run.session.process_state import restore_process_state

#: What PyTorch's compiler and DeepSpeed set for themselves when they are loaded, and pytest for every test.
_OF_LIBRARIES = ("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "PYTEST_CURRENT_TEST")


def seen() -> dict[str, Any]:
    """What a caller could notice."""
    return {
        "threads": torch.get_num_threads(),
        "mode": torch.get_deterministic_debug_mode(),
        "fills": deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "benchmark": torch.backends.cudnn.benchmark,
        "products": torch.get_float32_matmul_precision(),
        "convolutions": torch.backends.cudnn.conv.fp32_precision,
        "recurrent": torch.backends.cudnn.rnn.fp32_precision,
        "random": torch.get_rng_state().tolist(),
        "grouped": dist.is_initialized(),
        "environment": {name: value for name, value in os.environ.items() if name not in _OF_LIBRARIES},
    }


@pytest.fixture
def before() -> Iterator[dict[str, Any]]:
    """A process that wants all of it otherwise than a run does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # as allow_tf32, which says one thing of both, cannot say it
    yield seen()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_zero1"])
def test_a_run_changes_nothing(tiny: Callable[..., Path], before: dict[str, Any], strategy: str) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="there is no DeepSpeed: pip install '.[deepspeed]'")
    for name in ("one", "two"):  # the second one finds nothing of the first
        run = headway.train(load_config(tiny(train={"steps": 2}, parallel={"strategy": strategy}, name=name)))
        assert run.step == 2
        assert seen() == before


def test_nor_does_one_that_fails(tiny: Callable[..., Path], before: dict[str, Any]) -> None:
    class Fail(headway.Callback):
        def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
            raise ConfigError("enough")

    config, model = load_config(tiny(train={"steps": 2})), torch.nn.Linear(1, 1)
    trainer = headway.Trainer(model, [torch.ones(1)] * 4, lambda m, x: m(x).mean(), config, callbacks=[Fail()])
    before = seen()
    with pytest.raises(ConfigError, match="enough"):
        trainer.fit()
    assert seen() == before


def test_nor_does_one_that_an_error_ends_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of NCCL, which others are in that do not know of the error yet."""
    destroy, ended = dist.destroy_process_group, list[str]()

    def abort() -> None:
        ended.append("aborted")
        destroy()

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("waited for the others"))
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    with pytest.raises(ConfigError, match="enough"), restore_process_state():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        raise ConfigError("enough")
    assert ended == ["aborted"] and not dist.is_initialized()


def test_the_compiler_s_switch_is_put_back_too(tiny: Callable[..., Path]) -> None:
    import torch._inductor.config as compiler

    assert "torch._inductor.config" in sys.modules and not compiler.deterministic  # type: ignore[attr-defined]
    headway.train(load_config(tiny(train={"steps": 2})))
    assert not compiler.deterministic  # type: ignore[attr-defined]
