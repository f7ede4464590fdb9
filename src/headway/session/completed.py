"""Completion of a config: its data is found, and its model gets every size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.format.folders import checkpoint_folders
from headway.config import Config, ModelConfig, load_resolved
from headway.config.pretrained import is_on_hub, is_pinned, split_hub_name
from headway.core.console import is_first_worker, warning
from headway.core.errors import ConfigError
from headway.core.foreign import read_bytes
from headway.core.launched import world_size_from_environment

if TYPE_CHECKING:
    from headway.config.data import DataConfig
    from headway.data.store import TokenStore

#: `model.max_sequence_length` where none is given, which for a pretrained checkpoint means the checkpoint's.
_NOT_GIVEN: int = ModelConfig.model_fields["max_sequence_length"].default


def completed(config: Config) -> tuple[Config, TokenStore]:
    """Return the config with the shape of its model filled in, and the data that it names.

    Args:
        config: Resolved.

    Raises:
        HeadwayError: the data is missing or does not fit, or the model cannot be made or cut as the config says.
    """
    # Open the store before torch is imported, so that a missing store is reported at once.
    from headway.data.remote_store import open_store

    started = world_size_from_environment() is not None  # by an agent, which also sets the number on this machine
    store = open_store(config.data, processes=None if started else config.parallel.workers)
    _warn_of_differences(config.data, store)
    from headway.config.experts import decoder_problems
    from headway.models.build import complete
    from headway.models.hub.folder import open_folder

    config = config.model_copy(update={"model": complete(_pinned(config), store.vocab_size)})
    for problem in decoder_problems(config):  # the shape of a pretrained model is known only now
        raise problem
    if config.model.from_pretrained is not None:
        _check_row_length(config)
        _check_tokenizer(config, open_folder(config.model.from_pretrained), store)
    return config, store


def _pinned(config: Config) -> ModelConfig:
    """Return the model with the commit of its source on the Hub: that of the run if it has begun, or the current one.

    Raises:
        ConfigError: the source is not there.
    """
    source = config.model.from_pretrained
    if source is None or not is_on_hub(source) or is_pinned(source):
        return config.model
    saved = Path(config.run_directory) / "config.yaml"
    before = load_resolved(saved).model.from_pretrained if saved.is_file() else None
    if before is not None and is_pinned(before) and split_hub_name(str(before))[0] == split_hub_name(str(source))[0]:
        return config.model.model_copy(update={"from_pretrained": before})
    from headway.models.hub.folder import pinned_source

    return config.model.model_copy(update={"from_pretrained": pinned_source(source)})


def _warn_of_differences(data: DataConfig, store: TokenStore) -> None:
    """Warn if the store differs from one prepared by this config.

    A remote or an imported store was prepared by another config, or by none.
    """
    from headway.data.preparing.settings import differing_keys

    differing = [] if data.remote or "imported" in store.manifest else differing_keys(data, store.manifest)
    if differing and is_first_worker():
        warning(
            f"{store.path} was prepared with other settings than the config has: {', '.join(differing)};"
            " it is used as it is; headway data prepare CONFIG brings it up to date"
        )


def _check_row_length(config: Config) -> None:
    """Check that rows fit a pretrained model; for other models the config's own checks do. Stages of a mixture are no
    longer."""
    length, longest = config.train.sequence_length, config.model.max_sequence_length
    if length > longest:
        raise ConfigError(
            f"train.sequence_length is {length}, but the checkpoint is meant for {longest}",
            where=f"config.json of {config.model.from_pretrained}",
            fix=f"train.sequence_length={longest}, or model.max_sequence_length={max(length, _NOT_GIVEN + 1)}",
        )


def _check_tokenizer(config: Config, pretrained: Path, store: TokenStore) -> None:
    """Check that the data's ids mean the tokens that the pretrained checkpoint was trained on.

    If the run has checkpoints of its own, only warn. Ids that only one of the two knows are no contradiction: tokens
    may be added, and `tokenizer.json` may be rewritten.

    Raises:
        ConfigError: an id means different tokens.
    """
    ours, theirs = store.tokenizer_folder / "tokenizer.json", pretrained / "tokenizer.json"
    if not ours.is_file() or not theirs.is_file() or read_bytes(ours) == read_bytes(theirs):
        return
    meant = _tokens(theirs)
    for number, token in _tokens(ours).items():
        if meant.get(number, token) != token:
            problem = ConfigError(
                f"the data were prepared with another tokenizer than the checkpoint's: id {number:,} is"
                f" {meant[number]!r} in the checkpoint, {token!r} in the store",
                where=f"{theirs}, {ours}",
                fix=f"data.tokenizer.path: {theirs}, then headway data prepare",
            )
            if checkpoint_folders(Path(config.run_directory) / "checkpoints"):
                warning(problem.what)
                return
            raise problem


def _tokens(file: Path) -> dict[int, str]:
    """Return a map from id to token."""
    from headway.data.tokenizing.spec import parse, vocabulary

    return {number: token for token, number in vocabulary(parse(read_bytes(file), str(file))).items()}
