"""Building a plan from a config and machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headway.config import Config, ModelConfig, override
from headway.config.strategies import DEEPSPEED, simplest_strategy, strategy_of
from headway.core.errors import ConfigError
from headway.cost.pricing import Price, price_of
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.lab.plan.accelerators import Machines
from headway.lab.plan.disk import DiskPlan, plan_disk
from headway.lab.plan.layout import has_copied_experts
from headway.lab.plan.recommend import (
    Option,
    Planner,
    Recommendation,
    deepspeed_listed,
    host_fits,
    usable_bytes,
)
from headway.lab.plan.speed import assumptions, host_bandwidth
from headway.models.facts import ParameterCounts, count_parameters, flops_per_token
from headway.models.hub.folder import settings_folder
from headway.models.shape import embedding_rows
from headway.telemetry.arithmetic import cpu_multiplies_bf16


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts."""

    machines: Machines
    counts: ParameterCounts
    flops_per_token: float
    vocab_size: int
    vocab_source: str
    """Source of the vocabulary size."""
    tokens: int
    precision: str
    table: list[Option]
    own: Option
    """The config as it is."""
    recommendation: Recommendation
    usable_bytes: float | None
    price: Price | None
    """The price of these machines by the config."""
    measured_tokens_per_second: float | None
    deepspeed: str | None
    """Why the table has DeepSpeed's strategies; None if it has none."""
    no_deepspeed: str | None
    """Why the table has none of DeepSpeed's strategies; None if it has some."""
    notes: tuple[str, ...]
    """Remarks that the names of strategies do not imply."""
    disk: DiskPlan

    @property
    def scale(self) -> float | None:
        """Measured throughput of the config over that of the roofline; 1 if none was measured, None if unknown."""
        if self.measured_tokens_per_second is None:
            return 1.0
        own = self.own.speed
        return None if own is None else self.measured_tokens_per_second / own.tokens_per_second

    def tokens_per_second(self, option: Option) -> float | None:
        """Return the throughput of the roofline, scaled to what was measured; without a roofline what was measured."""
        if option.speed is None or self.scale is None:
            return self.measured_tokens_per_second
        return option.speed.tokens_per_second * self.scale

    def mfu(self, option: Option) -> float | None:
        """Return the model FLOPs utilisation at that throughput."""
        speed = self.tokens_per_second(option)
        peak = self.machines.accelerator.peak_flops(self.precision)
        return None if speed is None or peak is None else speed * self.flops_per_token / peak / self.machines.count

    def hours(self, option: Option) -> float | None:
        """Return the hours to the end of training."""
        if option.run_seconds is None or self.scale is None:
            speed = self.measured_tokens_per_second
            return None if speed is None else self.tokens / speed / 3600
        return option.run_seconds / self.scale / 3600

    def headroom_bytes(self, option: Option) -> float | None:
        """Return the usable memory that an option leaves."""
        if self.usable_bytes is None or option.memory is None:
            return None
        return self.usable_bytes - option.memory.peak_bytes

    def host_bytes(self, option: Option) -> int:
        """Return the host memory that an option takes on every machine."""
        return 0 if option.memory is None else option.memory.host.total * self.machines.per_node

    def host_update_seconds(self, option: Option) -> float | None:
        """Return the time of an update in host memory; None if updates are on the device."""
        if option.memory is None or not option.memory.host.updated:
            return None
        return option.memory.host.updated * self.machines.per_node / host_bandwidth(self.machines)

    def energy_kwh(self, option: Option) -> float | None:
        """Estimate the energy of the boards at their power limit; processors, networks and cooling are not counted."""
        hours = self.hours(option)
        watts = self.machines.accelerator.watts
        return None if hours is None or watts is None else hours * watts * self.machines.count / 1000

    def cost_usd(self, option: Option) -> float | None:
        """Estimate the cost at the price of the config (`headway.cost`)."""
        hours = self.hours(option)
        return None if hours is None or self.price is None else hours * self.price.usd_per_hour

    def as_json(self) -> dict[str, Any]:
        """Return the whole plan as JSON."""
        chosen = self.recommendation.option
        second = self.recommendation.runner_up
        return {
            "machines": {
                "accelerator": self.machines.accelerator.device_name,
                "count": self.machines.count,
                "per_node": self.machines.per_node,
                "memory_gib": self.machines.accelerator.memory_gib,
                "usable_bytes": self.usable_bytes,
                "host_gib": self.machines.host_gib,
                "host_update_bytes_per_second": self.machines.host_bytes_per_second,
                "link": self.machines.accelerator.link,
                "network": None if self.machines.network is None else str(self.machines.network),
            },
            "parameters": self.counts.total,
            "flops_per_token": self.flops_per_token,
            "vocab_size": self.vocab_size,
            "vocab_source": self.vocab_source,
            "tokens": self.tokens,
            "deepspeed": self.deepspeed,
            "notes": list(self.notes),
            "disk": {**asdict(self.disk), "total_bytes": self.disk.total_bytes},
            "price": None if self.price is None else str(self.price),
            "options": [self._option_json(option) for option in self.table],
            "recommendation": None if chosen is None else self._option_json(chosen),
            "runner_up": None if second is None else self._option_json(second),
            "reason": self.recommendation.reason,
            "assumptions": assumptions(self.machines),
        }

    def _option_json(self, option: Option) -> dict[str, Any]:
        layout = option.layout
        memory = option.memory
        speed = option.speed
        return {
            "overrides": list(option.overrides),
            "strategy": option.strategy,
            "activation_checkpointing": option.checkpointing,
            "refused": option.refusal and option.refusal.what,
            "mesh": layout and layout.mesh.sizes,
            "micro_batch": layout and layout.micro_batch,
            "micro_batches": layout and layout.micro_batches,
            "peak_bytes": memory and memory.peak_bytes,
            "reserve_bytes": memory and memory.reserve_bytes,
            "peak_at": memory and memory.peak.name,
            "parts_bytes": memory and memory.peak.parts,
            "host_bytes": memory and memory.host.total,
            "host_parts_bytes": memory and memory.host.parts,
            "host_update_seconds": self.host_update_seconds(option),
            "fits": option.fits,
            "fits_host": memory and host_fits(memory, self.machines),
            "headroom_bytes": self.headroom_bytes(option),
            "step_seconds": speed and speed.step_seconds,
            "tokens_per_second": self.tokens_per_second(option),
            "mfu": self.mfu(option),
            "hours": self.hours(option),
            "energy_kwh": self.energy_kwh(option),
            "cost_usd": self.cost_usd(option),
        }


