"""What can be found wrong with a run before its data are prepared.

One list, for `headway config check`, `headway train --dry-run`, and the start of a run, which makes the same checks
before it prepares anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headway.config import Config, LaneGrid, MeshShape, resolve_lanes, resolve_mesh
from headway.config.checks.contradictions import combined
from headway.core.coordination.launched import world_size_from_environment
from headway.core.errors import ConfigError, HeadwayError
from headway.core.functions import identify_function
from headway.core.hub import is_on_hub
from headway.core.storage import check_filesystem
from headway.data.store_manifest import read_manifest
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.models.build import build_without_memory
from headway.models.hub.sizes import model_without_weights
from headway.parallel.tensor import plan_of
from headway.parallel.world import pick_device
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import RunOptions
from headway.run.session.checks import check_keys_present, check_remote_reachable, check_run_directory
from headway.run.session.completed import check_same_ids, shaped, why_prepare
from headway.run.session.spending import check_cost
from headway.text.preparing.prepare import check_steps
from headway.text.preparing.vocabulary import chat_encoder
from headway.text.reading.huggingface_datasets import check_installed, is_named
from headway.text.reading.places import is_remote
from headway.text.reading.sources import Source, check_sources, find_sources
from headway.tracking.sinks import check_trackers
from headway.training.job import load_callbacks
from headway.training.setup.available import check_available, check_installed_for
from headway.training.setup.model_proofs import prove_class


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


@dataclass
class _Problems:
    """The errors that checks have raised."""

    errors: list[HeadwayError] = field(default_factory=list)

    def of(self, check: Callable[[], object]) -> None:
        with self.collecting():
            check()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except HeadwayError as error:
            if error.what not in {known.what for known in self.errors}:
                self.errors.append(error)

    def report(self) -> None:
        """Raise the only error as it is, and several as one of a config.

        Raises:
            HeadwayError: there are errors.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise combined([ConfigError(error.what, where=error.where, fix=error.fix) for error in self.errors])


def check_config(config: Config) -> None:
    """Make the checks that the start of a run would make, as far as they do not depend on the machine.

    Nothing is downloaded, so models and tokenizers of the Hub are not looked at, nor is a store behind a URL.

    Args:
        config: Resolved.

    Raises:
        HeadwayError: with every problem that was found.
    """
    if examine_unprepared(config, here=False) is not None:
        return
    found = _Problems()
    with found.collecting():
        if config.data.remote is None and not _asks_the_hub(config):
            config = shaped(config, read_manifest(config.data.store)["tokenizer"]["vocab_size"])
    _check_parts(config, found, here=False)
    found.of(lambda: check_apart(config, RunOptions(), here=False))
    found.of(lambda: load_callbacks(config.callbacks))
    found.report()


def check_apart(config: Config, options: RunOptions, *, here: bool = True) -> None:
    """Check by a small model that a class of transformers tells packed documents apart, if `data.document_mask` asks.

    A run that has begun has proven it, and its checkpoints know that. An attempt does not ask: it has the weights in
    a moment, and its process may still be copied, which it could not once it has computed.

    Args:
        config: With the shape of its model.
        options: What to do about an earlier run of this name.
        here: Whether the run would be on this machine; otherwise the CPU is asked.

    Raises:
        ConfigError: it does not.
    """
    if config.model.implementation != "transformers" or not config.data.document_mask:
        return
    continues = RunDirectory(config.run_directory).has_begun() and not options.restart
    is_there = here or not _asks_the_hub(config)
    if is_there and not continues:
        prove_class(config.model, pick_device(config.train.device if here else "cpu"))


def check_parts(config: Config, *, makes_callbacks: bool = True) -> None:
    """Check everything that a run on this machine needs besides its data and its run directory.

    These are packages, devices, keys, functions and classes that the config names, trackers, and how its model is cut.

    Args:
        config: Resolved, with the shape of its model.
        makes_callbacks: Make the callbacks that the config names; not where this process is about to do that.

    Raises:
        HeadwayError: with every problem that was found.
    """
    found = _Problems()
    _check_parts(config, found, here=True)
    if makes_callbacks:
        found.of(lambda: load_callbacks(config.callbacks))
    found.report()


def _check_parts(config: Config, found: _Problems, here: bool) -> None:
    """Find what `check_parts` checks, but for callbacks; devices only if the run would be on this machine."""
    found.of(lambda: check_installed_for(config))
    if here:
        found.of(lambda: check_available(config, pick_device(config.train.device)))
    found.of(lambda: check_keys_present(config.checkpoint))
    found.of(lambda: check_trackers(config.track))
    if config.loss is not None:
        found.of(lambda: identify_function(config.loss or "", "loss"))
    if config.parallel.tensor > 1:
        found.of(lambda: _check_is_cut(config))


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
    found, sources, wanted = _Problems(), [], config
    tokenizer = None
    with found.collecting():
        sources = _checked_sources(config, here)
    with found.collecting():
        tokenizer = _given_tokenizer(config, here)
    if here or not _asks_the_hub(config):
        with found.collecting():
            config = shaped(config, _expected_vocabulary(config) if tokenizer is None else tokenizer.vocab_size)
            if tokenizer is not None:
                check_same_ids(config, tokenizer.content, Path(tokenizer.where))
    _check_parts(config, found, here)
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


def _asks_the_hub(config: Config) -> bool:
    teacher = None if config.distill is None else config.distill.teacher
    return is_on_hub(config.model.from_pretrained) or is_on_hub(teacher)


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


def _check_is_cut(config: Config) -> None:
    """Check that the class of the model says how workers share its matrices.

    Raises:
        ConfigError: it does not, or not for this number of workers.
    """
    if config.model.implementation == "transformers":
        plan_of(model_without_weights(config.model), config.parallel.tensor)
    elif config.model.vocab_size is not None:  # otherwise it follows from a vocabulary that could not be read
        shape = config.model.model_copy(update={"from_pretrained": None})
        model, _ = build_without_memory(shape, vocab_size=config.model.vocab_size, seed=0)
        plan_of(model, config.parallel.tensor)
