"""What the promises of `determinism` cost: seconds of a training step under `off`, `run` and `elastic`.

All are trained in the same worker processes and take turns step by step, in another order each round, so that whatever
else the machine does meets all of them; a price is the median, over rounds, of the ratio of two steps of one round. The
model, the batch and the row length are the quickstart's; rows are random tokens. `elastic` is measured with as many
lanes as there are workers, which is the cut that `run` has too, and with the default of up to 8 lanes, whose smaller
micro-batches cost something by themselves (`run-8`: the same cut without the promise).

On a machine that others use too, wall-clock time says little; seconds of processor time, over all workers, then tell
more of the work itself, and nothing of waiting for each other. Both are given.

    python benchmarks/train/determinism.py
    python benchmarks/train/determinism.py --workers 2 --strategy zero3 --rounds 20 --output determinism.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway.config import Config, LaneGrid, load_config, resolve_grid, resolve_mesh, resolve_threads
from headway.core.machine.cores import usable_cores
from headway.core.types import MicroBatch
from headway.models.build import build_model
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World, open_world
from headway.run.session.precision import with_precision
from headway.training.assembled import Assembled
from headway.training.optimizer import build_optimizer
from headway.training.setup.determinism import apply_determinism
from headway.training.setup.precision import apply_precision
from headway.training.state import TrainState
from headway.training.step import TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task

VOCABULARY = 8192
#: Price: (what it is the price of, what has to be paid without it), and the most that it should be.
PRICES = {"run": ("off", 1.10), "elastic": ("run", 1.25), "elastic-8": ("run-8", 1.25)}
_WARM_UP = 2


class RandomRows:
    """A feed of random tokens."""

    def __init__(self, grid: LaneGrid, length: int) -> None:
        self._grid, self._length = grid, length

    def batch(self, step: int, lane: int) -> list[MicroBatch]:
        """The micro-batches of a lane."""
        generator = torch.Generator().manual_seed(step * 1000 + lane)
        shape = (self._grid.micro_batch, self._length + 1)
        rows = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(self._grid.micro_batches)]
        return [{"ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()} for tokens in rows]


def contenders(workers: int, strategy: str, overrides: list[str]) -> dict[str, Config]:
    """The configs that are compared; where the default number of lanes is that of the workers, without `-8`."""
    shared = [
        f"parallel.workers={workers}",
        f"parallel.strategy={strategy}",
        "train.steps=1000",
        "train.micro_batch=null",
        *overrides,
    ]
    lanes = f"train.lanes={workers}"
    ways = {
        "off": ["determinism=off", lanes],
        "run": ["determinism=run", lanes],
        "elastic": ["determinism=elastic", lanes],
        "run-8": ["determinism=run", "train.lanes=8"],
        "elastic-8": ["determinism=elastic", "train.lanes=8"],
    }
    return {name: with_precision(load_config("quickstart", [*shared, *way])) for name, way in ways.items()}


def prepare(config: Config, world: World) -> Callable[[], tuple[float, float]]:
    """A run without a directory; what is returned does a step of it and tells its seconds and those of processors."""
    grid = resolve_grid(config, world.size)
    threads = resolve_threads(config, world.size, grid.lanes, usable_cores())
    model = build_model(config.model, vocab_size=VOCABULARY, seed=config.seed).to(world.device).train()
    apply_precision(config.train, model, world.device)
    feed = RandomRows(grid, config.train.sequence_length)
    strategy = make_strategy(config, model, world)
    elastic = config.determinism == "elastic"
    optimizer = build_optimizer(config.optimizer, model, world.device, strategy.owns_for_update, elastic=elastic)
    state, task = TrainState(model, optimizer), Task(model, feed, LANGUAGE_MODELLING)  # type: ignore[arg-type]
    lanes = grid.of_worker(world.data_rank, world.mesh.data)

    def step() -> tuple[float, float]:
        apply_determinism(config.determinism)
        torch.set_num_threads(threads)
        batches = {lane: feed.batch(state.cursor.step, lane) for lane in lanes}
        world.barrier()
        start, busy = time.perf_counter(), time.process_time()
        TrainStep(Assembled(config, task, state, strategy, world, grid)).run(batches)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        busy = time.process_time() - busy
        world.barrier()
        seconds = time.perf_counter() - start
        return seconds, sum(worker[0] for worker in world.gather([busy]))

    return step


def work(configs: dict[str, Config], rounds: int) -> dict[str, list[tuple[float, float]]] | None:
    """Take turns as one worker; the first one has the seconds."""
    first = next(iter(configs.values()))
    with open_world(first.train.device, 300, resolve_mesh(first, first.parallel.workers)) as world:
        steps = {name: prepare(config, world) for name, config in configs.items()}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        names = list(steps)
        for number in range(rounds + _WARM_UP):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                taken = steps[name]()
                if number >= _WARM_UP:
                    seconds[name].append(taken)
        return seconds if world.is_first else None


def summarize(seconds: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians, and prices as ratios within rounds; of the clock, and of processors."""
    kinds = {}
    for kind, place in (("clock", 0), ("processors", 1)):
        taken = {name: [pair[place] for pair in values] for name, values in seconds.items()}
        prices = {}
        for name, (base, most) in PRICES.items():
            ratios = [a / b for a, b in zip(taken[name], taken[base], strict=True)]
            prices[name] = {"over": base, "ratio": statistics.median(ratios), "most": most}
        medians = {name: statistics.median(values) for name, values in taken.items()}
        kinds[kind] = {"step_seconds": medians, "prices": prices}
    return {"rounds": len(seconds["run"]), **kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the quickstart, e.g. train.precision=bf16")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ and options.workers > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.workers)]
        sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv], check=False).returncode)
    arithmetic = ["train.precision=fp32", "optimizer.name=adamw"]
    configs = contenders(options.workers, options.strategy, [*arithmetic, *options.overrides])
    seconds = work(configs, options.rounds)
    if seconds is None:
        return
    result = summarize(seconds)
    print(f"{options.workers} workers, {options.strategy}, {result['rounds']} rounds; median seconds of a step:")
    for kind in ("clock", "processors"):
        print(f"  {kind}: " + ", ".join(f"{name} {s:.3f}" for name, s in result[kind]["step_seconds"].items()))
        for name, price in result[kind]["prices"].items():
            verdict = "ok" if price["ratio"] <= price["most"] else "TOO MUCH"
            print(f"    {name} over {price['over']}: {price['ratio']:.3f} (at most {price['most']:.2f}) {verdict}")
    if options.output:
        facts = {"workers": options.workers, "strategy": options.strategy, "overrides": options.overrides}
        machine = {"processor": platform.processor(), "cores": usable_cores(), "torch": torch.__version__}
        options.output.write_text(json.dumps({**facts, **machine, **result, "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