def _with_precision(config: Config, machines: Machines) -> Config:
    """Replace `train.precision: auto` by what it is on these machines (`training.setup.precision`)."""
    if config.train.precision != "auto":
        return config
    is_gpu = machines.accelerator.device != "cpu"
    return override(config, [f"train.precision={'bf16' if is_gpu or cpu_multiplies_bf16() else 'fp32'}"])


def make_plan(
    config: Config, machines: Machines, measured_tokens_per_second: float | None = None, *, here: bool = False
) -> Plan:
    """Plan a resolved config on machines.

    Needs no data: the vocabulary size comes from its earliest known source.

    Args:
        config: A resolved config.
        machines: Where it is to run.
        measured_tokens_per_second: Throughput of the config as it is.
        here: Whether that is this machine, whose free disk counts.

    Raises:
        ConfigError: the config cannot be trained on these machines in any way.
        CheckpointError: the checkpoint to start from cannot be read.
        DataError: the tokenizer cannot be read.
    """
    if config.task is not None:
        raise ConfigError(
            "a task of your own is planned by trial steps on the machines themselves",
            where="task",
            fix="run `headway plan` with this config on such a machine",
        )
    config = _with_precision(config, machines)
    model, vocab_source = complete_model(config)
    planner = Planner(config, model, machines)
    table = planner.options()
    refusals = [option.refusal for option in table if option.refusal is not None]
    recommendation = planner.recommend(table)
    if len(refusals) == len(table) and recommendation.option is None:
        raise refusals[0]
    assert model.vocab_size is not None
    has_deepspeed = any(option.strategy in DEEPSPEED for option in table)
    return Plan(
        machines=machines,
        counts=count_parameters(model),
        flops_per_token=flops_per_token(model, config.train.sequence_length),
        vocab_size=model.vocab_size,
        vocab_source=vocab_source,
        tokens=config.train.batches.tokens_before(config.train.resolved_steps),
        precision=config.train.precision,
        table=table,
        own=_as_it_is(planner),
        recommendation=recommendation,
        usable_bytes=usable_bytes(machines),
        price=price_of(config.cost, config.usd_per_hour, machines.count),
        measured_tokens_per_second=measured_tokens_per_second,
        deepspeed=deepspeed_listed(config) if has_deepspeed else None,
        no_deepspeed=None if has_deepspeed else planner.why_no_deepspeed(),
        notes=tuple(_notes(config, machines)),
        disk=plan_disk(config, model, here=here),
    )


