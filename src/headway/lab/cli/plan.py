"""`headway plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.config import Config
from headway.config.arguments import ConfigArgument, OverridesArgument, load, seconds_of
from headway.config.loading.load import given_value
from headway.config.sections.cost import parse_budget
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import print_line, print_lines
from headway.core.errors import ConfigError
from headway.core.format import counted, format_bytes, format_count, format_seconds
from headway.core.user_command import suggest
from headway.cost.forecast import Forecast, cheapest_within, fastest_within
from headway.cost.pricing import price_of
from headway.data.epochs import in_steps
from headway.lab.bench.own_task import measure_task
from headway.lab.plan.accelerators import parse_machines, this_machine
from headway.lab.plan.offers import as_json as forecasts_as_json
from headway.lab.plan.offers import forecasts, measured_goodput
from headway.lab.plan.prepare import Plan, make_plan
from headway.lab.plan.recommend import USABLE_SHARE, Option, command
from headway.lab.plan.speed import RANGE, assumptions, host_bandwidth

#: Number of offers that are listed, the cheapest first.
_MOST_OFFERS = 12

HELP = """Estimate the memory, speed, time and cost of a run on given machines, before paying for them.

Shows memory per worker by part, for every strategy and kind of activation checkpointing, and what fits; tokens per \
second, MFU and time from a roofline; energy, and cost if cost.usd_per_hour or cost.offer is given; and the command to \
run. No data is read. A task of your own is measured instead, by some steps on this machine.

[bold]Examples[/bold]

headway plan gpu --gpus 8xH100
headway plan gpu --gpus 64xA100 --interconnect hdr model.preset=8b
headway plan gpu --gpus 4xL4 --json
headway plan quickstart --gpus cpu --tokens-per-second 5000
headway plan gpu --gpus 8xH100,16xH100,8xA100 --deadline 12h
headway plan gpu --gpus 8xH100 --budget 200

Without --gpus the plan is for this machine. Exit codes: 0 planned, 2 usage or config.
"""


def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    gpus: Annotated[str | None, typer.Option(help="Machines: 8xH100, 64xA100-40GB, cpu.")] = None,
    per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Accelerators per machine; up to 8 when not given."),
    ] = None,
    interconnect: Annotated[
        str | None,
        typer.Option(
            help="Network of the machines: ndr, hdr (a port per GPU), ethernet-400, -100, -25, -10 (one per machine).",
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Memory of one accelerator in GiB, if it is unknown or not the usual one.",
        ),
    ] = None,
    host_memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Host memory of one machine in GiB; what this machine allows when not given.",
            show_default=False,
        ),
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            help="Measured tokens per second of all workers together, with the config as it is.",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Also find the cheapest known offer that finishes in this time, e.g. 12h.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Also find the fastest known offer for at most this many dollars, e.g. 200.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run `headway plan`."""
    limits = _limits(deadline, budget)
    others: list[str] = []
    if limits is not None:
        if not gpus:
            raise ConfigError(
                "offers are compared for named machines",
                where="--deadline, --budget",
                fix="name them, several with commas: --gpus 8xH100,16xH100,8xA100",
            )
        gpus, *others = gpus.split(",")

    given = list(overrides or [])
    if given_value(config, given, "task") is not None:
        elsewhere = {"--gpus": gpus, "--memory-gib": memory_gib, "--host-memory-gib": host_memory_gib}
        limited = {"--tokens-per-second": tokens_per_second, "--deadline": deadline, "--budget": budget}
        _plan_task(load(config, given), {**elsewhere, **limited}, as_json)
        return
    here = gpus is None or gpus.strip().lower() == "cpu"
    if here:
        _check_options_of_machines(per_node, interconnect)
        loaded, given = _load_any_micro_batch(config, given)
        accelerators = gpus is None and loaded.train.device != "cpu"
        workers = loaded.parallel.workers
        machines = this_machine(workers, accelerators, memory_gib=memory_gib, host_gib=host_memory_gib)
    else:
        assert gpus is not None
        machines = parse_machines(gpus, per_node, interconnect, memory_gib, host_gib=host_memory_gib)
        loaded, given = _load_any_micro_batch(config, [*given, f"parallel.workers={machines.count}"])
    made = make_plan(loaded, machines, tokens_per_second, here=here)
    found = [] if limits is None else _forecasts(made, loaded, others, config, overrides or [])
    if as_json:
        print_json({**made.as_json(), **({} if limits is None else {"offers": forecasts_as_json(found)})})
        return
    _print_plan(made, str(config), given)
    if limits is not None:
        _print_offers(found, *limits)


