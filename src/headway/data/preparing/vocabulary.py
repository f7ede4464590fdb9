"""Which vocabulary a store gets: the given one, the one it has, or one trained on its sources."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.config.data import DataConfig
from headway.core.console import Progress, notice, progress
from headway.core.errors import DataError
from headway.core.files import atomic_write, canonical_json, fingerprint
from headway.core.foreign import read_bytes, read_json_object, read_text
from headway.core.format import format_bytes
from headway.data.preparing.inputs import InputHashes, outlines_of
from headway.data.preparing.records import WORK
from headway.data.preparing.units import units_of
from headway.data.reading.places import SourceFile, open_file, stamp_of, unreadable
from headway.data.reading.sources import Source
from headway.data.store import TokenStore, file_problem
from headway.data.tokenizing.settings_files import LISTS
from headway.data.tokenizing.tokenizer import BeginOfText, Tokenizer
from headway.data.tokenizing.train import train_tokenizer

#: What belongs to a vocabulary beside its tokenizer.json, and is none of ours to decide.
_SETTINGS = ("chat_template", "model_max_length", "padding_side", "truncation_side", "model_input_names")
#: How a store's vocabulary was trained.
TRAINED = f"{WORK}/vocabulary"
#: What is written beside a vocabulary: names of special tokens, chat template and the like.
SETTINGS = "tokenizer/tokenizer_config.json"
# So many times as much text as a vocabulary was trained on would give a far better one.
_FAR_MORE = 10
_BLOCK = 2**20


def vocabulary_of(
    data: DataConfig,
    sources: Sequence[Source],
    folder: Path,
    present: TokenStore | None,
    hashes: InputHashes,
    *,
    fresh: bool = False,
) -> Tokenizer:
    """The vocabulary, saved in `folder`/tokenizer.

    A store whose sources have grown keeps the vocabulary that was trained for it: with another one all of it would have
    to be encoded again, and models trained on it would be of no use. So it does while how it is trained and how sources
    are read stay the same, and something of the input does, if only as the beginning of a file that has grown. A trial
    behind a limit that is another now does not count. With `fresh` it is trained anew (or was, by a preparation that
    was killed).

    Raises:
        ConfigError: documents are always to begin with a token, and the given tokenizer has none for that.
        DataError: the given tokenizer cannot be used, the store's is damaged, or there is no text to train one on.
    """
    if data.tokenizer.path is not None:
        tokenizer = Tokenizer.load(data.tokenizer.path, data.tokenizer.pattern)
        begin = tokenizer.begin_of_text(data.begin_of_text)
        _say_begin(tokenizer, data.begin_of_text, begin)
        tokenizer.save(folder / "tokenizer", _settings_beside(tokenizer), begin)
        return tokenizer
    how, files = fingerprint(_how(data)), _files(sources)
    settings, why = data.tokenizer, "data.tokenizer, or all of the input or how it is read has changed"
    # The store's comes before one that was begun: what `fresh` asked for, and a kill ended, is not asked for any more.
    if present is not None and _was_trained(present, how):
        record = _record(present.path)
        if _was_a_trial(record, settings.training_bytes, sources):
            why = f"the store's has seen {format_bytes(record['seen'])} of text, before a limit that is another now"
        elif _shares_input(present, data, sources, hashes):
            return _kept(present, folder, {**record, "files": files, "kept": True}, settings.training_bytes, sources)
    begun = _begun(folder, how, files, fresh)
    if begun is not None:
        return begun
    if present is not None:
        notice(f"a new vocabulary is trained: {why}")
    tokenizer, seen = train_tokenizer(sources, settings.vocab_size, settings.training_bytes, settings.pattern)
    tokenizer.save(folder / "tokenizer")
    text = {"seen": seen, "input": _bytes(sources), "limits": _limits(sources)}
    _remember(folder, {"how": how, "files": files, "fingerprint": tokenizer.fingerprint, "kept": False, **text})
    return tokenizer


def _say_begin(tokenizer: Tokenizer, wanted: BeginOfText, begin: Mapping[str, int]) -> None:
    """Say what documents begin with, where that could be otherwise."""
    if begin and wanted == "auto":
        leave_out = "data.begin_of_text: never leaves it out"
        notice(f"every document begins with {' '.join(begin)}, as the tokenizer's template says ({leave_out})")
    elif begin:
        notice(f"every document begins with {' '.join(begin)} (data.begin_of_text: {wanted})")
    elif tokenizer.template_tokens:
        tokens = " ".join(tokenizer.template_tokens)
        notice(f"no document begins with {tokens}, though the tokenizer's template says so (data.begin_of_text: never)")


def renew_settings(folder: Path, store: Path, data: DataConfig) -> None:
    """Bring the settings beside the vocabulary of an up-to-date store up to date too, if they are given: a model that
    is trained with it passes them on.

    Beside a vocabulary that was trained here they may be the user's own, and stay unless they cannot be read.

    Args:
        folder: In which `vocabulary_of` has saved the vocabulary.
        store: The store.
        data: What it was prepared by.
    """
    wanted, file = (folder / SETTINGS).read_bytes(), store / SETTINGS
    with suppress(OSError):
        if read_bytes(file) == wanted or (data.tokenizer.path is None and _json_object(file)):
            return
    with atomic_write(file) as output:
        output.write(wanted)
    notice(f"settings beside the tokenizer are not the store's: {file} is written anew")


def _kept(
    present: TokenStore, folder: Path, record: dict[str, Any], training_bytes: int, sources: Sequence[Source]
) -> Tokenizer:
    """The vocabulary of the store that is there."""
    tokenizer = _load_kept(present)
    tokenizer.save(folder / "tokenizer")
    _remember(folder, record)
    seen, before = record.get("seen", training_bytes), record.get("input", 0)
    if seen * _FAR_MORE <= training_bytes and 0 < before * _FAR_MORE <= _bytes(sources):
        notice(
            f"the store keeps its vocabulary, trained on {format_bytes(seen)} of text when there was far less input: "
            "--force trains another"
        )
    return tokenizer


def _settings_beside(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the files beside a given tokenizer say of it, for who uses a model that is trained with it.

    Not its class, which could take a text apart otherwise than its tokenizer.json does, and no token without an id, for
    it would get one that the model's embedding lacks.
    """
    said = tokenizer.settings
    settings = {key: said.values[key] for key in _SETTINGS if said.values.get(key) is not None}
    settings |= {key: token for key, token in said.roles().items() if key not in tokenizer.unknown_roles}
    settings |= {key: said.listed(key) for key in LISTS if isinstance(said.values.get(key), list)}
    settings |= {key: said.values[key] for key in LISTS if isinstance(said.values.get(key), dict)}
    if tokenizer.unknown_roles:
        names = ", ".join(f"{key} ({token!r})" for key, token in tokenizer.unknown_roles.items())
        notice(f"tokens that the files beside the tokenizer name and it does not have are left out: {names}")
    template = Path(tokenizer.where).with_name("chat_template.jinja")
    try:
        settings["chat_template"] = read_text(template)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        fix = "repair it, or take it away"
        raise DataError(f"the chat template cannot be read: it {reason}", where=str(template), fix=fix) from None
    return settings


