import pytest
import torch
from torch import nn

from headway.config import Config
from headway.core.errors import ConfigError
from headway.parallel.ddp import DataParallel, ElasticDataParallel
from headway.parallel.strategy import Single, make_strategy
from headway.parallel.world import World, pick_device

ONE = World(0, 1, 0, torch.device("cpu"))
TWO = World(0, 2, 0, torch.device("cpu"))


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
    spread = strategy(model, ONE)
    for _ in range(2):  # the second step must not see the first one's gradients
        spread.begin()
        for number, batch in enumerate(batches):
            with spread.micro_batch(last=number == 3):
                model(batch).square().sum().backward()
            spread.end_lane()
        spread.reduce()
        for p, gradient in zip(model.parameters(), expected[0], strict=True):
            torch.testing.assert_close(p.grad, gradient)
