"""The machine's ceilings: matrix products, a copy in memory, a sum over workers.

All workers measure at the same time, since they also share the machine while they train.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from headway.core.machine.memory import host_memory
from headway.core.machine.system import Machine
from headway.lab.profiling.record import AllReduce, Ceilings, Product
from headway.parallel.world import World, synchronize
from headway.telemetry.arithmetic import cpu_multiplies_bf16
from headway.telemetry.hardware import device_name, peak_flops

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
#: Sizes of square products by device; larger ones only while one takes less than `_LONGEST_SECONDS`.
_SIZES = {"cuda": (4096, 8192)}
_SIZES_ELSEWHERE = (512, 1024, 2048, 4096)
_LONGEST_SECONDS = 0.4
#: Minimum number of repeats, and their duration; the best one counts, since other processes may use the machine.
_LEAST_REPEATS = 4
_MEASURED_SECONDS = 0.3
#: Shorter products are too short to be timed one by one.
_LARGE_FLOPS = 1e8
_COPY_BYTES = {"cuda": 2**30}
_COPY_BYTES_ELSEWHERE = 128 * 2**20
_ALL_REDUCE_BYTES = 64 * 2**20


def measure_ceilings(world: World, precision: str, gradient_bytes: int) -> Ceilings:
    """Measure the ceilings for a few seconds; all workers must call this function.

    Args:
        precision: Value of `train.precision`. "fp8" is measured in bf16, the dtype of all other tensors; bf16 is
            measured in fp32 if the CPU is no faster with bf16.
        gradient_bytes: Size for the sum over workers, up to 64 MiB.
    """
    device = world.device
    world.barrier()
    measured = "bf16" if precision == "fp8" else precision
    if device.type == "cpu" and measured == "bf16" and not cpu_multiplies_bf16():
        measured = "fp32"  # the slower dtype is no ceiling
    rate, size = _products(device, _DTYPES.get(measured, torch.float32))
    world.barrier()
    copied = _copy(device)
    return Ceilings(
        products_flops_per_second=rate,
        products=f"{measured} products of {size:,} x {size:,}",
        peak_flops_per_second=peak_flops(device_name(device), precision),
        copy_bytes_per_second=copied,
        all_reduce=_all_reduce(world, min(max(gradient_bytes, 4), _ALL_REDUCE_BYTES)) if world.size > 1 else None,
    )


def raised_by(products: Sequence[Product], ceilings: Ceilings) -> Ceilings:
    """Raise the ceiling of products if the steps themselves had faster ones.

    Other processes may have used the machine during the measurement.
    """
    large = [product for product in products if product.flops >= _LARGE_FLOPS]
    fastest = max(large, key=lambda product: product.flops / product.seconds, default=None)
    if fastest is None or fastest.flops / fastest.seconds <= ceilings.products_flops_per_second:
        return ceilings
    rate = fastest.flops / fastest.seconds
    precision = ceilings.products.split()[0]
    text = f"{precision} products of {fastest.shape} in the run itself"
    return ceilings.model_copy(update={"products_flops_per_second": rate, "products": text})


def _products(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Return the best FLOP/s and the width of the matrices that reached it."""
    best = (0.0, 0)
    sizes = _SIZES.get(device.type, _SIZES_ELSEWHERE)
    room = _free_bytes(device)
    for size in (sizes[0], *(size for size in sizes[1:] if 6 * 4 * size**2 < room)):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = min(_times(device, lambda a=a, b=b, out=out: torch.mm(a, b, out=out)))  # type: ignore[misc]
        best = max(best, (2 * size**3 / seconds, size))
        # The next one takes eight times as long.
        if 8 * seconds > _LONGEST_SECONDS:
            break
    return best


def _copy(device: torch.device) -> float:
    """Return the bytes read and written per second."""
    count = min(_COPY_BYTES.get(device.type, _COPY_BYTES_ELSEWHERE), _free_bytes(device) // 4)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * count / min(_times(device, lambda: target.copy_(source)))


def _free_bytes(device: torch.device, machine: Machine | None = None) -> int:
    """Return how much memory can be used without ending the run, whose memory is still allocated."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    found = host_memory(machine or Machine())
    if found is not None and found.available_bytes is not None:
        return found.available_bytes // 4
    import psutil  # for systems other than Linux

    return int(psutil.virtual_memory().available) // 4


def _all_reduce(world: World, count: int) -> AllReduce:
    tensor = torch.zeros(count // 4, dtype=torch.float32, device=world.device)
    seconds = statistics.median(_times(world.device, lambda: dist.all_reduce(tensor), world.barrier))
    return AllReduce(bytes=tensor.nbytes, seconds=seconds)


def _times(device: torch.device, work: Callable[[], object], before: Callable[[], None] | None = None) -> list[float]:
    """Return the seconds of several repeats, without the first one, which warms up."""
    seconds: list[float] = []
    while len(seconds) <= _LEAST_REPEATS or (before is None and sum(seconds) < _MEASURED_SECONDS):
        if before is not None:  # a collective: all workers must repeat it equally often
            before()
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
