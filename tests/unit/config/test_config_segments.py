"""What counts rows or tokens as a function of the step follows a run's segments, not its newest batch.

The right values come from a plain loop over steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.checkpoint.post_save import MaintainerSettings
from headway.config import Batches, Config, Interval, resolve
from headway.config.sections.segments import Segment, batches_of, begin, first_difference, up_to
from headway.run.session.attempt import counted_for
from headway.training.schedule import learning_rate

PART = st.tuples(st.integers(1, 20), st.integers(1, 12), st.sampled_from([1, 4, 16]))


def segment(first: int, rows: int, length: int, **values: Any) -> Segment:
    names = {"seed": 0, "steps": 900, "data": "x", "rows": {"a": {length: [99]}}, **values}
    return Segment(first_step=first, sequence_length=length, global_batch=rows, **names)


def config(**train: Any) -> Config:
    return resolve(Config.model_validate({"train": {"sequence_length": 16, "global_batch": 8, **train}}))


@settings(max_examples=60, deadline=None)
@given(st.lists(PART, min_size=1, max_size=5), st.integers(1, 9000), st.integers(1, 400))
def test_all_agrees_with_a_loop_over_steps(parts: list[tuple[int, int, int]], tokens: int, every: int) -> None:
    segments: list[Segment] = []
    loop: list[int] = []
    for steps, rows, length in parts:
        segments.append(segment(len(loop), rows, length))
        loop += [rows * length] * steps
    loop += [loop[-1]] * 9000
    before = [sum(loop[:step]) for step in range(140)]
    batches, last = batches_of(segments), parts[-1]
    assert [batches.tokens_before(step) for step in range(140)] == before
    end, total = 0, 0
    while total < tokens:
        total += loop[end]
        end += 1
    found = config(tokens=tokens, global_batch=last[1], sequence_length=last[2]).with_segments(segments)
    assert found.train.steps == batches.steps_for(tokens) == end
    # Cadences, what the process that prunes counts, and schedules.
    interval = Interval(every, "tokens")
    due = [step for step in range(1, 140) if found.train.batches.is_due(interval, step)]
    assert due == [step for step in range(1, 140) if before[step] // every > before[step - 1] // every]
    sent = replace(MaintainerSettings.of(found, 1), full_every=Interval(1, "tokens")).batches()
    assert sent is not None
    assert [sent.tokens_before(step) for step in range(140)] == before
    schedule = found.schedule.model_copy(update={"name": "linear", "warmup": 0.0, "min_ratio": 0.0, "unit": "tokens"})
    scheduled = found.model_copy(update={"schedule": schedule})
    peak = found.optimizer.learning_rate
    for step in range(0, min(end, 139), 7):
        wanted = peak * (1 - min(1.0, before[step + 1] / max(loop[0], total)))
        assert abs(learning_rate(schedule, peak, scheduled.train, step) - wanted) < 1e-12 + 1e-6 * peak


def test_an_end_in_tokens_counts_what_was_done_with_another_batch() -> None:
    """Seen: of 12,800 tokens at 128 a step, with half as many from step 20 on, 200 steps in all and not 180."""
    old, new = config(tokens=12_800), config(tokens=12_800, global_batch=4)
    assert (old.train.steps, new.train.steps) == (100, 200)
    changed = counted_for(new, old, 20)
    assert changed.train.steps == 20 + (12_800 - 20 * 128) // 64 == 180
    settled = new.with_segments([segment(0, 8, 16), segment(20, 4, 16, steps=180)])
    assert settled.train.steps == 180
    # The same command finds nothing changed, nor does one that asks for it in a process of its own.
    assert counted_for(new, settled, 40).train == settled.train
    sent = new.model_copy(update={"train": Config.model_validate(new.model_dump(mode="json")).train})
    assert sent.with_segments(settled.segments).train.steps == 200, "JSON has forgotten what was asked for"
    sent = sent.model_copy(update={"train": sent.train.asking(new.train.asked())})
    assert sent.with_segments(settled.segments).train.steps == 180
    # Steps that somebody gives later are steps.
    given_ = new.model_copy(update={"train": new.train.model_copy(update={"steps": 33})})
    assert given_.with_segments(settled.segments).train.steps == 33


def test_a_ramp_in_tokens_counts_those_of_earlier_segments() -> None:
    ramp = [{"global_batch": 2, "until": "3200 tokens"}]
    new = config(steps=300, batch_ramp=ramp)
    assert str(new.train.batch_ramp[0].until) == "100 steps"
    changed = new.with_segments([segment(0, 8, 16), segment(20, 8, 16)])  # 2,560 tokens until then
    assert str(changed.train.batch_ramp[0].until) == "40 steps"


def test_rows_of_a_dataset_count_as_many_tokens_in_every_segment() -> None:
    segments = [segment(0, 8, 1, row_tokens=16), segment(10, 4, 1, row_tokens=16)]
    assert batches_of(segments).tokens_before(12) == (80 + 8) * 16
    found = config(steps=20, global_batch=4).with_segments(segments)
    assert found.train.batches.tokens_before(12) == (80 + 8) * 16


def test_words_say_what_changes() -> None:
    batches = batches_of([segment(0, 8, 16), segment(10, 4, 8)])
    assert batches.in_words(20) == "8 rows of 16 tokens from step 0, 4 rows of 8 tokens from step 10"
    assert batches.sum_in_words(20) == "20 steps of 32 tokens from step 10 on"
    assert Batches(((0, 8),), 16).sum_in_words(20) == "20 steps of 128 tokens"
    assert batches.row_parts() == [(0, 8), (10, 4)]


def test_where_rows_begin_to_differ() -> None:
    first, second, third = segment(0, 8, 16), segment(20, 4, 16), segment(12, 2, 16)
    assert first_difference([], [first, second]) == 20
    assert first_difference([first, second], [first, second.model_copy(update={"steps": 7})]) is None
    assert begin([first, second], third) == ([first, third], 12)
    assert begin([first, second], first) == ([first], 20), "its steps behind the border are others"
    assert up_to([(3, 5), (10, 14), (15, 16)], 12) == [(3, 5), (10, 12)]
