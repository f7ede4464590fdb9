import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.config import Config, MeshShape
from headway.core.errors import ConfigError
from headway.core.requirements import install_command
from headway.parallel.ddp import DataParallel, ElasticDataParallel
from headway.parallel.strategy import Single, make_strategy
from headway.parallel.world import World, pick_device

ONE = World(0, 1, 0, torch.device("cpu"))
TWO = World(0, 2, 0, torch.device("cpu"), MeshShape(dp_shard=2))


def config(**values: object) -> Config:
    return Config.model_validate({"train": {"steps": 1}, **values})


def test_auto_takes_the_strategy_that_fits_the_workers() -> None:
    assert isinstance(make_strategy(config(), nn.Linear(2, 2), ONE), Single)
    assert isinstance(make_strategy(config(), nn.Linear(2, 2), TWO), DataParallel)
    assert isinstance(make_strategy(config(determinism="elastic"), nn.Linear(2, 2), ONE), ElasticDataParallel)


def test_single_refuses_more_workers() -> None:
    with pytest.raises(ConfigError, match="single"):
        make_strategy(config(parallel={"strategy": "single"}), nn.Linear(2, 2), TWO)


def test_running_statistics_are_refused_where_they_would_differ() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    make_strategy(config(), model, ONE)
    for world, determinism in ((TWO, "run"), (ONE, "elastic")):
        with pytest.raises(ConfigError, match="running statistics") as error:
            make_strategy(config(determinism=determinism), model, world)
        assert error.value.where == "module '1'"
    make_strategy(config(), nn.BatchNorm1d(2, track_running_stats=False), TWO)
    with pytest.raises(ConfigError, match="running statistics"):
        make_strategy(config(), nn.InstanceNorm1d(2, track_running_stats=True), TWO)


def test_deepspeed_that_is_not_installed_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="deepspeed") as error:
        make_strategy(config(parallel={"strategy": "deepspeed_zero2"}), nn.Linear(2, 2), ONE)
    assert error.value.fix == install_command("deepspeed")


def test_deepspeed_refuses_a_parameter_that_it_cannot_hold() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="without dimensions") as error:
        make_strategy(config(parallel={"strategy": "deepspeed_zero2"}), model, ONE)
    assert error.value.where == "parameter 'scale'"


def test_a_device_that_is_not_there_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no cuda device"):
            pick_device("cuda")
    assert pick_device("cpu").type == "cpu"


@pytest.mark.parametrize("strategy", [Single, DataParallel, ElasticDataParallel])
def test_gradients_after_reduce_are_the_sum_over_all_lanes(strategy: type) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batches = [torch.randn(2, 4) for _ in range(4)]
    expected = [torch.autograd.grad(model(torch.cat(batches)).square().sum(), list(model.parameters()))]
    spread = strategy(model, ONE, config())
    for _ in range(2):  # the second step must not see the first one's gradients
        spread.begin()
        for number, batch in enumerate(batches):
            with spread.micro_batch(last_of_lane=True, last=number == 3):
                model(batch).square().sum().backward()
            spread.end_lane()
        spread.reduce()
        for p, gradient in zip(model.parameters(), expected[0], strict=True):
            torch.testing.assert_close(p.grad, gradient)


@pytest.mark.parametrize("strategy", [Single, DataParallel, ElasticDataParallel])
def test_a_parameter_without_a_gradient_has_one_of_zero(strategy: type) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    spread = strategy(model, ONE, config())
    spread.begin()
    with spread.micro_batch(last_of_lane=True, last=True):
        model[0](torch.ones(1, 2)).sum().backward()
    spread.end_lane()
    spread.reduce()
    assert all(p.grad is not None and not p.grad.any() for p in model[1].parameters())


class Counting(nn.Module):
    """Keeps state of its own, as spectral norms and codebooks do."""

    def __init__(self, replace: bool) -> None:
        super().__init__()
        self.linear, self.replace = nn.Linear(2, 1), replace
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache += 1
        if self.replace:
            self.count = self.count + 1
        else:
            self.count += 1
        return self.linear(x)


@pytest.mark.parametrize("replace", [False, True])
def test_a_buffer_that_a_forward_pass_changes_is_refused(replace: bool) -> None:
    model = Counting(replace)
    spread = ElasticDataParallel(model, ONE, config())
    spread.begin()
    model.count.add_(1)  # between steps, by a callback
    spread.begin()
    model.linear(torch.ones(1, 2)).sum().backward()
    spread.end_lane()
    spread.reduce()
    spread.begin()
    model(torch.ones(1, 2)).sum().backward()
    spread.end_lane()
    with pytest.raises(ConfigError, match="buffer 'count'"):
        spread.reduce()


class _Sent:
    def wait(self) -> None:
        pass


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-entrant checkpointing finishes a shared parameter once per use; what comes late would be lost."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: _Sent())
    shared = nn.Linear(2, 2)
    spread = DataParallel(shared, TWO, config())
    x = torch.ones(1, 2, requires_grad=True)
    for reentrant in (False, True):
        spread.begin()
        hidden = checkpoint(shared, x, use_reentrant=reentrant)
        loss = checkpoint(shared, hidden, use_reentrant=reentrant).sum()
        with spread.micro_batch(last_of_lane=True, last=True):
            if reentrant:
                with pytest.raises(RuntimeError, match="second gradient"):
                    loss.backward()
            else:
                loss.backward()
                spread.reduce()
                shared(x).sum().backward()  # a later run with other strategies: the hooks keep still


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_what_powersgd_keeps_of_a_step_that_is_left_out_never_comes_back(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_to_add(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr("torch.distributed.all_reduce", nothing_to_add)
    monkeypatch.setattr("headway.parallel.ownership.Ownership.share", nothing_to_add)
    parallel = {"strategy": strategy, "compression": "powersgd", "powersgd_rank": 1}

    def gradients(factors: list[float]) -> list[torch.Tensor]:
        """Of steps whose loss has these factors; the last one's. A step that is not finite is left out."""
        torch.manual_seed(0)
        model, x = nn.Linear(8, 6), torch.randn(5, 8)
        spread = make_strategy(config(parallel=parallel, determinism="off"), model, TWO)
        for factor in factors:
            spread.begin()
            with spread.micro_batch(last_of_lane=True, last=True):
                (model(x).square().sum() * factor).backward()
            spread.reduce()
            if factor == 1:
                spread.after_update()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first = gradients([1])
    for left_out in (float("nan"), 1e6):
        for one, other in zip(first, gradients([1, left_out, 1]), strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(first[0], gradients([1, 1])[0]), "of any other step it does"