def _limits(deadline: str | None, budget: str | None) -> tuple[float | None, float | None] | None:
    """Parse the deadline in hours and the budget in dollars; None without both."""
    if deadline is None and budget is None:
        return None
    hours = None if deadline is None else seconds_of(deadline, "--deadline", "12h") / 3600
    try:
        return hours, None if budget is None else parse_budget(budget)
    except ValueError as error:
        raise ConfigError(str(error), where="--budget", fix="--budget 200") from None


def _plan_task(config: Config, elsewhere: Mapping[str, Any], as_json: bool) -> None:
    """Plan a task of the user's own: nothing is known of it but what some steps on this machine show.

    Raises:
        ConfigError: it is to be planned for other machines; or it cannot be trained here.
    """
    asked = [name for name, value in elsewhere.items() if value is not None]
    if asked:
        raise ConfigError(
            f"a task of your own is planned by trial steps on the machine, so {', '.join(asked)} cannot be known here",
            where=", ".join(asked),
            fix=f"leave it out, and plan on such a machine: {suggest('plan')}",
        )
    found = measure_task(config)
    price = price_of(config.cost, config.usd_per_hour, config.parallel.workers)
    samples = config.train.batches.rows_before(config.train.resolved_steps)
    seconds = samples / found.tokens_per_second
    cost = None if price is None else seconds / 3600 * price.usd_per_hour
    facts = {
        "device": found.device,
        "workers": config.parallel.workers,
        "parameters": found.parameters,
        "peak_memory_bytes": found.peak_memory_bytes,
        "step_seconds": found.p50_step_seconds,
        "samples_per_second": found.tokens_per_second,
        "samples": samples,
        "seconds": seconds,
        "cost_usd": cost,
    }
    if as_json:
        print_json(facts)
        return
    free = "n/a (neither cost.usd_per_hour nor cost.offer is set)"
    rows = [
        ["parameters", format_count(found.parameters)],
        ["memory", f"{format_bytes(found.peak_memory_bytes)} per worker at the peak of a step"],
        ["step", f"{found.p50_step_seconds * 1000:,.1f} ms"],
        ["speed", f"{format_count(found.tokens_per_second)} samples/s"],
        ["time", f"{format_seconds(seconds)} for {format_count(samples)} samples"],
        ["cost", free if cost is None else f"${cost:,.2f} at {price}"],
    ]
    workers = counted(config.parallel.workers, "worker")
    print_table(["PLAN", f"{config.name}, measured here: {workers} on {found.device}"], rows)


def _forecasts(
    made: Plan, loaded: Config, others: Sequence[str], config: Path, overrides: Sequence[str]
) -> list[Forecast]:
    """Forecast a plan, and those of the same config on other machines."""
    goodput = measured_goodput(loaded.runs)
    found = forecasts(made, goodput, price_of(loaded.cost, loaded.usd_per_hour, made.machines.count))
    for name in others:
        machines = parse_machines(name, host_gib=made.machines.host_gib)
        try:
            other, _ = _load_any_micro_batch(config, [*overrides, f"parallel.workers={machines.count}"])
            found += forecasts(make_plan(other, machines), goodput)
        except ConfigError as error:
            print_line(f"{name} is left out: {error.what}")
    return found


def _print_offers(found: Sequence[Forecast], deadline: float | None, budget: float | None) -> None:
    print_line()
    if not found:
        print_line("offers: none is known with these accelerators (headway prices), or the speed is unknown")
        return
    headers = ["", "OFFER", "MACHINES", "GPUS", "TIME", "COST", "PRICE"]
    cheapest = None if deadline is None else cheapest_within(found, deadline)
    fastest = None if budget is None else fastest_within(found, budget)
    shown = sorted(found, key=lambda one: (one.usd.high, one.offer.key))[:_MOST_OFFERS]
    shown += [one for one in (cheapest, fastest) if one is not None and one not in shown]
    rows = [
        [
            "*" if one in (cheapest, fastest) else "",
            one.offer.key,
            str(one.machines),
            f"{one.gpus} {one.offer.gpu}",
            _hours(one),
            f"${one.usd.low:,.2f} to ${one.usd.high:,.2f}",
            one.offer.age_text(),
        ]
        for one in shown
    ]
    print_table(headers, rows, numeric=[2])
    if deadline is not None:
        within = f"a deadline of {format_seconds(deadline * 3600)}"
        print_line(f"cheapest for {within}: {_choice(cheapest)}")
    if budget is not None:
        print_line(f"fastest for ${budget:,.2f}: {_choice(fastest)}")
    goodput = {one.offer.spot: one.goodput for one in found}
    for spot, share in sorted(goodput.items()):
        kind = "spot" if spot else "on-demand"
        known = (
            "n/a, so no time is lost" if share is None else f"{share.low:.0%} to {share.high:.0%}, as of earlier runs"
        )
        print_line(f"goodput on {kind} machines: {known}")


