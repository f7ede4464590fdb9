"""Pipeline stages: which layers form a stage, and which stages a worker has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from headway.config import ParallelConfig, TrainConfig
from headway.config.derived.pipeline import split_problems, stages_per_worker


def plan_stages(
    parallel: ParallelConfig, train: TrainConfig, layers: Sequence[float], embedding: float, head: float
) -> list[range]:
    """Return the layers of every stage: from `parallel.pipeline_split`, or so that the slowest stage is fastest.

    Args:
        layers: Cost of each layer, in any unit.
        embedding: Cost of the embedding, in the stage of the first layer.
        head: Cost of the head, in the stage of the last layer.

    Raises:
        ConfigError: there are more stages than layers, or the split does not add up to the number of layers.
    """
    for problem in split_problems(parallel, train, len(layers)):
        raise problem
    sizes = parallel.pipeline_split
    if sizes is None:
        costs = [*layers]
        costs[0] += embedding
        costs[-1] += head
        return split_evenly(costs, parallel.pipeline * stages_per_worker(parallel))
    return [range(start, end) for start, end in pairwise([0, *accumulate(sizes)])]


def split_evenly(costs: Sequence[float], stages: int) -> list[range]:
    """Cut a sequence into non-empty runs so that the largest sum is smallest.

    All micro-batches pass through all stages, so the slowest stage limits the throughput.
    """
    ends = [0.0, *accumulate(costs)]
    # For the first n elements in s runs: the largest sum, and where the last run starts.
    best = [(ends[n], 0) if n else (float("inf"), 0) for n in range(len(costs) + 1)]
    starts = []
    for s in range(1, stages):
        best = [
            min(((max(best[m][0], ends[n] - ends[m]), m) for m in range(s, n)), default=(float("inf"), 0))
            for n in range(len(costs) + 1)
        ]
        starts.append([m for _, m in best])
    end = len(costs)
    runs = []
    for row in reversed(starts):
        runs.append(range(row[end], end))
        end = row[end]
    return [range(end), *reversed(runs)]


def stages_of_worker(place: int, workers: int, stages: int) -> range:
    """Return the stage numbers of one pipeline worker; stages are assigned round-robin."""
    return range(place, stages, workers)
