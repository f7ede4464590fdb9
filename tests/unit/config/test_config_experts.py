"""What experts that are dealt out to workers ask of a config."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import Config, MeshShape, resolve_mesh
from headway.config.derived.experts import decoder_problems, parallel_problems, sharding_problems
from headway.core.errors import ConfigError

MODEL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 64, "experts": 8}


def config(**sections: Any) -> Config:
    values = {"train": {"steps": 2}, "model": MODEL, "parallel": {"expert": 2}}
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(section, dict) and name in values else section
    return Config.model_validate(values)


def test_who_shares_experts_and_who_has_the_same() -> None:
    assert resolve_mesh(config(), 4) == MeshShape(dp_shard=4, ep=2)
    mesh = resolve_mesh(config(parallel={"tensor": 2, "context": 2, "expert": 4}, train={"sequence_length": 64}), 8)
    assert mesh == MeshShape(dp_shard=2, cp=2, tp=2, ep=4) and mesh.expert_replicas == 2
    assert str(mesh) == "dp_shard 2 x cp 2 x tp 2, experts on 4"
    assert MeshShape(**mesh.arrangement) == mesh
    # What a checkpoint of a run without expert parallelism says has not changed.
    assert MeshShape(dp_shard=2).arrangement == MeshShape(dp_shard=2).sizes


@pytest.mark.parametrize(
    ("sections", "neighbours", "message", "fix"),
    [
        ({"parallel": {"expert": 3}}, 4, "over 3 of 4 workers", "parallel.expert=2"),
        ({"determinism": "elastic"}, 2, "lane by lane", "determinism=run"),
        ({"optimizer": {"offload": True}}, 2, "parts of some", "optimizer.offload=false"),
        ({"train": {"micro_batch": "auto"}}, 2, "in every step the routers decide", "train.micro_batch=1"),
    ],
)
def test_what_they_cannot_be_dealt_out_with(sections: dict[str, Any], neighbours: int, message: str, fix: str) -> None:
    (problem,) = sharding_problems(config(**sections), neighbours)
    assert message in problem.what and fix in str(problem.fix)
    assert not list(sharding_problems(config(**{**sections, "parallel": {"expert": 1}}), neighbours))


@pytest.mark.parametrize(
    ("sections", "message", "fix"),
    [
        ({"parallel": {"expert": 3}}, "8 experts cannot be shared evenly by 3", "parallel.expert=2"),
        ({"parallel": {"strategy": "deepspeed_zero3"}}, "which DeepSpeed would scale", "parallel.strategy=zero3"),
        ({"parallel": {"strategy": "single", "tensor": 4}}, "sums no gradients", "parallel.expert=4"),
    ],
)
def test_what_experts_do_not_go_with(sections: dict[str, Any], message: str, fix: str) -> None:
    (problem,) = parallel_problems(config(**sections))
    assert message in problem.what and fix in str(problem.fix)


def test_a_dense_decoder_has_nothing_to_deal_out() -> None:
    (problem,) = decoder_problems(config(model={"experts": None}))
    assert "no experts" in problem.what and problem.fix == "parallel.expert=1, or set model.experts"


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"optimizer": {"name": "adafactor"}}, "optimizer.name, parallel.expert"),
        (
            {"parallel": {"compression": "powersgd", "expert": 2}, "determinism": "off"},
            "parallel.compression, parallel.expert",
        ),
        ({"determinism": "elastic"}, "determinism, parallel.expert"),
    ],
)
def test_a_mesh_with_experts_refuses_what_wants_whole_tensors_or_lanes(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_mesh(config(**sections), 2)
    assert error.value.where == key