def _hours(one: Forecast) -> str:
    return " to ".join(format_seconds(hours * 3600) for hours in (one.hours.low, one.hours.high))


def _choice(one: Forecast | None) -> str:
    if one is None:
        return "none of these offers"
    many = f"{one.machines} x " if one.machines > 1 else ""
    return f"{many}{one.offer.key}, {_hours(one)}, ${one.usd.low:,.2f} to ${one.usd.high:,.2f}"


def _check_options_of_machines(per_node: int | None, interconnect: str | None) -> None:
    """Check that options which describe other machines come with `--gpus`.

    Raises:
        ConfigError: one of them is given.
    """
    given = {"--per-node": per_node, "--interconnect": interconnect}
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(
            f"{' and '.join(names)} describe machines with accelerators, but the plan is for this machine",
            where=", ".join(names),
            fix="name the machines, for example --gpus 16xH100, or leave it out",
        )


def _load_any_micro_batch(config: Path, overrides: list[str]) -> tuple[Config, list[str]]:
    """Load the config, with micro-batches of one row if those of the file do not fit the workers.

    The plan tries other micro-batches in any case; only one that an override asks for has to be possible.

    Returns:
        The config, and the overrides that gave it.
    """
    key = "train.micro_batch"
    try:
        return in_steps(load(config, overrides)), overrides
    except ConfigError as first:
        if any(text.partition("=")[0].strip() == key for text in overrides):
            raise
        overrides = [*overrides, f"{key}=1"]
        try:
            return in_steps(load(config, overrides)), overrides
        except ConfigError:
            raise first from None


def _print_plan(made: Plan, config_name: str, overrides: Sequence[str]) -> None:
    machines = made.machines
    memory = made.machines.accelerator.memory_gib
    unknown = (
        "memory unknown" if memory is None else f"{memory:,.1f} GiB each, {format_bytes(made.usable_bytes)} usable"
    )
    print_line(f"machines   {machines}, {unknown}")
    if machines.network is not None:
        print_line(f"network    {machines.network}")
    print_line(
        f"model      {format_count(made.counts.total)} parameters, {format_count(made.flops_per_token)} FLOPs per token"
    )
    print_line(f"vocabulary {made.vocab_size:,}, from {made.vocab_source}")
    print_line(f"training   {format_count(made.tokens)} tokens")
    if made.measured_tokens_per_second is not None:
        print_line(
            f"speed      {format_count(made.measured_tokens_per_second)} tokens/s, as measured of the config as it is;"
            " other rows in proportion"
        )
    print_line()
    _print_options(made)
    refused = {option.strategy: option.refusal.what for option in made.table if option.refusal}
    for strategy, reason in refused.items():
        print_line(f"{strategy}: {reason}")
    _print_recommendation(made, config_name, overrides)


def _print_options(made: Plan) -> None:
    headers = ["", "STRATEGY", "CHECKPOINTING", "ROWS", "WEIGHTS", "GRADIENTS", "OPTIMIZER", "ACTIVATIONS", "BUFFERS",
               "COMM", "PEAK", "RESERVE", "HOST", "FITS", "TOKENS/S", "MFU", "TIME", "WITH"]  # fmt: skip
    chosen = made.recommendation.option
    second = made.recommendation.runner_up
    added = [option for option in (chosen, second) if option is not None and option not in made.table]
    lines = [
        ["*" if option == chosen else "+" if option == second else "", *_line(made, option)]
        for option in (*made.table, *added)
        if option.memory is not None
    ]
    print_table(headers, lines, numeric=[*range(3, 13), 14, 15, 16])
    print_line(
        "each row: the peak of a step, on the worker that needs most; RESERVE: what allocator and NCCL hold besides;"
        " HOST: memory of every machine"
    )
    if chosen is not None:
        print_line(f"*: recommended{'' if second is None else '; +: runner-up'}")
    listed = f"listed: {made.deepspeed}" if made.deepspeed else f"left out: {made.no_deepspeed}"
    print_line(f"strategies of DeepSpeed are {listed}")
    for note in made.notes:
        print_line(note)
    print_line()


def _line(made: Plan, option: Option) -> list[str]:
    assert option.memory is not None and option.layout is not None
    hours = made.hours(option)
    return [
        option.strategy,
        option.checkpointing,
        str(option.layout.micro_batch),
        *(format_bytes(count) for count in option.memory.peak.parts.values()),
        format_bytes(option.memory.peak_bytes),
        format_bytes(option.memory.reserve_bytes),
        format_bytes(made.host_bytes(option) or None),
        {True: "yes", False: "no", None: "n/a"}[option.fits],
        _about(made.tokens_per_second(option)),
        _percent(made.mfu(option)),
        format_seconds(None if hours is None else hours * 3600),
        " ".join(option.more),
    ]


