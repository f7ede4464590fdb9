import json
import os
from pathlib import Path
from typing import Any

import pytest

from headway.config import Config, resolve
from headway.config.derived.deepspeed import engine_settings
from headway.core.errors import ConfigError


@pytest.fixture(autouse=True)
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")


def config(path: Path | None = None, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "train": {"steps": 1, "global_batch": 8, "micro_batch": 2, "max_grad_norm": 0.5, "device": "cpu"},
        "parallel": {"strategy": "deepspeed_zero2", "workers": 2, "deepspeed_config": path},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section} if name in values and isinstance(section, dict) else section
    return Config.model_validate(values)


def refusals(path: Path | None = None, **sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(config(path, **sections))
    return error.value.render()


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(**settings: Any) -> Path:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(settings))
        return path

    return write


def test_ours_follows_from_the_config() -> None:
    settings = engine_settings(resolve(config()), 2)
    assert settings["train_batch_size"] == 8
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["zero_optimization"] == {"stage": 2}
    assert "torch_autocast" not in settings
    bf16 = engine_settings(resolve(config(train={"precision": "bf16"})), 2)
    assert bf16["torch_autocast"]["dtype"] == "bfloat16"


def test_what_a_file_says_besides_is_passed_on(file: Any) -> None:
    path = file(
        train_batch_size=8,
        train_micro_batch_size_per_gpu="auto",
        gradient_clipping=0.5,
        bf16={"enabled": "auto"},
        fp16={"enabled": False},
        steps_per_print=7,
        wall_clock_breakdown=False,
        zero_optimization={
            "stage": 2,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
    )
    settings = engine_settings(resolve(config(path, optimizer={"offload": True})), 2)
    assert settings["steps_per_print"] == 7
    assert settings["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    assert settings["gradient_clipping"] == 0.0 and "bf16" not in settings and "fp16" not in settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_batch_size": 16}, ["sets train_batch_size to 16", "makes it 8", "train.global_batch=16"]),
        ({"train_micro_batch_size_per_gpu": 1}, ["train.micro_batch=1"]),
        ({"gradient_accumulation_steps": 9}, ["sets gradient_accumulation_steps to 9", "makes it 2"]),
        ({"gradient_clipping": 1.0}, ["sets gradient_clipping to 1.0", "train.max_grad_norm=1.0"]),
        ({"zero_optimization": {"stage": 3}}, ["parallel.strategy=deepspeed_zero3"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, ["'optimizer'", "optimizer.learning_rate"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["'scheduler'", "schedule.name"]),
        ({"bf16": {"enabled": True}}, ["'bf16'", "train.precision=bf16"]),
        ({"fp16": {"loss_scale": 0}}, ["'fp16'"]),
        ({"gradient_allreduce_op": "sum"}, ["'gradient_allreduce_op'"]),
        ({"sequence_parallel_size": 2}, ["'sequence_parallel_size'"]),
        ({"zero_optimization": {"compute_grad_norm": False}}, ["compute_grad_norm"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ["nvme", "written from memory"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["optimizer.offload=true"]),
    ],
)
def test_a_file_that_contradicts_is_refused_by_key(file: Any, settings: dict[str, Any], words: list[str]) -> None:
    message = refusals(file(**settings))
    assert "parallel.deepspeed_config" in message
    assert all(word in message for word in words), message


def test_all_contradictions_are_told_at_once(file: Any) -> None:
    message = refusals(file(train_batch_size=16, gradient_clipping=9, scheduler={"type": "WarmupLR"}))
    assert message.startswith("error: 3 problems")


def test_a_key_that_is_switched_off_or_agrees_is_no_contradiction(file: Any) -> None:
    resolve(
        config(
            file(
                sequence_parallel_size=1,
                gradient_allreduce_op="mean",
                elasticity={"enabled": False},
                optimizer=None,
                zero_optimization={"compute_grad_norm": True, "offload_param": {"device": "none"}},
            )
        )
    )


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    assert "parallel.deepspeed_config" in refusals(path)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"determinism": "elastic", "train": {"micro_batch": 1}},
            ["elastic", "number of workers", "parallel.strategy=zero2"],
        ),
        ({"optimizer": {"name": "muon"}}, ["flat pieces", "muon"]),
        ({"train": {"compile": True}}, ["train.compile=false"]),
        ({"parallel": {"strategy": "ddp", "deepspeed_config": "x.json"}}, ["does not use a DeepSpeed config"]),
        ({"parallel": {"context": 2}}, ["all workers are data parallel"]),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], words: list[str]) -> None:
    message = refusals(**sections)
    assert all(word in message for word in words), message