def _begun(folder: Path, how: str, files: str, fresh: bool) -> Tokenizer | None:
    """The vocabulary of a preparation that was killed, if it is the one that is wanted."""
    record = _record(folder)
    if (record.get("how"), record.get("files")) != (how, files) or (fresh and record.get("kept", True)):
        return None
    try:
        tokenizer = Tokenizer.load(folder / "tokenizer")
    except DataError:
        return None
    # Another preparation may have put its own there since.
    return tokenizer if tokenizer.fingerprint == record.get("fingerprint") else None


def _was_trained(present: TokenStore, how: str) -> bool:
    """Whether the present store's vocabulary was trained like that. A store with a given vocabulary may have the record
    of a training that was killed before."""
    record = _record(present.path)
    return record.get("how") == how and record.get("fingerprint") == present.tokenizer_fingerprint


def _was_a_trial(record: Mapping[str, Any], training_bytes: int, sources: Sequence[Source]) -> bool:
    """Whether a vocabulary was trained on little text, because a source had a limit that is another now."""
    names, limits = {source.name for source in sources}, _limits(sources)
    before = record.get("limits", {}).items()
    is_other = any(name in names and limits.get(name) != limit for name, limit in before)
    return is_other and bool(record["seen"] * _FAR_MORE <= training_bytes)


def _limits(sources: Sequence[Source]) -> dict[str, str]:
    return {source.name: str(source.limit) for source in sources if source.limit is not None}


def _bytes(sources: Sequence[Source]) -> int:
    return sum(source.bytes for source in sources)


