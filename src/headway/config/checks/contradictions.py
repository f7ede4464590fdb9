"""Checks across sections: contradictions that the config alone shows, before any work, in sections that are valid.

A problem is a `ConfigError` whose `where` is its dotted key, or several joined by ", ".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches

from headway.config.checks.host_weights import host_weight_problems
from headway.config.checks.own_task import task_problems
from headway.config.derived.deepspeed import deepspeed_problems
from headway.config.derived.experts import parallel_problems
from headway.config.derived.lanes import LaneGrid, divisors, nearest, resolve_lanes
from headway.config.derived.mesh import resolve_mesh, usable_machines
from headway.config.derived.pipeline import micro_batch_problem
from headway.config.optimizers import find_optimizer
from headway.config.schema import Config
from headway.config.sections.benchmarks import benchmark_problems
from headway.config.sections.checkpoint import checkpoint_problems
from headway.config.sections.cost import cost_problems
from headway.config.sections.data import named_sources, tokenizer_problems
from headway.config.sections.early_stopping import early_stopping_problems
from headway.config.sections.losses import loss_problems
from headway.config.sections.model import division_problems, pretrained_problems
from headway.config.strategies import find_strategy, simplest_strategy
from headway.core.coordination.launched import world_size_from_environment
from headway.core.credentials.secrets import credentials_in, looks_random
from headway.core.errors import ConfigError
from headway.core.storage import credentials_fix, scheme_of

REFERENCE = "headway config schema --markdown lists all keys"
_ALERT = "telemetry.alert"
_ALERT_FIX = (
    "export it and write the variable's name, which the shell expands when the command runs:"
    " curl -H 'Authorization: Bearer '$TOKEN, or curl $ALERT_URL"
)


def find_problems(config: Config, trains: bool = True) -> list[ConfigError]:
    """Find all contradictions across sections; empty if there are none.

    Args:
        config: The config.
        trains: The config must give the length of training.
    """
    train = config.train
    evaluation = config.evaluation
    unknown = [*_unknown_specs(config)]
    if unknown:  # the other checks ask the specs
        return unknown
    return [
        *task_problems(config),
        *(_training_length(config) if trains else ()),
        *_sequence_length(config),
        *_source_names(config),
        *tokenizer_problems(config.data, config.model.from_pretrained),
        *_stages(config),
        *parallel_problems(config),
        *division_problems(config.model, config.parallel),
        *_workers(config),
        *_fewer_workers(config),
        *_fewer_machines(config),
        *_auto_choices(config),
        *pretrained_problems(config.model, train.precision),
        *_health(config),
        *checkpoint_problems(config.checkpoint, evaluation.every, train, own_figures=config.task is not None),
        *logits_problems(config),
        *_benchmarks(config),
        *early_stopping_problems(train.early_stopping, evaluation.every),
        *credential_problems(config),
        *cost_problems(config.cost, config.budget, config.telemetry.usd_per_hour),
    ]


def combined(
    problems: Sequence[ConfigError], place_of: Callable[[str], str] | None = None, reference: str | None = REFERENCE
) -> ConfigError:
    """Combine all problems into one error, one per line.

    Args:
        problems: At least one.
        place_of: Turns dotted keys into files and lines.
        reference: Where all keys are listed, for what is not a `Config` too.
    """
    problems = list({problem.what: problem for problem in problems}.values())
    places = [_places(problem, place_of) for problem in problems]
    if len(problems) == 1:
        return ConfigError(problems[0].what, where=places[0], fix=problems[0].fix or reference)
    lines = [
        f"\n    {problem.what} ({place})" + (f": {problem.fix}" if problem.fix else "")
        for problem, place in zip(problems, places, strict=True)
    ]
    fix = "; ".join(filter(None, ("correct them", reference)))
    return ConfigError(f"{len(problems)} problems in the config:{''.join(lines)}", fix=fix)


def _places(problem: ConfigError, place_of: Callable[[str], str] | None) -> str:
    keys = problem.where or ""
    return ", ".join(dict.fromkeys(map(place_of, keys.split(", ")))) if place_of else keys


def _unknown_specs(config: Config) -> Iterator[ConfigError]:
    """Yield why a spec from outside cannot be imported."""
    for find, name in ((find_strategy, config.parallel.strategy), (find_optimizer, config.optimizer.name)):
        try:
            find(name)
        except ConfigError as error:
            yield error


def _training_length(config: Config) -> Iterator[ConfigError]:
    train = config.train
    if train.steps is None and train.tokens is None and train.epochs is None:
        yield ConfigError(
            "none of train.steps, train.tokens and train.epochs says how long to train",
            where="train.steps",
            fix="for example train.steps=1000, train.tokens=10M, or train.epochs=3",
        )


def _sequence_length(config: Config) -> Iterator[ConfigError]:
    length = config.train.sequence_length
    longest = config.model.max_sequence_length
    # A pretrained checkpoint has its own limit.
    if config.model.from_pretrained is None and length > longest:
        yield ConfigError(
            f"train.sequence_length is {length}, but the model is meant for {longest} (model.max_sequence_length)",
            where="train.sequence_length, model.max_sequence_length",
            fix=f"train.sequence_length={longest}, or model.max_sequence_length={length}",
        )


def _source_names(config: Config) -> Iterator[ConfigError]:
    times = Counter(source.name for source in config.data.sources if source.name is not None)
    for name in (name for name, count in times.items() if count > 1):
        keys = [f"data.sources.{n}.name" for n, source in enumerate(config.data.sources) if source.name == name]
        yield ConfigError(
            f"{times[name]} sources are named '{name}'", where=", ".join(keys), fix="give each a different name"
        )


def _stages(config: Config) -> Iterator[ConfigError]:
    train = config.train
    before = -1
    steps = train.steps or train.batches.steps_for(train.tokens or 0)
    batches = train.batches
    for number, stage in enumerate(config.data.mixture.stages):
        key = f"data.mixture.stages.{number}"
        if steps:  # otherwise it is not known yet where stages begin
            first = stage.first_step(steps, batches)
            if first <= before:
                yield ConfigError(
                    f"a stage that begins at step {first:,} comes after one that begins at step {before:,}",
                    where=f"{key}.start",
                    fix="put the stages in the order of their starts, each at a different step",
                )
            before = first
        if stage.weights is not None:
            yield from _stage_weights(config, stage.weights, f"{key}.weights")
        if stage.sequence_length and train.sequence_length % stage.sequence_length:
            near = nearest(stage.sequence_length, divisors(train.sequence_length))
            yield ConfigError(
                f"rows of {train.sequence_length} tokens cannot be cut into rows of {stage.sequence_length}",
                where=f"{key}.sequence_length, train.sequence_length",
                fix=f"sequence_length: {near}",
            )


def _stage_weights(config: Config, weights: dict[str, float], key: str) -> Iterator[ConfigError]:
    names = [str(source.name) for source in named_sources(config.data.sources)]
    for name in (name for name in weights if name not in names):
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        yield ConfigError(f"there is no source '{name}'", where=key, fix=f"{hint}known sources: {', '.join(names)}")
    missing = [name for name in names if name not in weights]
    if missing:
        what = f"a stage has weights, but none for: {', '.join(missing)}"
        yield ConfigError(what, where=key, fix=f"add {', '.join(f'{name}: 0' for name in missing)}")
    if not any(weights.values()):
        yield ConfigError("a stage has no source with a weight", where=key, fix="give one a weight above 0")


def _workers(config: Config) -> Iterator[ConfigError]:
    # A launcher that has started this process (torchrun, Ray) gives the number; otherwise they will be started here.
    # For a run on several machines its variables number machines, unless it has started a worker (`machine_role`).
    machines = config.parallel.machines
    try:
        started = world_size_from_environment() if machines == 1 or "LOCAL_RANK" in os.environ else None
        workers = started or config.parallel.workers * (usable_machines(config, machines) or machines)
        mesh = resolve_mesh(config, workers)
        grid = resolve_lanes(config, mesh.data)
    except ConfigError as error:
        yield error
        return
    yield from deepspeed_problems(config, mesh)
    yield from host_weight_problems(config, mesh)
    yield from _reduction(config, grid)
    for micro_batches in dict.fromkeys(map(grid.micro_batches_of, config.train.batches.sizes)):
        problem = micro_batch_problem(config.parallel, config.train.batches, grid, micro_batches)
        if problem is not None:
            yield problem
            return


def _reduction(config: Config, grid: LaneGrid) -> Iterator[ConfigError]:
    """Check that an elastic run, which sums gradients lane by lane, can do so as often as the config says."""
    every = config.parallel.reduce_every
    where = "parallel.reduce_every, determinism"
    if config.determinism != "elastic" or not grid.interleaved or every == "auto":
        return
    if every == "step":
        yield ConfigError(
            "determinism 'elastic' sums gradients lane by lane, not once a step",
            where=where,
            fix="leave parallel.reduce_every out, or determinism=run",
        )
    elif grid.micro_batches > 1:
        yield ConfigError(
            f"determinism 'elastic' sums gradients lane by lane, and a lane has {grid.micro_batches} micro-batches",
            where=f"{where}, train.lanes",
            fix=f"train.micro_batch={grid.micro_batch * grid.micro_batches} or more train.lanes, or leave"
            " parallel.reduce_every out",
        )


def logits_problems(config: Config) -> Iterator[ConfigError]:
    """Yield what a loss on whole logits does not go with, if there is one."""
    if config.logits_key is not None:
        yield from loss_problems(config.logits_key, config.parallel, config.model)


def _benchmarks(config: Config) -> Iterator[ConfigError]:
    if config.evaluation.benchmarks is not None:
        yield from benchmark_problems(config.evaluation.benchmarks, config.train.device, config.parallel.workers)


def _fewer_workers(config: Config) -> Iterator[ConfigError]:
    """Check that a run that may continue with fewer workers can do so."""
    parallel = config.parallel
    if parallel.min_workers is None or parallel.min_workers == parallel.workers:
        return
    if config.determinism == "run":
        yield ConfigError(
            "determinism 'run' holds for one number of workers, so the run could not continue bit for bit with fewer",
            where="parallel.min_workers, determinism",
            fix="determinism=elastic, or off",
        )
        return
    for size in range(parallel.min_workers, parallel.workers):
        try:
            resolve_lanes(config, resolve_mesh(config, size).data)
        except ConfigError:
            continue
        return
    yield ConfigError(
        f"no number of workers from {parallel.min_workers} to {parallel.workers - 1} fits this run",
        where="parallel.min_workers, parallel.workers",
        fix="parallel.min_workers=1",
    )


def _fewer_machines(config: Config) -> Iterator[ConfigError]:
    """Check that a run that may continue with fewer machines promises no bits for one number of them."""
    parallel = config.parallel
    if config.determinism == "run" and parallel.min_machines not in (None, parallel.machines):
        yield ConfigError(
            "determinism 'run' holds for one number of workers, so a lost machine is waited for, never left out",
            where="parallel.min_machines, determinism",
            fix=f"parallel.machines={parallel.machines} (--machines), or determinism=elastic, or off",
        )


def _auto_choices(config: Config) -> Iterator[ConfigError]:
    if config.train.compile == "auto" and config.determinism == "elastic":
        yield ConfigError(
            "determinism 'elastic' holds for any number of workers, but the gain of torch.compile depends on it",
            where="train.compile, determinism",
            fix="train.compile=true or false (a run with auto reports its choice), or determinism=run",
        )
    if config.train.compile_mode is not None and config.determinism != "off":
        yield ConfigError(
            f"torch.compile's mode '{config.train.compile_mode}' takes the kernels that are fastest at this start, so"
            f" the next one may compute other bits than determinism '{config.determinism}' promises",
            where="train.compile, determinism",
            fix="train.compile=true, or determinism=off",
        )
    if config.train.activation_checkpointing == "offload" and config.train.compile:
        yield ConfigError(
            "torch.compile decides itself what a layer keeps, and cannot keep it in host memory",
            where="train.activation_checkpointing, train.compile",
            fix="train.activation_checkpointing=full, or train.compile=false",
        )
    if config.train.micro_batch == "auto" and config.determinism == "elastic":
        yield ConfigError(
            "determinism 'elastic' holds for any number of workers, but the largest micro-batch depends on it",
            where="train.micro_batch, determinism",
            fix="give train.micro_batch a number (a run with auto reports its choice), or determinism=run",
        )


def _health(config: Config) -> Iterator[ConfigError]:
    if not config.health.replay_every:
        return
    if config.determinism == "off":
        yield ConfigError(
            "a step that is computed twice gives equal bits only in a deterministic run",
            where="health.replay_every, determinism",
            fix="determinism=run, or health.replay_every=0",
        )
    if find_strategy(config.parallel.strategy).is_deepspeed:
        yield ConfigError(
            "DeepSpeed keeps gradients to itself, so a step cannot be computed twice",
            where="health.replay_every, parallel.strategy",
            fix=f"parallel.strategy={simplest_strategy(lambda s: s.shards_gradients)}, or health.replay_every=0",
        )


def credential_problems(config: Config) -> Iterator[ConfigError]:
    """Yield a problem for each value that redaction would change: the stored config must equal the given one."""
    values = config.model_dump(mode="json")
    alert = config.telemetry.alert
    found = dict(credentials_in(values))
    if alert is not None and looks_random(alert):
        found.setdefault(_ALERT, "a word that looks like a key or token")
    for key, what in found.items():
        yield ConfigError(
            f"{key} has a credential in it: {what}; a config is kept in the run directory and in checkpoints",
            where=key,
            fix=_ALERT_FIX if key == _ALERT else _fix(config, key),
        )


def _fix(config: Config, key: str) -> str:
    url = _url_of(config, key)
    if url is None or scheme_of(url) is None:
        if "options" in key:
            return "remove it; ${NAME} in its place stands for the value of an environment variable"
        return "remove it, and let the program read it from an environment variable"
    return f"remove it; {credentials_fix(url)}"


def _url_of(config: Config, key: str) -> str | None:
    """Return the URL that a key belongs to."""
    if key.startswith("data.sources."):
        return config.data.sources[int(key.split(".")[2])].path
    if key.startswith("data.remote"):
        return config.data.remote
    if key.startswith("checkpoint.remote.") and config.checkpoint.remote is not None:
        return config.checkpoint.remote.url
    return None
