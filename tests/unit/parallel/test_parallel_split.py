"""What several workers share, as far as one process can tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.config import Config, MeshShape, resolve_mesh
from headway.core.errors import ConfigError
from headway.models.sharding.context import SharedPositions
from headway.models.sharding.tensor_plan import decoder_plan
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World


def worker(rank: int, **degrees: int) -> World:
    mesh = MeshShape(**degrees)
    return World(rank, mesh.size, rank, torch.device("cpu"), mesh)


def test_workers_of_one_row_speak_for_it_once() -> None:
    workers = [worker(rank, dp_shard=2, cp=2, tp=2) for rank in range(8)]
    assert [w.data_rank for w in workers] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [w.replica_rank for w in workers] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [w.counts_items for w in workers] == [True, False, False, False] * 2
    assert [w.counts_loss for w in workers] == [True, False] * 4
    sharers = [worker(rank, pp=2, dp_shard=2, tp=2, ep=2) for rank in range(8)]
    assert [w.expert_replica_rank for w in sharers] == [0, 0, 1, 1, 0, 0, 1, 1]
    stages = [worker(rank, pp=2, dp_replicate=2) for rank in range(4)]
    assert [w.replica_rank for w in stages] == [0, 1, 0, 1]
    assert [w.counts_items for w in stages] == [True, True, False, False]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_workers_have_every_position_once_and_equally_dear_ones(size: int) -> None:
    length = 24 * size
    taken: list[int] = []
    for rank in range(size):
        shared = SharedPositions.__new__(SharedPositions)
        shared.rank, shared.size = rank, size
        mine = [position for start, end in shared.spans(length) for position in range(start, end)]
        assert shared.cut(torch.arange(length), 0).tolist() == mine
        assert sum(mine) == len(mine) * (length - 1) / 2, "positions seen by causal attention"
        taken += mine
    assert sorted(taken) == list(range(length))
    with pytest.raises(ValueError, match="equal parts"):
        shared.spans(length + 1)


@pytest.mark.parametrize(("degrees", "key"), [({"tp": 2}, "parallel.tensor"), ({"cp": 2}, "parallel.context")])
def test_a_model_that_does_not_say_how_it_is_cut_is_refused(degrees: dict[str, int], key: str) -> None:
    config = Config.model_validate({"train": {"steps": 1}})
    with pytest.raises(ConfigError, match="does not declare") as error:
        make_strategy(config, nn.Linear(2, 2), worker(0, **degrees))
    assert error.value.where == key


def test_a_model_without_experts_is_not_dealt_out() -> None:
    config = Config.model_validate({"train": {"steps": 1}})
    with pytest.raises(ConfigError, match="declares no experts") as error:
        make_strategy(config, nn.Linear(2, 2), worker(0, dp_shard=2, ep=2))
    assert error.value.where == "parallel.expert"


def test_a_decoder_refuses_unequal_parts() -> None:
    shape = {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 128}
    decoder_plan(Config.model_validate({"model": shape}).model, 2, [])
    for change, fix in (
        ({"kv_heads": 1}, "divides"),
        ({"ffn_dim": 75}, "divides"),
        ({"vocab_size": 301}, "model.vocab_size=320"),
    ):
        with pytest.raises(ConfigError) as error:
            decoder_plan(Config.model_validate({"model": {**shape, **change}}).model, 2, [])
        assert fix in str(error.value.fix)


def test_rows_of_any_coming_length_must_be_cut_evenly() -> None:
    values = {"train": {"steps": 9, "sequence_length": 32}, "parallel": {"context": 2, "tensor": 2}}
    values["model"] = {"dim": 32, "layers": 1, "heads": 4, "ffn_dim": 64}
    assert resolve_mesh(Config.model_validate(values), 8) == MeshShape(dp_shard=2, cp=2, tp=2)
    for length, stage in ((36, 36), (32, 4)):
        values["train"]["sequence_length"] = length
        values["data"] = {"mixture": {"stages": [{"start": 0}, {"start": "4 steps", "sequence_length": stage}]}}
        with pytest.raises(ConfigError, match="8 equal parts"):
            resolve_mesh(Config.model_validate(values), 4)
