"""The measurement of a cell in one of its workers: train, and combine the figures of all workers into one result."""

from __future__ import annotations

import os
import statistics
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from headway.config import Config, find_strategy, resolve_lanes, resolve_mesh
from headway.core.coordination.launched import world_size_from_environment
from headway.core.errors import ConfigError, HeadwayError
from headway.core.statistics import quantile
from headway.lab.bench.blocks import block
from headway.lab.bench.meter import Meter, begin_memory, host_to_device, product_flops
from headway.lab.bench.results import CellResult, Communication, Energy, Measurement, Status
from headway.lab.bench.spec import Spec
from headway.lab.bench.synthetic import SyntheticFeed
from headway.models.facts import part_costs
from headway.parallel.world import World
from headway.run.session.assemble import assemble
from headway.run.session.grid import common_threads
from headway.run.session.join import join_workers
from headway.telemetry.hardware import device_name, peak_flops
from headway.training.job import Job
from headway.training.loop import train_loop
from headway.training.own_task import build_task, own_run_task
from headway.training.setup.compiling import compile_model
from headway.training.setup.precision import begin_scaling
from headway.training.setup.trial import is_out_of_memory
from headway.training.staged import check_model_is_cut
from headway.training.state_writer import NoWriter
from headway.training.task import Task, decoder_task, language_model_task


def measure(spec: Spec) -> None:
    """Join the other workers, train, and return the result, or the reason why there is none."""
    told = False
    try:
        config = spec.config
        size = world_size_from_environment() or 1
        if size != spec.result.cell.workers:
            raise ConfigError(f"{size} workers were started for a cell of {spec.result.cell.workers}")
        with join_workers(config, resolve_mesh(config, size)) as world:
            try:
                found = _trained(spec, world)
                if world.is_first:
                    _say(spec.ended("ok", measured=found))
            except Exception as error:
                # Report before the process group ends here: errors that others meet because of that come later.
                told = True
                _print_end(spec, error)
                raise
    except Exception as error:
        if not told:
            _print_end(spec, error)
        raise


def _trained(spec: Spec, world: World) -> Measurement:
    config = spec.config
    grid = resolve_lanes(config, world.mesh.data)
    threads = common_threads(config, world, grid)
    torch.set_num_threads(threads)
    _import_libraries(config, world.device)
    resident = begin_memory()
    task = _task(spec, world)
    check_model_is_cut(task, world)
    parameters = task.facts()["parameters"]
    assembled = assemble(config, task, world, grid, threads)
    begin_scaling(assembled.state.cursor, config.train.precision)
    world.broadcast_(task.model.buffers())
    if config.train.compile:
        compile_model(config.parallel, task.model, config.train.compile_mode)
    meter = Meter(spec.warmup_steps, spec.steps, spec.profiled_steps)
    train_loop(Job(assembled, NoWriter(), callbacks=[meter]))
    world.barrier()
    own = {
        "resident_before": resident,
        **meter.memory,
        "tensors": meter.tensor_peak_bytes,
        "communication": meter.communication,
        "joules": meter.joules,
        "gpu_utilization": meter.gpu_utilization,
        "host_to_device": host_to_device(world.device),
        "products": product_flops(world.device, config.train.precision),
    }
    return _measurement(
        spec,
        task,
        meter,
        world.device,
        threads=threads,
        parameters=parameters,
        workers=world.gather_json(own),
    )


def _task(spec: Spec, world: World) -> Task:
    config = spec.config
    grid = resolve_lanes(config, world.mesh.data)
    if spec.data == "store":
        task = language_model_task(config, grid, world.mesh, world.rank)
        task.evaluation = None
        return task
    if config.task is not None:
        task = own_run_task(config, build_task(config), grid, world.mesh, world.rank)
        task.evaluation = None
        return task
    feed = SyntheticFeed(config.seed, spec.vocab_size, config.train.sequence_length, grid)
    return decoder_task(
        config.model,
        config.train,
        config.parallel,
        feed,
        spec.vocab_size,
        seed=config.seed,
        attention_length=config.train.sequence_length,
        mesh=world.mesh,
        rank=world.rank,
    )


def _import_libraries(config: Config, device: torch.device) -> None:
    """Import what a strategy imports at its first use, so that it does not count as memory of training."""
    strategy = find_strategy(config.parallel.strategy)
    names = ["torch.profiler", strategy.build.partition(":")[0]]
    if strategy.is_deepspeed:
        os.environ["DS_ACCELERATOR"] = device.type  # set before the import, as the strategy does
    if strategy.needs is not None:
        names.append(strategy.needs.module)
    if config.train.compile:
        names.append("torch._dynamo")
    for name in names:
        import_module(name)


