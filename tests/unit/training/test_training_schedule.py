import pytest

from headway.config import Config
from headway.training.schedule import learning_rate


def config(**schedule: object) -> Config:
    values = {"train": {"steps": 100}, "optimizer": {"learning_rate": 1.0}, "schedule": schedule}
    return Config.model_validate(values).resolved()


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    c = config(name="cosine", warmup="10 steps")
    assert [learning_rate(c, step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])


def test_cosine_ends_at_the_floor() -> None:
    c = config(name="cosine", warmup="10 steps", min_ratio=0.1)
    assert learning_rate(c, 99) == pytest.approx(0.1)
    assert learning_rate(c, 54) == pytest.approx(0.55)
    rates = [learning_rate(c, step) for step in range(9, 100)]
    assert rates == sorted(rates, reverse=True)


def test_wsd_is_level_and_then_falls_linearly() -> None:
    c = config(name="wsd", warmup=0.1, decay=0.2, min_ratio=0.0)
    assert {learning_rate(c, step) for step in range(10, 80)} == {1.0}
    assert learning_rate(c, 89) == pytest.approx(0.5)
    assert learning_rate(c, 99) == 0.0


def test_constant_with_no_warm_up() -> None:
    assert {learning_rate(config(name="constant", warmup=0), step) for step in range(100)} == {1.0}


def test_lengths_can_be_tokens() -> None:
    values = {
        "train": {"steps": 100, "global_batch": 4, "sequence_length": 8},
        "optimizer": {"learning_rate": 1.0},
        "schedule": {"warmup": "320 tokens"},
    }
    c = Config.model_validate(values).resolved()
    assert learning_rate(c, 9) == 1.0 > learning_rate(c, 8)
