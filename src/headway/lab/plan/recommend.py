"""All options to train a config on given machines, which of them fit, and which one to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from math import prod

from headway.config import Config, ModelConfig, override
from headway.config.derived.lanes import divisors
from headway.config.optimizers import find_optimizer
from headway.config.strategies import (
    AUTO,
    DEEPSPEED,
    FOR_COPIES,
    FOR_ONE_WORKER,
    STRATEGIES,
    distinct_strategies,
    find_strategy,
    simplest_strategy,
)
from headway.core.errors import ConfigError, HeadwayError
from headway.core.format import format_bytes
from headway.core.requirements import install_command
from headway.core.user_command import config_words
from headway.lab.plan.accelerators import Machines
from headway.lab.plan.activations import FP8_TILE
from headway.lab.plan.layout import CHECKPOINTING, Layout, has_copied_experts
from headway.lab.plan.memory import plan_memory
from headway.lab.plan.memory_plan import MemoryPlan
from headway.lab.plan.speed import Speed, plan_speed

#: Share of an accelerator's memory; the rest is for the driver, communication buffers and fragmentation.
USABLE_SHARE = 0.9
#: Prefer a simpler option if it is at most this factor slower.
_SLACK = 1.02
_MOST_ROWS = 64
#: Options of a wider search whose micro-batch is searched too: the fastest ones.
_MOST_RECUT = 4
#: Tokens of rows that workers may share.
_LONG_ROW = 16384
_MOST_WORKERS = 16384


@dataclass(frozen=True)
class Option:
    """One combination of strategy, checkpointing and micro-batch."""

    overrides: tuple[str, ...]
    """Overrides that select it, as `key=value`."""
    layout: Layout | None
    """None if the config cannot be trained with this option."""
    refusal: HeadwayError | None = None
    """The error that `headway train` would raise."""
    memory: MemoryPlan | None = None
    speed: Speed | None = None
    """Speed of a step with the full batch."""
    run_seconds: float | None = None
    """Time of all steps."""
    fits: bool | None = None
    """None if the accelerator's memory is unknown."""

    @property
    def strategy(self) -> str:
        """As it is typed."""
        return self.overrides[0].partition("=")[2]

    @property
    def checkpointing(self) -> str:
        """As it is typed."""
        return self.overrides[1].partition("=")[2]

    @property
    def way(self) -> tuple[str, ...]:
        """Everything but the micro-batch."""
        return tuple(text for text in self.overrides if not text.startswith("train.micro_batch="))

    @property
    def more(self) -> tuple[str, ...]:
        """Overrides besides those of strategy, checkpointing and micro-batch."""
        return self.way[2:]


def usable_bytes(machines: Machines) -> float | None:
    """Return the memory of one worker that a plan may fill."""
    gib = machines.accelerator.memory_gib
    return None if gib is None else gib * 2**30 * USABLE_SHARE


def fits(memory: MemoryPlan, machines: Machines) -> bool | None:
    """Return whether a plan fits into the accelerator and into the machine; None if the accelerator's memory is
    unknown. A machine whose memory is unknown has enough."""
    if host_fits(memory, machines) is False:
        return False
    usable = usable_bytes(machines)
    return None if usable is None else memory.fits(usable, usable / USABLE_SHARE)


def host_fits(memory: MemoryPlan, machines: Machines) -> bool | None:
    """Return whether the workers of a machine fit into its memory; None if that is unknown."""
    if machines.host_gib is None:
        return None
    return memory.host.total * machines.per_node <= machines.host_gib * 2**30


def deepspeed_listed(config: Config) -> str | None:
    """Return the reason why a plan lists DeepSpeed's strategies; None if it does not."""
    if find_strategy(config.parallel.strategy).is_deepspeed:
        return "parallel.strategy asks for one"
    package = find_strategy(DEEPSPEED[0]).needs
    return "it is installed" if package is not None and find_spec(package.module) is not None else None


def _check_fp8(config: Config, machines: Machines) -> None:
    """Check fp8 as `training.setup.precision` does on the machine itself."""
    if config.train.precision != "fp8":
        return
    if machines.accelerator.lacks_fp8:
        raise ConfigError(
            f"{machines.accelerator.device_name} does not support 8-bit products",
            where="train.precision, --gpus",
            fix="train.precision=bf16, or accelerators that support them, such as H100 or L4",
        )
    length = config.train.sequence_length
    if length % FP8_TILE:
        raise ConfigError(
            f"rows of {length} tokens do not fill the tiles of {FP8_TILE} that 8-bit products need",
            where="train.sequence_length, train.precision",
            fix=f"train.sequence_length={-(-length // FP8_TILE) * FP8_TILE}, or train.precision=bf16",
        )


