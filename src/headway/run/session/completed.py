"""Completion of a config: its data is found, and its model gets every size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.folders import checkpoint_folders
from headway.config import Config, ModelConfig, load_resolved
from headway.config.checks.contradictions import logits_problems
from headway.config.derived.experts import BALANCE_KEYS, decoder_problems
from headway.core.console import is_first_worker, warning
from headway.core.coordination.launched import world_size_from_environment
from headway.core.errors import ConfigError
from headway.core.files.foreign import read_bytes
from headway.core.hub import is_on_hub, is_pinned, split_hub_name
from headway.core.user_command import suggest
from headway.data.made_of import differences
from headway.data.remote_store import open_store
from headway.data.tokenizing.spec import first_conflict, parse, vocabulary
from headway.models.build import complete
from headway.models.hub.folder import base_folder, open_folder, pinned_source
from headway.models.hub.implementation import check_own_code, choose_implementation
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import RunOptions
from headway.training.custom_loss import teacher_config

if TYPE_CHECKING:
    from headway.config.sections.losses import DistillConfig
    from headway.data.store import TokenStore

#: `model.max_sequence_length` where none is given, which for a pretrained checkpoint means the checkpoint's.
_NOT_GIVEN: int = ModelConfig.model_fields["max_sequence_length"].default


def completed(config: Config, options: RunOptions | None = None) -> tuple[Config, TokenStore]:
    """Return the config with the shape of its model filled in, and the data that it names.

    Args:
        config: Resolved.
        options: What to do about the run directory; None if no run is intended there.

    Raises:
        HeadwayError: the data is missing or does not fit, or the model cannot be made or cut as the config says.
    """
    started = world_size_from_environment() is not None  # by an agent, which also sets the number on this machine
    store = open_store(config.data, processes=None if started else config.parallel.workers)
    _check_made_of(config, store, options)
    config = shaped(config, store.vocab_size)
    vocabulary = store.tokenizer_folder / "tokenizer.json"
    if vocabulary.is_file():
        check_same_ids(config, read_bytes(vocabulary), vocabulary)
    return config, store


def shaped(config: Config, vocab_size: int) -> Config:
    """Return the config with the shape of its model filled in, and what a run decides when it begins.

    Args:
        config: Resolved.
        vocab_size: Number of token ids that the data may contain.

    Raises:
        HeadwayError: the model or its teacher cannot be made or cut as the config says, or cannot compute its rows.
    """
    config = _as_begun(config)
    config = config.model_copy(update={"model": complete(config.model, vocab_size)})
    # A pretrained model's shape is known only now.
    for problem in (*decoder_problems(config), *logits_problems(config)):
        raise problem
    if config.model.from_pretrained is not None:
        _check_row_length(config)
    if config.distill is not None:
        _check_teacher(config, config.distill, vocab_size)
    return config


def check_same_ids(config: Config, vocabulary: bytes, where: Path) -> None:
    """Check that the data's ids mean the tokens that the pretrained model and the teacher were trained on.

    Args:
        config: With the commits of its models.
        vocabulary: The `tokenizer.json` of the data.
        where: Its place, for messages.

    Raises:
        ConfigError: an id means different tokens.
    """
    if config.model.from_pretrained is not None:
        _check_tokenizer(config, open_folder(config.model.from_pretrained), vocabulary, where)
    if config.distill is not None:
        _check_tokenizer(config, base_folder(config.distill.teacher), vocabulary, where)


def _as_begun(config: Config) -> Config:
    """Return the config with what a run decides when it begins: the commits of its models, and what code computes them.

    A later version of Headway may choose other code for a model (`model.implementation: auto`); a run stays with the
    code that it has begun with.

    Raises:
        ConfigError: a source is not there, or a run that begins asks for two codes.
    """
    saved = RunDirectory(config.run_directory).config_path
    before = load_resolved(saved) if saved.is_file() else None
    known: list[Path | str | None] = []
    if before is not None:
        known = [before.model.from_pretrained, before.distill.teacher if before.distill is not None else None]
    if config.model.from_pretrained is not None:
        begun: dict[str, Any] = {"from_pretrained": _pinned(config.model.from_pretrained, known)}
        chosen = "auto" if before is None else before.model.implementation
        # A run with another model, or with an adapter now, is not that run; what differs is reported later.
        native = chosen == "native" and begun["from_pretrained"] == known[0] and config.model.adapter is None
        if native and before is not None:
            # A run of a version that balanced the experts of pretrained models continues to do so.
            unset = [key for key in BALANCE_KEYS if getattr(config.model, key) is None]
            begun |= {key: getattr(before.model, key) for key in unset}
        if config.model.implementation == "auto" and (native or chosen == "transformers"):
            begun["implementation"] = chosen
        config = config.model_copy(update={"model": config.model.model_copy(update=begun)})
        if not native:
            check_own_code(config.model)
    if config.distill is not None:
        distill = config.distill.model_copy(update={"teacher": _pinned(config.distill.teacher, known)})
        if distill.implementation == "auto":
            # A run of a version that did not keep it has `auto` there, and stays so.
            earlier = before.distill if before is not None else None
            if earlier is not None and earlier.teacher == distill.teacher:
                chosen = earlier.implementation
            else:
                chosen = choose_implementation(teacher_config(distill))
            distill = distill.model_copy(update={"implementation": chosen})
        config = config.model_copy(update={"distill": distill})
    return config


def _pinned(source: Path | str, known: Sequence[Path | str | None]) -> Path | str:
    """Return a source with a commit: that of the run if it knows the model, or the current one."""
    if not is_on_hub(source) or is_pinned(source):
        return source
    name, _ = split_hub_name(str(source))
    for before in known:
        if before is not None and is_pinned(before) and split_hub_name(str(before))[0] == name:
            return before

    return pinned_source(source)


def _check_made_of(config: Config, store: TokenStore, options: RunOptions | None) -> None:
    """Check that the store is what the config says; a run that has begun, or none, is only warned.

    A remote or an imported store was prepared by another config, or by none.

    Raises:
        ConfigError: it is not, and a run would begin with it. Only under a launcher of workers nothing prepares it.
    """
    is_given = config.data.remote is not None or "imported" in store.manifest
    differing = [] if is_given else differences(config.data, store.manifest)
    if not differing:
        return
    what = f"the token store is not what the config says: {'; '.join(differing)}"
    has_begun = RunDirectory(config.run_directory).has_begun()
    if options is not None and (options.restart or options.accept_changes or not has_begun):
        prepare = suggest("data prepare")
        fix = f"{prepare}, or set data.store to another folder"
        raise ConfigError(what, where=f"data.store: {store.path}", fix=fix)
    if is_first_worker():
        warning(f"{what}; it is used as it is")


def _check_row_length(config: Config) -> None:
    """Check that rows fit a pretrained model; for other models the config's own checks do. Stages of a mixture are no
    longer."""
    length = config.train.sequence_length
    longest = config.model.max_sequence_length
    if length > longest:
        raise ConfigError(
            f"train.sequence_length is {length}, but the checkpoint is meant for {longest}",
            where=f"config.json of {config.model.from_pretrained}",
            fix=f"train.sequence_length={longest}, or model.max_sequence_length={max(length, _NOT_GIVEN + 1)}",
        )


def _check_tokenizer(config: Config, pretrained: Path, content: bytes, ours: Path) -> None:
    """Check that the data's ids mean the tokens that the pretrained checkpoint was trained on.

    If the run has checkpoints of its own, only warn. Ids that only one of the two knows are no contradiction: tokens
    may be added, and `tokenizer.json` may be rewritten.

    Raises:
        ConfigError: an id means different tokens.
    """
    theirs = pretrained / "tokenizer.json"
    if not theirs.is_file() and is_first_worker():
        warning(
            f"{pretrained} has no tokenizer.json, so nothing shows that the ids of the data mean the tokens that its"
            " model was trained on; put the checkpoint's own tokenizer there to have that checked"
        )
    if not theirs.is_file() or content == read_bytes(theirs):
        return

    parsed = parse(content, str(ours)), parse(read_bytes(theirs), str(theirs))
    conflict = first_conflict(*map(vocabulary, parsed))
    if conflict is None:
        return
    number, stored, meant = conflict
    problem = ConfigError(
        f"the data have another tokenizer than the checkpoint: id {number:,} is {meant!r} in the checkpoint,"
        f" {stored!r} in that of the data",
        where=f"{theirs}, {ours}",
        fix=f"data.tokenizer.path={theirs}, then: {suggest('data prepare', f'data.tokenizer.path={theirs}')}",
    )
    if not checkpoint_folders(Path(config.run_directory) / "checkpoints"):
        raise problem
    warning(problem.what)


def _check_teacher(config: Config, settings: DistillConfig, vocab_size: int) -> None:
    """Check that a teacher computes the rows of the data.

    Raises:
        ConfigError: it does not: the rows are too long, or packed in a way that may leak.
    """
    teacher = complete(teacher_config(settings), vocab_size)
    if config.train.sequence_length > teacher.max_sequence_length:
        raise ConfigError(
            f"train.sequence_length is {config.train.sequence_length}, but the teacher is meant for"
            f" {teacher.max_sequence_length}",
            where="distill.teacher",
            fix=f"train.sequence_length={teacher.max_sequence_length}",
        )
    if config.data.document_mask and teacher.implementation == "transformers":
        raise ConfigError(
            "the teacher is computed by transformers, and nothing proves that it tells packed documents apart",
            where="distill.teacher, data.document_mask",
            fix="data.document_mask=false, or a teacher that the native decoder computes",
        )
