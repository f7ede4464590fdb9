"""Changes during a campaign's runs: the batch, the data, the length of rows."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random

from headway.config import Config, dump_config, override, resolve_lanes
from headway.config.sections.data import SourceConfig
from headway.core.errors import ConfigError, DataError
from headway.core.files.paths import link_or_copy
from headway.core.process.command import module_command
from headway.lab.chaos.campaign import FEWEST_STEPS, Stage

#: The source that is added during a run, and its number of documents.
_JOINS = "joined"
_DOCUMENTS = 200
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath")


def one_stage(config: Config, worker_counts: Sequence[int]) -> list[Stage]:
    """Return the single stage of a run without changes."""
    return [Stage(0, config.train.resolved_steps, micro_batches(config, worker_counts))]


def changing_stages(config: Config, folder: Path, worker_counts: Sequence[int]) -> list[Stage]:
    """Return stages of about equal length: the config as is, a larger batch, more data, shorter rows.

    Args:
        config: A resolved config. Its token store is copied, and the copy grows; the store itself is not touched.
        folder: Folder for the copies.
        worker_counts: Numbers of workers to alternate between.

    Raises:
        ConfigError: the config does not support these changes, or has too few steps.
    """
    train = config.train
    data = config.data
    steps = train.resolved_steps
    if data.remote is not None or data.packing != "concat" or train.batch_ramp or data.mixture.stages:
        raise ConfigError(
            "a campaign with changes needs a store on this machine and data.packing=concat, and supports neither a ramp"
            " nor stages",
            where="data.remote, data.packing, train.batch_ramp, data.mixture",
            fix="leave out --changes, or choose another config",
        )
    if train.sequence_length % 2:
        raise ConfigError(
            f"rows of {train.sequence_length} tokens cannot be halved",
            where="train.sequence_length",
            fix=f"train.sequence_length={train.sequence_length + 1}",
        )
    if steps < 4 * FEWEST_STEPS:
        raise ConfigError(
            f"{steps} steps are too few for four stages that are killed in every phase",
            where="train.steps",
            fix=f"train.steps={4 * FEWEST_STEPS} at least; 80 is a good number",
        )
    before, grown, sources = _stores(config, folder)
    changes: list[tuple[str, ...]] = [
        (f"data.store={json.dumps(str(before))}",),
        (f"train.global_batch={2 * train.global_batch_rows}",),
        (f"data.store={json.dumps(str(grown))}", f"data.sources={sources}"),
        (f"train.sequence_length={train.sequence_length // 2}",),
    ]
    stages: list[Stage] = []
    so_far: tuple[str, ...] = ()
    for number, change in enumerate(changes):
        first, last = (steps * place // len(changes) for place in (number, number + 1))
        so_far = (*so_far, *change)
        wanted = override(config, so_far)
        stages.append(Stage(first, last, micro_batches(wanted, worker_counts), (*so_far, f"train.steps={last}")))
    return stages


def micro_batches(config: Config, worker_counts: Sequence[int]) -> dict[int, int]:
    """Return the micro-batches of one worker in one step, by the number of workers."""
    grids = {workers: resolve_lanes(config, workers) for workers in worker_counts}
    return {workers: grid.lanes // workers * grid.micro_batches for workers, grid in grids.items()}


def _stores(config: Config, folder: Path) -> tuple[Path, Path, str]:
    """Create a copy of the config's store, a copy with more data, and the latter's sources.

    Raises:
        DataError: the second one cannot be prepared.
    """
    before = folder / "data"
    grown = folder / "data-grown"
    text = folder / f"{_JOINS}.jsonl"
    random = Random(0)
    lines = (" ".join(random.choice(_WORDS) for _ in range(100)) for _ in range(_DOCUMENTS))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    for copy in (before, grown):
        shutil.copytree(config.data.store, copy, copy_function=link_or_copy)
    weights = [source.weight for source in config.data.sources if source.weight is not None]
    more = SourceConfig(path=str(text), name=_JOINS, weight=min(weights) if weights else None)
    sources = [*config.data.sources, more]
    more_data = config.data.model_copy(update={"sources": sources, "store": grown})
    file = folder / "data-grown.yaml"
    file.write_text(dump_config(config.model_copy(update={"data": more_data})), encoding="utf-8")
    done = subprocess.run(module_command("headway", "data", "prepare", str(file)), capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"more data cannot be prepared: {done.stderr.strip()}", where=str(file), fix="see above")
    return before, grown, json.dumps([source.model_dump(mode="json", exclude_defaults=True) for source in sources])