def _load_kept(present: TokenStore) -> Tokenizer:
    file = present.tokenizer_folder / "tokenizer.json"
    problem = file_problem(file, None, present.tokenizer_fingerprint)
    if problem:
        raise DataError(
            f"the vocabulary that was trained for the store is damaged: {problem}",
            where=str(file),
            fix="restore it from a copy, models trained on the store need it; or --force trains another",
        )
    return Tokenizer.load(present.tokenizer_folder)


def _how(data: DataConfig) -> dict[str, Any]:
    """What decides how a vocabulary is trained, besides the text itself."""
    return data.tokenizer.model_dump(mode="json", exclude={"path", "encoder", "special_tokens_in_text"})


def _files(sources: Sequence[Source]) -> str:
    """What tells that the files are those of a preparation that was killed, and read as by it."""
    return fingerprint(
        [
            [
                s.field,
                s.template,
                str(s.limit),
                s.location if s.stream else "",
                [[f.name, f.format, f.bytes, stamp_of(f) if f.local else f.version] for f in s.files],
            ]
            for s in sources
        ]
    )


def _remember(folder: Path, record: dict[str, Any]) -> None:
    with atomic_write(folder / TRAINED, "w") as file:
        json.dump(record, file)


def _record(place: Path) -> dict[str, Any]:
    """How the vocabulary there was trained, if it was."""
    return _json_object(place / TRAINED)


def _json_object(file: Path) -> dict[str, Any]:
    """What a file holds; nothing when that is no JSON object, or there is none."""
    try:
        return read_json_object(file)
    except (OSError, ValueError):
        return {}


def _shares_input(present: TokenStore, data: DataConfig, sources: Sequence[Source], hashes: InputHashes) -> bool:
    """Whether something of what the present store was made from is still there; as a rule the first file tells.

    Nothing is hashed that a look at names, lengths and how they are read tells to be other: it may lie behind a limit,
    where nobody else would read it.
    """
    try:
        described = present.inputs().get("sources", [])
    except DataError:  # unknown; what is there is kept
        return True
    files = [(source["field"], source.get("template"), file) for source in described for file in source["files"]]
    before = {_reading(*file) for file in files}
    outlines = {_reading(field, template, _outline(file)) for field, template, file in files}
    names = {(field, template, file["path"]) for field, template, file in files}
    with progress("comparing the input with the store's", None, "B") as bar:
        for number, source in enumerate(sources):
            how = source.field, source.template
            if names.isdisjoint((*how, name) for name in _names(source)):
                continue
            for unit in units_of(number, source, data.shard_bytes):
                if not any(_reading(*how, outline) in outlines for outline in outlines_of(unit)):
                    continue
                if any(_reading(*how, file) in before for file in hashes.of(unit)):
                    return True
                bar.advance(unit.bytes)
        return _has_grown_file(described, sources, bar)


def _names(source: Source) -> list[str]:
    """Under which the store's description has what a source is made of."""
    return [source.name] if source.stream is not None else [file.name for file in source.files]


def _outline(file: dict[str, Any]) -> dict[str, Any]:
    """What is described of a file besides what it holds."""
    return {key: fact for key, fact in file.items() if key not in ("sha256", "version")}


def _has_grown_file(described: Sequence[dict[str, Any]], sources: Sequence[Source], bar: Progress) -> bool:
    """Whether a file is there that begins with what the present store was made from."""
    before = defaultdict(list)
    for source in described:
        for file in source["files"]:
            if "sha256" in file and "span" not in file:
                key = (source["field"], source.get("template"), file["path"], file["format"], file.get("compression"))
                before[key].append(file)
    return any(
        0 < file["bytes"] < now.bytes and _hash_beginning(now, file["bytes"], bar) == file["sha256"]
        for source in sources
        for now in source.files
        for file in before[source.field, source.template, now.name, now.format, now.compression]
    )


def _hash_beginning(file: SourceFile, size: int, bar: Progress) -> str:
    """SHA-256 of a file's first bytes."""
    digest = hashlib.sha256()
    try:
        with open_file(file, 0, size) as stream:
            while size and (block := stream.read(min(size, _BLOCK))):
                digest.update(block)
                bar.advance(len(block))
                size -= len(block)
    except OSError as error:
        raise unreadable(file.location, error) from error
    return digest.hexdigest()


def _reading(field: str, template: str | None, file: dict[str, Any]) -> bytes:
    """A file, or span of one, with how it is read."""
    return canonical_json([field, template, file])