def _run_seconds(config: Config, model: ModelConfig, layout: Layout, machines: Machines) -> float:
    """Sum the time of all steps; steps of a ramp or before a change have other micro-batches, but the same update."""
    train = config.train
    total = 0.0
    for first, last, rows in train.batches.stretches(0, train.resolved_steps):
        batch = {"global_batch": rows, "batch_ramp": [], "sequence_length": train.batches.length(first)}
        part = config.model_copy(update={"train": train.model_copy(update=batch)})
        fewer = replace(layout, micro_batches=max(1, layout.micro_batches * rows // train.global_batch_rows))
        speed = plan_speed(part, model, fewer, machines)
        assert speed is not None, "the speed of the full batch is known"
        total += (last - first) * speed.step_seconds
    return total


@dataclass(frozen=True)
class Recommendation:
    """The recommended option and the reason."""

    option: Option | None
    """None if nothing fits."""
    reason: str
    runner_up: Option | None = None
    """The best option that fits and differs in more than the micro-batch."""


def _best(fitting: Sequence[Option]) -> tuple[Option, str]:
    """Return the best of the options that fit, and why it is."""
    timed = [option for option in fitting if option.speed is not None]
    if not timed:
        best = min(fitting, key=lambda o: (CHECKPOINTING.index(o.checkpointing), _memory_order(o), _rows_order(o)))
        return best, "the simplest that fits; its speed is unknown"
    fastest = min(_seconds(option) for option in timed)
    near = [option for option in timed if _seconds(option) <= fastest * _SLACK]
    best = min(near, key=lambda o: (_memory_order(o), CHECKPOINTING.index(o.checkpointing), _seconds(o)))
    return best, "the fastest that fits" if _seconds(best) == fastest else "as fast as any that fits, and the simplest"


def _price(best: Option, machines: Machines) -> str:
    """Return what an option of the wider search asks for in return."""
    lighter = [text for text in best.more if text.startswith("optimizer.name=")]
    if lighter:
        return f"{lighter[0]} changes what is computed."
    offloads = {"optimizer.offload=true", "train.weights=bf16"}
    if offloads.isdisjoint(best.more) or best.memory is None:
        return ""
    return f"It takes {format_bytes(best.memory.host.total * machines.per_node)} of host memory on every machine."


def _asked_for(config: Config, best: Option, tried: Sequence[Option]) -> str:
    """Explain why another strategy than that of the config is recommended."""
    spec = find_strategy(config.parallel.strategy)
    asked = spec.stands_for or spec.name
    if config.parallel.strategy == AUTO or asked == best.strategy:
        return ""
    own = [option for option in tried if option.strategy == asked]
    fitting = [option for option in own if option.fits]
    if not own:
        return f"The config's parallel.strategy={asked} cannot be trained on these machines."
    if not fitting:
        return f"The config's parallel.strategy={asked} does not fit."
    if best.speed is None:
        return f"The config's parallel.strategy={asked} fits too."
    ratio = _seconds(_best(fitting)[0]) / _seconds(best)
    longer = f"takes {ratio:.1f} times as long" if ratio > 1.05 else "fits too, about as fast"
    return f"The config's parallel.strategy={asked} {longer}."


def _wide_strategies(alone: bool) -> list[str]:
    """Return the strategies to combine with others: those that divide moments, and everything."""
    traits = (lambda spec: spec.divides_update, lambda spec: spec.cuts_parameters)
    return [FOR_ONE_WORKER] if alone else [simplest_strategy(wanted) for wanted in traits]


def _seconds(option: Option) -> float:
    assert option.speed is not None
    return option.speed.step_seconds


def _memory_order(option: Option) -> int:
    """Rank strategies from the simplest, with most memory, to those from outside."""
    return [*STRATEGIES, option.strategy].index(option.strategy)


def _rows_order(option: Option) -> int:
    """Rank the config's own micro-batch first, then larger ones."""
    rows = [text for text in option.overrides if text.startswith("train.micro_batch=")]
    return -int(rows[0].partition("=")[2]) if rows else -_MOST_ROWS - 1


@dataclass(frozen=True)
class Planner:
    """Plans ways to train a resolved config, whose model is complete, on machines."""

    config: Config
    model: ModelConfig
    machines: Machines

    @property
    def _is_alone(self) -> bool:
        """Whether one worker computes the gradients of any weight, from all rows and positions."""
        return self.machines.count // (self.config.parallel.tensor * self.config.parallel.pipeline) <= 1

    def options(self) -> list[Option]:
        """Return every strategy with every mode of activation checkpointing for an otherwise unchanged config.

        A strategy from outside that the config selects comes after Headway's own. DeepSpeed's strategies are included
        if DeepSpeed is installed or the config selects one (`deepspeed_listed`). Unless the config selects one, those
        that are incompatible with the config are dropped.
        """
        alone = self._is_alone
        configured = find_strategy(self.config.parallel.strategy)
        # Copies of experts have gradients to sum even without other data-parallel workers.
        lone = FOR_COPIES if has_copied_experts(self.config) else FOR_ONE_WORKER
        several = [spec.name for spec in distinct_strategies() if spec.sums_gradients and not spec.is_deepspeed]
        own = [lone] if alone else several
        if configured.name not in STRATEGIES and (configured.works_alone or not alone):
            own.append(configured.name)
        asked = configured.is_deepspeed
        theirs = DEEPSPEED if asked or (deepspeed_listed(self.config) and not alone) else ()
        found = [self.option(name, mode) for name in (*own, *theirs) for mode in CHECKPOINTING]
        return [o for o in found if asked or o.strategy not in DEEPSPEED or o.refusal is None]

    def why_no_deepspeed(self) -> str:
        """Return the reason why a plan lists no strategies of DeepSpeed."""
        if self._is_alone:
            return "a single data-parallel worker has nothing to divide"
        if deepspeed_listed(self.config) is None:
            return f"install it ({install_command('deepspeed')}) or set parallel.strategy to one of them"
        refusal = self.option(DEEPSPEED[0], CHECKPOINTING[0]).refusal
        assert refusal is not None, "the plan would have it"
        return refusal.what

    def option(self, strategy: str, checkpointing: str, *, rows: int | None = None, more: Sequence[str] = ()) -> Option:
        """Plan one option, with more overrides, or record why it is impossible; checks as `headway train` does."""
        overrides = [f"parallel.strategy={strategy}", f"train.activation_checkpointing={checkpointing}", *more]
        if rows is not None:
            overrides.append(f"train.micro_batch={rows}")
        machines = self.machines
        is_free = find_strategy(strategy).two_levels and self.config.parallel.replicate is None
        if is_free and machines.nodes > 1:
            # One replica per machine: shards are gathered over the machine's own links.
            overrides.append(f"parallel.replicate={machines.nodes}")
        try:
            changed = override(self.config, [*overrides, f"parallel.workers={machines.count}"])
            _check_fp8(changed, machines)
            layout = Layout.of(changed, machines.count)
            memory = plan_memory(changed, self.model, layout, machines.accelerator.device)
        except HeadwayError as error:
            return Option(tuple(overrides), None, refusal=error)
        speed = plan_speed(changed, self.model, layout, machines)
        seconds = None if speed is None else _run_seconds(changed, self.model, layout, machines)
        return Option(tuple(overrides), layout, None, memory, speed, seconds, fits(memory, machines))

    def recommend(self, table: Sequence[Option]) -> Recommendation:
        """Choose the fastest option that fits; among options about as fast, the simplest.

        If the speed is unknown, choose the simplest that fits, preferably without checkpointing.
        """
        if usable_bytes(self.machines) is None:
            return Recommendation(None, "the accelerator's memory is unknown; give it with --memory-gib")
        possible = [option for option in table if option.layout is not None]
        tried = [*possible, *self._other_micro_batches(possible)]
        fitting = [option for option in tried if option.fits]
        for wider in (self._wider, self._lighter, self._on_host):
            if fitting:
                break
            found = [option for option in wider() if option.layout is not None]
            fitting = [option for option in found if option.fits]
            fastest = sorted((o for o in fitting if o.speed is not None), key=_seconds)[:_MOST_RECUT]
            fitting += [option for option in self._other_micro_batches(fastest) if option.fits]
            tried += found
        if not tried:
            return Recommendation(None, "the config cannot be trained on these machines; see the reasons above")
        if not fitting:
            return Recommendation(None, self._nothing_fits(tried))
        best, why = _best(fitting)
        others = [o for o in fitting if o.way != best.way]
        remarks = [f"{why}.", _price(best, self.machines), _asked_for(self.config, best, tried)]
        if too_large := [f"{o.strategy} (checkpointing {o.checkpointing})" for o in possible if o.fits is False]:
            remarks.append(f"Too large with the config's micro-batch: {', '.join(too_large)}.")
        return Recommendation(best, " ".join(filter(None, remarks)), _best(others)[0] if others else None)

    def _wider(self) -> list[Option]:
        """Plan ways to train a model that no strategy alone makes fit.

        Moments in host memory, and matrices, layers and long rows that workers share. A degree that the config sets
        stays as it is.
        """
        found = [] if self.config.optimizer.offload else self._with("optimizer.offload=true")
        for degrees in self._degrees():
            more = [f"parallel.{name}={degree}" for name, degree in degrees.items() if degree > 1]
            if degrees["tensor"] > 1 and self.config.train.compile:
                more.append("train.compile=false")  # refused together with shards
            alone = self.machines.count == degrees["tensor"] * degrees["pipeline"]
            for strategy in _wide_strategies(alone):
                found += [self.option(strategy, mode, rows=1, more=more) for mode in CHECKPOINTING[1:]]
        return found

    def _lighter(self) -> list[Option]:
        """Plan the same optimizer with lighter moments, which change what is computed."""
        lighter = find_optimizer(self.config.optimizer.name).lighter[:1]
        return [way for name in lighter for way in self._with(f"optimizer.name={name}")]

    def _on_host(self) -> list[Option]:
        """Plan weights in bf16 with masters, moments and gradients in host memory."""
        return [] if self.machines.accelerator.device == "cpu" else self._with("train.weights=bf16")

    def _with(self, more: str) -> list[Option]:
        return [
            self.option(strategy, mode, rows=1, more=[more])
            for strategy in _wide_strategies(self._is_alone)
            for mode in CHECKPOINTING
        ]

    def _degrees(self) -> list[dict[str, int]]:
        """Return the degrees of tensor, pipeline and context parallelism to try."""
        parallel = self.config.parallel
        long = self.config.train.sequence_length >= _LONG_ROW
        choices: dict[str, Sequence[int]] = {
            "tensor": (1, 2, 4, 8),  # within a machine
            "pipeline": (1, 2, 4, 8, 16),
            "context": (1, 2, 4, 8) if long else (1,),
        }
        given = {name for name in choices if name in parallel.model_fields_set}
        choices |= {name: (getattr(parallel, name),) for name in given}
        own = {name: getattr(parallel, name) for name in choices}
        return [
            degrees
            for sizes in product(*choices.values())
            if (degrees := dict(zip(choices, sizes, strict=True))) != own
            and self.machines.count % prod(sizes) == 0
            and (degrees["tensor"] <= self.machines.per_node or "tensor" in given)
        ]

    def _other_micro_batches(self, possible: Sequence[Option]) -> list[Option]:
        found = []
        for option in possible:
            assert option.layout is not None
            # The rows of a lane are fixed; only the number computed at a time is free.
            lane = option.layout.micro_batch * option.layout.micro_batches // option.layout.lanes
            others = [rows for rows in divisors(lane) if rows <= _MOST_ROWS and rows != option.layout.micro_batch]
            # `option` adds the number of copies by itself.
            more = [text for text in option.more if not text.startswith("parallel.replicate=")]
            found += [self.option(option.strategy, option.checkpointing, rows=rows, more=more) for rows in others]
        return found

    def _nothing_fits(self, tried: Sequence[Option]) -> str:
        least = min(tried, key=lambda option: option.memory.peak_bytes if option.memory else 0)
        assert least.memory is not None
        usable = usable_bytes(self.machines)
        text = (
            f"nothing fits: {' '.join(least.overrides)} needs the least, {format_bytes(least.memory.peak_bytes)} of"
            f" {format_bytes(usable)} usable"
        )
        if host_fits(least.memory, self.machines) is False:
            needed = least.memory.host.total * self.machines.per_node
            text += f", and {format_bytes(needed)} of {self.machines.host_gib:,.1f} GiB in the memory of a machine"
        enough = self._enough()
        if enough is None:
            return text + (
                "; more of these machines do not help with this batch; shorter rows, tensor parallelism or a smaller"
                " model do"
            )
        workers, way = enough
        return text + f"; {workers} of these accelerators would suffice, with {' '.join(way.overrides)}"

    def _enough(self) -> tuple[int, Option] | None:
        """Find the next power-of-two multiple of the machines on which an option with low memory fits, and that option.

        The batch stays the same.
        """
        workers = self.machines.count
        least_memory = [
            simplest_strategy(lambda spec: spec.shards_weights),
            simplest_strategy(lambda spec: spec.shards_gradients),
        ]
        while (workers := workers * 2) <= _MOST_WORKERS:
            larger = replace(self, machines=replace(self.machines, count=workers))
            for strategy in least_memory:
                least = larger.option(strategy, "full", rows=1)
                if least.layout is None:
                    continue
                ways = (least, *larger._other_micro_batches([least]))
                if (fitting := next((way for way in ways if way.fits), None)) is not None:
                    return workers, fitting
        return None


def command(config_name: str, overrides: Sequence[str], machines: Machines, chosen: Option) -> str:
    """Return the command that trains with the option: the user's config and overrides, then those of the option."""
    replaced = {"parallel.workers", *(text.partition("=")[0] for text in chosen.overrides)}
    own = [text for text in overrides if text.partition("=")[0].strip() not in replaced]
    words = config_words(config_name, [*own, *chosen.overrides])
    if machines.nodes == 1:
        return f"headway train {words} --workers {machines.count}"
    return (
        f"torchrun --nnodes {machines.nodes} --nproc-per-node {machines.per_node}"
        f" --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m headway train {words}"
    )
