"""A config whose data is there and whose model has every size, as the first process of an attempt looks at it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.format.folders import checkpoint_folders
from headway.config import Config, ModelConfig
from headway.core.console import is_first_worker, warning
from headway.core.errors import ConfigError
from headway.core.foreign import read_bytes
from headway.core.launched import world_size_from_environment

if TYPE_CHECKING:
    from headway.config.data import DataConfig
    from headway.data.store import TokenStore

#: `model.max_sequence_length` where nobody has given one, which for a checkpoint's shape means the checkpoint's.
_NOT_GIVEN: int = ModelConfig.model_fields["max_sequence_length"].default


def completed(config: Config) -> tuple[Config, TokenStore]:
    """The config with the shape of its model filled in, and the data that it names.

    Args:
        config: Resolved.

    Raises:
        HeadwayError: the data is missing or does not fit, or the model cannot be made or cut as the config says.
    """
    # Looked for before torch is imported: a missing store should be said at once.
    from headway.data.remote_store import open_store

    started = world_size_from_environment() is not None  # by an agent, which also says how many are on this machine
    store = open_store(config.data, processes=None if started else config.parallel.workers)
    _say_what_differs(config.data, store)
    from headway.config.experts import decoder_problems
    from headway.models.build import complete

    config = config.model_copy(update={"model": complete(config.model, store.vocab_size)})
    for problem in decoder_problems(config):  # of a pretrained shape, which only now is known
        raise problem
    if config.model.from_pretrained is not None:
        _check_row_length(config)
        _look_at_tokenizer(config, config.model.from_pretrained, store)
    return config, store


def _say_what_differs(data: DataConfig, store: TokenStore) -> None:
    """Say when the store is not the one that would be prepared from the config.

    A remote or an imported one was prepared with another config, or with none.
    """
    from headway.data.preparing.settings import differing_keys

    differing = [] if data.remote or "imported" in store.manifest else differing_keys(data, store.manifest)
    if differing and is_first_worker():
        warning(
            f"{store.path} was prepared with other settings than the config has: {', '.join(differing)};"
            " it is trained on as it is, and headway data prepare CONFIG brings it up to date"
        )


def _check_row_length(config: Config) -> None:
    """What is checked of other models when the config is read. The stages of a mixture have no longer rows."""
    length, longest = config.train.sequence_length, config.model.max_sequence_length
    if length > longest:
        raise ConfigError(
            f"train.sequence_length is {length}, but the checkpoint is meant for {longest}",
            where=f"config.json of {config.model.from_pretrained}",
            fix=f"train.sequence_length={longest}, or model.max_sequence_length={max(length, _NOT_GIVEN + 1)}",
        )


def _look_at_tokenizer(config: Config, pretrained: Path, store: TokenStore) -> None:
    """Refuse data whose ids select the embeddings of other tokens than the checkpoint was trained on; of a run that has
    learned them, only say it.

    Ids that only one of the two knows are no contradiction: tokens may be added, and a `tokenizer.json` written anew.
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
    """Id -> token."""
    from headway.data.tokenizing.spec import parse, vocabulary

    return {number: token for token, number in vocabulary(parse(read_bytes(file), str(file))).items()}
