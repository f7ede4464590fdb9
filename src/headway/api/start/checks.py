"""What can be found wrong with a run before its data are prepared.

One list, for `headway config check`, `headway train --dry-run`, and the start of a run, which makes the same checks
before it prepares anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.config import Config, LaneGrid, MeshShape, resolve_lanes, resolve_mesh
from headway.core.coordination.launched import world_size_from_environment
from headway.core.hub import is_on_hub
from headway.core.storage import check_filesystem
from headway.data.store_manifest import read_manifest
from headway.data.tokenizing.beside import chat_encoder
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.run.session.attempt import RunOptions
from headway.run.session.checks import check_remote_reachable, check_run_directory
from headway.run.session.completed import check_same_ids, shaped
from headway.run.session.parts import Problems, asks_the_hub, check_apart, find_problems
from headway.run.session.preparation import why_prepare
from headway.run.session.spending import check_cost
from headway.text.preparing.prepare import check_steps
from headway.text.reading.huggingface_datasets import check_installed, is_named
from headway.text.reading.places import is_remote
from headway.text.reading.sources import Source, check_sources, find_sources
from headway.tracking.sinks import check_trackers
from headway.training.job import load_callbacks
from headway.training.own_task import build_task, named_code, try_loss


@dataclass(frozen=True)
class UnpreparedRun:
    """What is known about a run whose token store is not what its config says yet."""

    config: Config
    """With every size of the model that does not depend on a vocabulary that is still to be trained."""
    mesh: MeshShape
    grid: LaneGrid
    why: str
    """Why the store has to be prepared."""
    sources: Sequence[Source]


def check_config(config: Config) -> None:
    """Make the checks that the start of a run would make, as far as they do not depend on the machine.

    Nothing is downloaded, so models and tokenizers of the Hub are not looked at, nor is a store behind a URL.

    Args:
        config: Resolved.

    Raises:
        HeadwayError: with every problem that was found.
    """
    if config.task is not None:
        _check_task(config)
        return
    if examine_unprepared(config, here=False) is not None:
        return
    found = Problems()
    with found.collecting():
        if config.data.remote is None and not asks_the_hub(config):
            config = shaped(config, read_manifest(config.data.store)["tokenizer"]["vocab_size"])
    find_problems(config, found, here=False)
    found.of(lambda: check_trackers(config.track))
    found.of(lambda: check_apart(config, RunOptions(), here=False))
    found.of(lambda: load_callbacks(config.callbacks))
    found.report()


def _check_task(config: Config) -> None:
    """Make the task that a config names, and check what it needs besides."""
    found = Problems()
    found.of(lambda: named_code(config.task))
    found.of(lambda: try_loss(build_task(config), config.seed, resolve_lanes(config, 1).micro_batch))
    find_problems(config, found, here=False)
    found.of(lambda: check_trackers(config.track))
    found.of(lambda: load_callbacks(config.callbacks))
    found.report()


def examine_unprepared(config: Config, options: RunOptions | None = None, *, here: bool = True) -> UnpreparedRun | None:
    """Make every check that needs no token store; return what is known, or None if the store is what the config says.

    Nothing is written. All problems are found, not the first alone.

    Args:
        config: Resolved.
        options: What to do about the run directory; None if no run is intended there.
        here: Whether the run would be on this machine, now. Otherwise its devices are not looked for, nothing is
            downloaded from the Hub, and no server is asked for files.

    Raises:
        HeadwayError: the errors that would stop the run.
    """
    why = why_prepare(config, options or RunOptions())
    if why is None:
        return None
    found = Problems()
    sources = []
    wanted = config
    tokenizer = None
    with found.collecting():
        sources = _checked_sources(config, here)
    with found.collecting():
        tokenizer = _given_tokenizer(config, here)
    if here or not asks_the_hub(config):
        with found.collecting():
            config = shaped(config, _expected_vocabulary(config) if tokenizer is None else tokenizer.vocab_size)
            if tokenizer is not None:
                check_same_ids(config, tokenizer.content, Path(tokenizer.where))
    find_problems(config, found, here)
    found.of(lambda: check_trackers(config.track))
    found.of(lambda: check_apart(config, options or RunOptions(), here=here))
    found.of(lambda: load_callbacks(wanted.callbacks))
    mesh = grid = None
    with found.collecting():
        mesh = resolve_mesh(config, world_size_from_environment() or config.parallel.all_workers)
        grid = resolve_lanes(config, mesh.data)
    if options is not None:
        found.of(lambda: check_cost(config, options))
        # Whether the run there and its remote checkpoints are those of this config, is known only with the data.
        found.of(lambda: check_run_directory(wanted))
        found.of(lambda: check_remote_reachable(wanted))
    found.report()
    assert mesh is not None and grid is not None, "otherwise there was a problem"
    return UnpreparedRun(config, mesh, grid, why, sources)


def _expected_vocabulary(config: Config) -> int:
    """Return the number of ids of a vocabulary that is still to be trained, which may become smaller.

    It never says that a model is too small, nor where the given tokenizer could not be read.
    """
    most = config.data.tokenizer.vocab_size if config.data.tokenizer.path is None else 1
    return min(most, config.model.vocab_size or most)


def _checked_sources(config: Config, here: bool) -> list[Source]:
    """Find the sources, and check what reading them takes: packages, credentials, the fields of their first records."""
    check_steps(config.data)
    named = [source for source in config.data.sources if is_named(source.path)]
    for source in named:
        check_installed(source.path)  # to look into a dataset is to download it
    remote = [source for source in config.data.sources if not here and is_remote(source.path) and source not in named]
    for source in remote:
        check_filesystem(source.path, "reading")
    others = [source for source in config.data.sources if source not in (*named, *remote)]
    sources = find_sources(others, most=config.data.max_document_bytes)
    check_sources(sources)
    return sources


def _given_tokenizer(config: Config, here: bool) -> Tokenizer | None:
    """Load the tokenizer that the config gives, and check that it does what the data ask of it; None if one is trained.

    Raises:
        ConfigError: it has no begin-of-text token or no chat template.
        DataError: it cannot be read.
    """
    settings = config.data.tokenizer
    if settings.path is None or (is_on_hub(settings.path) and not here):
        return None
    tokenizer = Tokenizer.load(settings.path, settings.pattern)
    tokenizer.begin_of_text(config.data.begin_of_text)
    if any(source.format == "chat" for source in config.data.sources):
        chat_encoder(tokenizer, settings.special_tokens_in_text)
    return tokenizer
