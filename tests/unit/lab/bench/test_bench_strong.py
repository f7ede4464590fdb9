"""What reports say of strong scaling, in which all workers share one step's rows, by hand."""

from __future__ import annotations

import pytest

from headway.lab.bench.analysis import efficiency
from headway.lab.bench.findings import findings
from headway.lab.bench.results import CellResult
from support.bench import result


def strong(workers: int, speeds: list[float], cores: int = 8) -> CellResult:
    weak = result("ddp", workers, speeds, cores=cores)
    cell = weak.cell.model_copy(update={"scaling": "strong"})
    return weak.model_copy(update={"cell": cell, "key": f"{weak.key}-strong"})


ONE, TWO, FOUR = strong(1, [99.0, 100.0, 101.0]), strong(2, [178.0, 180.0, 182.0]), strong(4, [239.0, 240.0, 241.0])


def test_efficiency_is_the_speed_up_of_the_same_step_by_the_number_of_workers() -> None:
    cells = [ONE, TWO, FOUR]
    assert [efficiency(cell, cells) for cell in cells] == [None, pytest.approx(0.9), pytest.approx(0.6)]
    before, after = (cell.measured[1].mean_step_seconds for cell in (ONE, FOUR))  # of as many rows
    assert efficiency(FOUR, cells) == pytest.approx(before / after / 4)
    assert efficiency(FOUR, [TWO, FOUR]) == pytest.approx((240 / 180) / 2), "from the fewest that came out"


def test_strong_cells_are_compared_with_strong_ones_alone() -> None:
    weak = [result("ddp", workers, [speed - 1, speed, speed + 1]) for workers, speed in ((1, 50.0), (4, 180.0))]
    cells = [*weak, ONE, FOUR]
    assert [efficiency(cell, cells) for cell in (weak[1], FOUR)] == [pytest.approx(0.9), pytest.approx(0.6)]
    assert efficiency(FOUR, [*weak, FOUR]) is None
    assert findings(cells) == [
        "What follows is of 1m, fp32, micro-batches of 1 x 64 tokens.",
        "Strong scaling:",
        "- ddp does 2.40 times the tokens/s of one worker on 4 workers, 60 % of what as many times the workers would"
        " ideally do (strong scaling).",
        "Weak scaling:",
        "- ddp does 3.60 times the tokens/s of one worker on 4 workers, 90 % of what as many times the workers would"
        " ideally do (weak scaling).",
    ]


def test_what_the_cores_allow_and_what_repeats_cannot_tell_is_said_of_strong_cells_too() -> None:
    few = [strong(1, [99.0, 100.0, 101.0], 2), strong(4, [151.0, 152.0, 153.0], 2)]
    assert findings(few)[-1] == (
        "ddp does 1.52 times the tokens/s of one worker on 4 workers, 38 % of what as many times the workers would"
        " ideally do; the cores there are allow 50 % (strong scaling)."
    )
    alike = [ONE, strong(2, [91.0, 100.0, 109.0])]
    assert findings(alike)[-1] == (
        "ddp is no faster on 2 workers than on one worker that the repeats can tell, 50 % of what as many times the"
        " workers would ideally do (strong scaling)."
    )