def _print_recommendation(made: Plan, config_name: str, overrides: Sequence[str]) -> None:
    chosen = made.recommendation.option
    reason = made.recommendation.reason
    if chosen is None:
        print_line(f"no recommendation: {reason}")
        _print_memory(made, made.own)
        return
    hours = made.hours(chosen)
    energy = made.energy_kwh(chosen)
    cost = made.cost_usd(chosen)
    assert chosen.memory is not None and chosen.layout is not None
    if cost is not None and made.measured_tokens_per_second is None and hours is not None:
        price = f"${cost / RANGE[1]:,.2f} to ${cost / RANGE[0]:,.2f}"
    else:
        price = "" if cost is None else f"${cost:,.2f}"
    if price:
        price = f"{price} at {made.price}"
    free = "neither cost.usd_per_hour nor cost.offer is set" if made.price is None else "the speed is unknown"
    print_line(f"recommended: {' '.join(chosen.overrides)}")
    print_line(f"  because  {reason}")
    _print_memory(made, chosen)
    speed = "n/a (--tokens-per-second gives that of some measured steps)"
    if made.tokens_per_second(chosen) is not None:
        speed = f"{_speed(made, chosen)}, MFU about {_percent(made.mfu(chosen))}"
    print_line(f"  speed    {speed}")
    print_line(f"  time     {_time(made, hours)}")
    print_line(f"  energy   {'n/a' if energy is None else f'{energy:,.1f} kWh (boards at their power limit)'}")
    print_line(f"  cost     {price or f'n/a ({free})'}")
    second = made.recommendation.runner_up
    if second is not None:
        assert second.memory is not None
        words = f"{format_bytes(second.memory.peak_bytes)} per worker"
        if made.tokens_per_second(second) is not None:
            words += f", {_speed(made, second)}"
        print_line(f"  or       {' '.join(second.overrides)}: {words}")
    print_line(f"  type     {command(config_name, overrides, made.machines, chosen)}")
    print_lines("\nassumed:")
    room = f"plans may fill {USABLE_SHARE:.0%} of the memory; the rest is for driver, communication and fragmentation"
    for line in (room, *(assumptions(made.machines) if chosen.speed is not None else ())):
        print_line(f"  - {line}")


def _print_memory(made: Plan, option: Option) -> None:
    """Print what an option needs of what there is: on the device, in host memory and on disk."""
    if option.memory is None or option.layout is None:
        return
    left = made.headroom_bytes(option)
    if left is None:
        room = ""
    elif left < 0:
        room = f", {format_bytes(-left)} more than is usable"
    else:
        room = f", {format_bytes(left)} left of what is usable"
    print_line(f"  memory   {format_bytes(option.memory.peak_bytes)} per worker{room}, {option.layout.mesh}")
    if option.memory.host.total:
        gib = made.machines.host_gib
        available = "unknown (give it with --host-memory-gib)" if gib is None else f"{gib:,.1f} GiB"
        parts = {name: count * made.machines.per_node for name, count in option.memory.host.parts.items() if count}
        words = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
        print_line(f"  host     {format_bytes(made.host_bytes(option))} of {available} on every machine: {words}")
    seconds = made.host_update_seconds(option)
    if seconds is not None:
        rate = f"{host_bandwidth(made.machines) / 1e9:.3g} GB/s"
        known = (
            "as measured" if made.machines.host_bytes_per_second else "assumed; headway doctor --arithmetic measures it"
        )
        print_line(f"  update   {format_seconds(seconds)} in host memory at {rate} ({known})")
    disk = made.disk
    free = "" if disk.free_bytes is None else f", {format_bytes(disk.free_bytes)} free"
    more = f", and those of {', '.join(disk.uncounted)}" if disk.uncounted else ""
    each = f"{disk.checkpoints} checkpoints of {format_bytes(disk.checkpoint_bytes)}{more}"
    print_line(f"  disk     {format_bytes(disk.total_bytes)} for {each}{free}")


def _about(value: float | None) -> str:
    """Format an estimate with the two digits that it has."""
    return format_count(None if value is None else float(f"{value:.1e}"))


def _speed(made: Plan, option: Option) -> str:
    """Format the throughput of an option, which is known, as a range unless it was measured."""
    value = made.tokens_per_second(option)
    assert value is not None
    if made.measured_tokens_per_second is not None:
        return f"{format_count(value)} tokens/s"
    return f"{_about(value * RANGE[0])} to {_about(value * RANGE[1])} tokens/s"


def _time(made: Plan, hours: float | None) -> str:
    """Format the time of the run as a range, unless the throughput was measured."""
    if hours is None or made.measured_tokens_per_second is not None:
        return format_seconds(None if hours is None else hours * 3600)
    return " to ".join(format_seconds(hours * 3600 / share) for share in reversed(RANGE))


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.0%}"
