"""What a run changes its mind about in a campaign: its batch, its data, the length of its rows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from headway.chaos.campaign import FEWEST_STEPS, Stage
from headway.config import Config, override, resolve_lanes
from headway.config.data import SourceConfig
from headway.core.errors import ConfigError
from headway.data.preparing.prepare import prepare

#: Source that joins on the way, and its documents.
_JOINS, _DOCUMENTS = "joined", 200
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath")


def one_stage(config: Config, worker_counts: Sequence[int]) -> list[Stage]:
    """A run that stays what it is."""
    assert config.train.steps is not None, "the config is resolved"
    return [Stage(0, config.train.steps, micro_batches(config, worker_counts))]


def changing_stages(config: Config, folder: Path, worker_counts: Sequence[int]) -> list[Stage]:
    """Stages of about equal length: as the config is, with a larger batch, with more data, with shorter rows.

    Args:
        config: Resolved. Its token store is copied, and the copy grows; the store itself is not touched.
        folder: For the copies.
        worker_counts: Numbers of workers that take turns.

    Raises:
        ConfigError: the config has nothing that could be changed so, or too few steps for that.
    """
    train, data = config.train, config.data
    assert train.steps is not None, "the config is resolved"
    if data.remote is not None or data.packing != "concat" or train.batch_ramp or data.mixture.stages:
        raise ConfigError(
            "a campaign with changes needs a store on this machine, rows that are cut at their length, and neither a"
            " ramp nor stages",
            where="data.remote, data.packing, train.batch_ramp, data.mixture",
            fix="leave out --changes, or choose another config",
        )
    if train.sequence_length % 2:
        raise ConfigError(
            f"rows of {train.sequence_length} tokens cannot be halved",
            where="train.sequence_length",
            fix=f"train.sequence_length={train.sequence_length + 1}",
        )
    if train.steps < 4 * FEWEST_STEPS:
        raise ConfigError(
            f"{train.steps} steps are too few for four stages that are killed in every phase",
            where="train.steps",
            fix=f"train.steps={4 * FEWEST_STEPS} at least; 80 are a good number",
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
        first, last = (train.steps * place // len(changes) for place in (number, number + 1))
        so_far = (*so_far, *change)
        wanted = override(config, so_far)
        stages.append(Stage(first, last, micro_batches(wanted, worker_counts), (*so_far, f"train.steps={last}")))
    return stages


def micro_batches(config: Config, worker_counts: Sequence[int]) -> dict[int, int]:
    """Of one worker in one step, by the number of workers."""
    grids = {workers: resolve_lanes(config, workers) for workers in worker_counts}
    return {workers: grid.lanes // workers * grid.micro_batches for workers, grid in grids.items()}


def _stores(config: Config, folder: Path) -> tuple[Path, Path, str]:
    """A copy of the config's store, one with more data, and the sources of that."""
    before, grown, text = folder / "data", folder / "data-grown", folder / f"{_JOINS}.jsonl"
    random = Random(0)
    lines = (" ".join(random.choice(_WORDS) for _ in range(100)) for _ in range(_DOCUMENTS))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    for copy in (before, grown):
        shutil.copytree(config.data.store, copy, copy_function=_link)
    weights = [source.weight for source in config.data.sources if source.weight is not None]
    more = SourceConfig(path=str(text), name=_JOINS, weight=min(weights) if weights else None)
    sources = [*config.data.sources, more]
    prepare(config.data.model_copy(update={"sources": sources, "store": grown}))
    return before, grown, json.dumps([source.model_dump(mode="json", exclude_defaults=True) for source in sources])


def _link(source: str, target: str) -> None:
    """The same file in another place; no file of a store is ever written again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
