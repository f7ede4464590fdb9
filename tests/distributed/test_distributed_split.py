"""Workers that share matrices (tensor parallelism) or rows (context parallelism) train the same model as one alone."""

from __future__ import annotations

from collections.abc import Callable

from support_trials import Trials, close

TENSOR, CONTEXT = "parallel.tensor=2", "parallel.context=2"


def test_matrices_and_rows_shared_between_workers(trials: Callable[..., Trials]) -> None:
    runs = trials()
    runs.add("single", 1)
    names = [runs.add("tp", 2, TENSOR), runs.add("cp", 2, CONTEXT)]
    runs.run()
    expected = runs.losses("single")
    for n in names: print(n, runs.losses(n)); 
    print(expected)
    assert not [(name, runs.losses(name)) for name in names if not close(runs.losses(name), expected)]