def _measurement(
    spec: Spec,
    task: Task,
    meter: Meter,
    device: torch.device,
    *,
    threads: int,
    parameters: int,
    workers: Sequence[dict[str, Any]],
) -> Measurement:
    """Combine the figures of all workers into one measurement."""
    config = spec.config
    name = device_name(device)
    tokens_per_second = meter.items / meter.seconds
    flops = task.flops_per_item
    peak = peak_flops(name, config.train.precision)
    achieved = flops * tokens_per_second if flops else None
    mfu = achieved / (peak * len(workers)) if achieved and peak else None
    told = {name: [worker[name] for worker in workers] for name in workers[0]}
    products = None if None in told["products"] else sum(told["products"])
    # On GPUs PyTorch counts memory itself.
    memory = [worker["allocated"] or worker["tensors"] for worker in workers]
    known = [worker for worker in workers if None not in (worker["resident"], worker["resident_before"])]
    growths = [max(0, worker["resident"] - worker["resident_before"]) for worker in known]
    uses = told["gpu_utilization"]
    gpu_utilization = [share for use in uses for share in use] if all(uses) else []
    copies = [rate for rate in told["host_to_device"] if rate is not None]
    return Measurement(
        device=name,
        device_type=device.type,
        threads=threads,
        parameters=parameters,
        items=meter.items,
        step_seconds=[round(seconds, 9) for seconds in meter.step_seconds],
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_device=tokens_per_second / len(workers),
        mean_step_seconds=meter.seconds / len(meter.step_seconds),
        p50_step_seconds=quantile(meter.step_seconds, 0.5),
        p95_step_seconds=quantile(meter.step_seconds, 0.95),
        mean_loss=meter.mean_loss,
        skipped_steps=meter.skipped_steps,
        peak_memory_bytes=_most(memory),
        peak_memory_bytes_by_worker=memory,
        peak_reserved_bytes=_most(told["reserved"]),
        peak_resident_bytes=_most(told["resident"]),
        resident_growth_bytes=_most(growths),
        host_to_device_gb_per_second=statistics.fmean(copies) if copies else None,
        flops_per_token=flops,
        model_flops_per_second=achieved,
        mfu=mfu,
        hfu=_hfu(config, task, flops, mfu),
        measured_product_flops_per_second=products,
        share_of_measured_products=achieved / products if achieved and products else None,
        communication=_communication(spec, told["communication"]),
        energy=_energy(meter, told["joules"]),
        gpu_utilization_mean=statistics.fmean(gpu_utilization) if gpu_utilization else None,
        gpu_utilization_p95=quantile(gpu_utilization, 0.95) if gpu_utilization else None,
    )


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _hfu(config: Config, task: Task, flops: float | None, mfu: float | None) -> float | None:
    """Return hardware FLOPs utilisation (Chowdhery et al. 2022, appendix B), which includes recomputation in the
    backward pass.

    `full` computes the forward pass of every layer twice, a third of what training on it takes. What `selective`
    recomputes does not count here.
    """
    kind = config.train.activation_checkpointing
    if mfu is None or flops is None or kind == "selective":
        return None
    if kind == "none":
        return mfu
    model: Any = task.model
    # All layers but the vocabulary projection, with attention over as many positions as in `flops`.
    again = (flops - part_costs(model.config, config.train.sequence_length).head) / 3
    return mfu * (flops + again) / flops


def _communication(spec: Spec, shares: Sequence[Sequence[float] | None]) -> Communication | None:
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return None
    exposed, overlapped = (statistics.fmean(share[i] for share in known) for i in (0, 1))
    return Communication(
        steps=spec.profiled_steps,
        total_share=exposed + overlapped,
        exposed_share=exposed,
        overlapped_share=overlapped,
    )


def _energy(meter: Meter, joules: Sequence[float | None]) -> Energy | None:
    """Return the energy of all workers' GPUs; for processors, the reading of the first worker of each machine."""
    known = [amount for amount in joules if amount is not None]
    if not known or meter.energy_source is None or ("GPU" in meter.energy_source and len(known) < len(joules)):
        return None
    return Energy(joules=sum(known), source=meter.energy_source)


def _print_end(spec: Spec, error: Exception) -> None:
    """Print why this worker ends."""
    traceback.print_exc()
    rank = os.environ.get("RANK", "0")
    status: Status = "failed"
    cause: BaseException = error.__cause__ or error
    if is_out_of_memory(cause):
        status = "out_of_memory"
    elif isinstance(error, ConfigError):
        status = "refused"
    if isinstance(error, HeadwayError):
        reason = error.what + (f" ({error.fix})" if error.fix else "")
    else:
        reason = f"worker {rank}: {type(error).__name__}: {error}"
    _say(spec.ended(status, reason[:2000]))


def _say(result: CellResult) -> None:
    sys.stderr.flush()
    # One write, so that lines of several workers do not mix.
    sys.stdout.write("\n" + block(result.model_dump(mode="json")) + "\n")
    sys.stdout.flush()
