"""Communication between workers: collectives by size, over gloo or NCCL, and clock differences."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.core.console import progress
from headway.core.coordination.launched import workers_of_this_machine
from headway.core.errors import HeadwayError
from headway.core.process.faults import fault_point
from headway.lab.doctor.bandwidth import BUS_FACTORS, ClockOffset, Communication, Measurement, clock_offset, measurement
from headway.parallel.collectives import all_gather, reduce_scatter
from headway.parallel.world import World, open_world, synchronize
from headway.run.session.network import apply_nccl_profile, assert_same_profile

_WARM_UP = 3
_FEWEST = 5
_MOST = 200
_ELEMENT_BYTES = 4  # fp32
_ROUND_TRIPS = 10


@dataclass(frozen=True)
class Plan:
    """The measurements to make."""

    device: str
    sizes_bytes: tuple[int, ...]
    seconds: float = 1.0
    """Approximate duration per collective and size."""
    timeout_seconds: int = 60
    nccl_profile: str = "auto"
    determinism: str = "run"
    """Level of determinism of the runs to measure for: with `off`, switches may add."""


class CommunicationFailed(HeadwayError):
    """Workers could not communicate, or got wrong results."""

    exit_code = 1


def measure_communication(plan: Plan) -> Communication:
    """Measure as one of the workers that a launcher has started; all get the same result.

    Raises:
        CommunicationFailed: another worker is lost, does not answer in time, or a sum is wrong.
        HeadwayError: the workers do not find each other in time.
        ConfigError: the device is missing, or the NCCL profile does not fit.
    """
    profile = apply_nccl_profile(plan.nccl_profile, plan.device, plan.determinism)
    try:
        with open_world(plan.device, plan.timeout_seconds) as world:
            assert_same_profile(world, profile)
            total = len(BUS_FACTORS) * len(plan.sizes_bytes)
            with progress("measuring", total, "collectives") as bar:
                measurements = []
                for operation in BUS_FACTORS:
                    for size in plan.sizes_bytes:
                        measurements.append(_measure(world, operation, size, plan.seconds))
                        bar.advance()
            return Communication(
                workers=world.size,
                machines=max(1, world.size // workers_of_this_machine(world.size)),
                device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
                backend="nccl" if world.device.type == "cuda" else "gloo",
                nccl_profile=profile.name,
                measurements=tuple(measurements),
                clocks=_clock_offsets(world),
            )
    except RuntimeError as error:  # PyTorch raises it for any failure between workers
        # Strip the source location and the advice that gloo adds.
        said = re.sub(r"^\[[^\]]*\]\s*", "", (str(error).splitlines() or ["no reason given"])[0]).split(". ")[0]
        rank = os.environ.get("RANK", "?")
        raise CommunicationFailed(
            f"worker {rank} lost the others: {said}",
            where=f"torch.distributed, {type(error).__name__}",
            fix="see the errors of the other workers; causes are a firewall, a wrong interface (NCCL_SOCKET_IFNAME,"
            " GLOO_SOCKET_IFNAME) or a killed worker",
        ) from error


def _measure(world: World, operation: str, size_bytes: int, budget_seconds: float) -> Measurement:
    each = max(1, -(-size_bytes // (_ELEMENT_BYTES * world.size)))
    run, _ = _collective(world, operation, each, 0.0)  # zeros, since repeated sums of others would overflow
    last = 0.0
    for _ in range(_WARM_UP):
        last = _timed(world, run)
    slowest = max(worker[0] for worker in world.gather([last]))
    repeats = min(_MOST, max(_FEWEST, int(budget_seconds / max(slowest, 1e-6))))
    mine = []
    for _ in range(repeats):
        fault_point(f"communication.worker-{world.rank}")
        mine.append(_timed(world, run))
    seconds = [max(times) for times in zip(*world.gather(mine), strict=True)]
    _check(world, operation, each)
    return measurement(operation, each * world.size * _ELEMENT_BYTES, world.size, seconds)


def _timed(world: World, run: Callable[[], object]) -> float:
    """Return the seconds of one collective on this worker, after a common start."""
    world.barrier()
    start = time.perf_counter()
    run()
    synchronize(world.device)
    return time.perf_counter() - start


def _collective(world: World, operation: str, each: int, value: float) -> tuple[Callable[[], object], torch.Tensor]:
    """Return the call, on tensors with one value, and its result; `each` elements are one worker's part."""
    whole = torch.full((each * world.size,), value, device=world.device)
    part = torch.full((each,), value, device=world.device)
    if operation == "all-reduce":
        return lambda: dist.all_reduce(whole), whole
    if operation == "all-gather":
        return lambda: all_gather(whole, part), whole
    assert operation == "reduce-scatter"
    return lambda: reduce_scatter(part, whole), part


def _check(world: World, operation: str, each: int) -> None:
    """Run one more collective on numbers whose result is known."""
    n = world.size
    run, result = _collective(world, operation, each, world.rank + 1.0)
    run()
    expected = torch.full_like(result, n * (n + 1) / 2)
    if operation == "all-gather":
        expected = torch.arange(1.0, n + 1.0, device=world.device).repeat_interleave(each)
    right = torch.equal(result, expected)
    wrong = [rank for rank, (said,) in enumerate(world.gather([float(right)])) if not said]
    if wrong:
        raise CommunicationFailed(
            f"{operation} of {each * n * _ELEMENT_BYTES:,} bytes gave a wrong result on worker {wrong[0]}",
            where=f"{len(wrong)} of {n} workers",
            fix="do not train here: check the GPU and the network of that worker",
        )


def _clock_offsets(world: World) -> tuple[ClockOffset, ...]:
    """Measure the clock of every worker against the first, one after the other to avoid interference."""
    mine = ClockOffset(world.rank, 0.0, 0.0)
    for other in range(1, world.size):
        world.barrier()
        stamp = torch.zeros(1, dtype=torch.float64)
        if world.rank == 0:
            for _ in range(_ROUND_TRIPS):
                dist.recv(stamp, src=other)
                stamp[0] = time.time()
                dist.send(stamp, dst=other)
        elif world.rank == other:
            stamps = []
            for _ in range(_ROUND_TRIPS):
                sent = time.time()
                dist.send(stamp, dst=0)
                dist.recv(stamp, src=0)
                stamps.append((sent, float(stamp[0]), time.time()))
            mine = clock_offset(other, stamps)
    gathered = world.gather([mine.seconds, mine.uncertainty_seconds])
    return tuple(ClockOffset(rank, *pair) for rank, pair in enumerate(gathered))