def plan_as_it_is(config: Config, machines: Machines) -> Option:
    """Plan a resolved config on machines as it is, without other ways to train it, which take ten times as long.

    Raises:
        ConfigError, CheckpointError, DataError: as `make_plan`; what the machines do not allow is in the option.
    """
    config = _with_precision(config, machines)
    return _as_it_is(Planner(config, complete_model(config)[0], machines))


def _as_it_is(planner: Planner) -> Option:
    """Plan the config with its own strategy, checkpointing and micro-batch."""
    config = planner.config
    parallel = config.parallel
    alone = planner.machines.count == parallel.tensor * parallel.pipeline and not has_copied_experts(config)
    return planner.option(strategy_of(parallel.strategy, alone=alone), config.train.activation_checkpointing)


def _notes(config: Config, machines: Machines) -> Iterator[str]:
    parallel = config.parallel
    precision = config.train.precision
    card = machines.accelerator
    if card.device != "cpu" and card.peak_flops("fp32") is not None and card.peak_flops(precision) is None:
        yield (
            f"{card.device_name} has no products in {precision}, which it computes slowly at best, so the speed is"
            f" unknown: {'train.precision=fp16' if card.peak_flops('fp16') else 'train.precision=fp32'} has a plan"
        )
    alone = machines.count == parallel.tensor * parallel.pipeline
    if alone and has_copied_experts(config):
        most = simplest_strategy(lambda spec: spec.shards_weights)
        yield (
            f"only the {parallel.tensor} workers of parallel.tensor have the experts, and each has a copy under"
            f" every strategy, including {most}: parallel.expert={parallel.tensor} divides them"
        )


def complete_model(config: Config) -> tuple[ModelConfig, str]:
    """Return the model with its vocabulary size, and the source of that size."""
    model = config.model
    if model.from_pretrained is not None:
        from headway.models.build import complete

        source = settings_folder(model.from_pretrained, with_code=model.trust_remote_code)
        found = complete(model.model_copy(update={"from_pretrained": source}), 1)
        return found, f"config.json of {model.from_pretrained}"
    if model.vocab_size is not None:
        return model, "model.vocab_size"
    tokenizer = config.data.tokenizer
    if tokenizer.path is None:
        rows = embedding_rows(tokenizer.vocab_size)
        return model.model_copy(update={"vocab_size": rows}), "data.tokenizer.vocab_size, as a multiple of 64"
    rows = embedding_rows(Tokenizer.load(tokenizer.path, tokenizer.pattern).vocab_size)
    return model.model_copy(update={"vocab_size": rows}), f"the tokenizer {tokenizer.path}, as a multiple of 64"
