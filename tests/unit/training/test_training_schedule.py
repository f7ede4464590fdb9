from itertools import pairwise

import pytest

from headway.config import Config, resolve
from headway.training.schedule import learning_rate as rate_of


def learning_rate(config: Config, step: int) -> float:
    return rate_of(config.schedule, config.optimizer.learning_rate, config.train, step)


def config(**schedule: object) -> Config:
    values = {"train": {"steps": 100}, "optimizer": {"learning_rate": 1.0}, "schedule": schedule}
    return resolve(Config.model_validate(values))


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


def test_a_decay_that_is_longer_than_what_warm_up_leaves_falls_from_the_peak() -> None:
    c = config(name="wsd", warmup=0.4, decay="90 steps", min_ratio=0.0)
    assert [learning_rate(c, step) for step in (39, 54, 69, 99)] == pytest.approx([1.0, 0.75, 0.5, 0.0])


def test_constant_with_no_warm_up() -> None:
    assert {learning_rate(config(name="constant", warmup=0), step) for step in range(100)} == {1.0}


def ramped(**schedule: object) -> Config:
    """20 steps of 4 rows, 60 of 16: 320 and 3840 tokens, in all 4160."""
    train = {"steps": 80, "global_batch": 16, "sequence_length": 4}
    ramp = [{"global_batch": 4, "until": "20 steps"}]
    values = {"train": {**train, "batch_ramp": ramp}, "optimizer": {"learning_rate": 1.0}, "schedule": schedule}
    return resolve(Config.model_validate(values))


def test_progress_in_tokens_with_a_batch_ramp() -> None:
    by_steps, by_tokens = (
        ramped(name="linear", warmup=0, min_ratio=0),
        ramped(name="linear", warmup=0, min_ratio=0, unit="tokens"),
    )
    assert learning_rate(by_steps, 19) == pytest.approx(1 - 20 / 80)
    assert learning_rate(by_tokens, 19) == pytest.approx(1 - 320 / 4160)
    assert learning_rate(by_tokens, 49) == pytest.approx(1 - (320 + 30 * 64) / 4160)
    # A share is one of tokens, an amount is what it is: 320 + 96 tokens are 10 %, and 640 ones end with step 25.
    assert learning_rate(ramped(name="constant", warmup=0.1, unit="tokens"), 19) == pytest.approx(320 / 416)
    assert learning_rate(ramped(name="constant", warmup="640 tokens", unit="tokens"), 21) == pytest.approx(448 / 640)
    assert learning_rate(ramped(name="constant", warmup="640 tokens"), 21) == pytest.approx(22 / 25)
    # The last 640 tokens are ten steps; in a run that ends in its ramp they are more.
    falling = ramped(name="wsd", warmup=0, decay="640 tokens", min_ratio=0)
    assert learning_rate(falling, 69) == 1.0 and learning_rate(falling, 74) == pytest.approx(0.5)


def test_a_rate_can_follow_the_square_root_of_the_batch() -> None:
    c = ramped(name="constant", warmup=0, batch_scaling="sqrt")
    assert learning_rate(c, 19) == pytest.approx(0.5) and learning_rate(c, 20) == 1.0


def test_lengths_can_be_tokens() -> None:
    values = {
        "train": {"steps": 100, "global_batch": 4, "sequence_length": 8},
        "optimizer": {"learning_rate": 1.0},
        "schedule": {"warmup": "320 tokens"},
    }
    c = resolve(Config.model_validate(values))
    assert learning_rate(c, 9) == 1.0 > learning_rate(c, 8)


def test_linear_falls_evenly_to_the_floor() -> None:
    c = config(name="linear", warmup="10 steps", min_ratio=0.1)
    assert [learning_rate(c, step) for step in (9, 54, 99)] == pytest.approx([1.0, 0.55, 0.1])
    rates = [learning_rate(c, step) for step in range(9, 100)]
    assert [a - b for a, b in pairwise(rates)] == pytest.approx([0.01] * 90)


def test_rsqrt_is_the_transformers_schedule() -> None:
    """d^-0.5 * min(step^-0.5, step * warmup^-1.5), equation 3 of Vaswani et al. 2017, scaled to its peak."""
    c = config(name="rsqrt", warmup="16 steps", min_ratio=0.0)
    paper = [min(step**-0.5, step * 16**-1.5) for step in range(1, 101)]
    assert [learning_rate(c, step) for step in range(100)] == pytest.approx([rate / max(paper) for rate in paper])
    assert learning_rate(config(name="rsqrt", warmup=0, min_ratio=0.0), 3) == pytest.approx(0.5)


def test_rsqrt_stops_at_the_floor_and_does_not_depend_on_the_number_of_steps() -> None:
    c = config(name="rsqrt", warmup="4 steps", min_ratio=0.4)
    assert learning_rate(c, 99) == pytest.approx(0.4) and learning_rate(c, 15) == pytest.approx(0.5)
    values = {"train": {"steps": 7}, "optimizer": {"learning_rate": 1.0}, "schedule": c.schedule.model_dump()}
    short = resolve(Config.model_validate(values))
    assert [learning_rate(short, step) for step in range(7)] == [learning_rate(c, step) for step in range(7)]


def test_infinite_cools_down_stays_and_decays_at_the_end() -> None:
    """As section 7.4 of Ibrahim et al. 2024 has it, by numbers of their formulas."""
    c = config(name="infinite", warmup=0.1, cooldown=0.3, constant_ratio=0.5, decay=0.2, min_ratio=0.05)
    assert [learning_rate(c, step) for step in (4, 9)] == pytest.approx([0.5, 1.0])
    assert learning_rate(c, 24) == pytest.approx(0.75)
    assert {round(learning_rate(c, step), 12) for step in range(39, 80)} == {0.5}
    assert learning_rate(c, 89) == pytest.approx(0.5 * 0.1**0.5)
    assert learning_rate(c, 99) == pytest.approx(0.05)


def test_a_decay_that_begins_before_the_end_of_the_cool_down_continues_from_there() -> None:
    c = config(name="infinite", warmup=0, cooldown=0.6, constant_ratio=0.5, decay=0.7, min_ratio=0.05)
    rates = [learning_rate(c, step) for step in range(100)]
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0.05)
    assert rates[29] == pytest.approx(0.75)


def test_a_final_decay_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="exponential"):
        config(name="infinite", min_ratio=0.0)


def test_re_warming_begins_at_a_share_of_the_peak() -> None:
    c = config(name="cosine", warmup="10 steps", start_ratio=0.2)
    assert [learning_rate(c, step) for step in (0, 4, 9)] == pytest.approx([0.28, 0.6, 1.0])
