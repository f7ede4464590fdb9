"""The vocabulary of a store: the given one, the one it has, or one trained on its sources."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.config.sections.data import DataConfig
from headway.core.console import Progress, notice, progress
from headway.core.errors import DataError
from headway.core.files.atomic import atomic_write
from headway.core.files.foreign import SETTINGS_BYTES, read_bytes, read_json_or_empty, readable_json_object
from headway.core.files.hashes import canonical_json, fingerprint
from headway.core.format import format_bytes
from headway.data.store import TokenStore, file_problem
from headway.data.tokenizing.beside import settings_beside
from headway.data.tokenizing.tokenizer import BeginOfText, Tokenizer
from headway.text.preparing.inputs import InputHashes, outlines_of
from headway.text.preparing.records import WORK
from headway.text.preparing.units import units_of
from headway.text.reading.places import SourceFile, open_file, stamp_of, unreadable
from headway.text.reading.sources import Source
from headway.text.tokenizing.train import train_tokenizer

#: The record of how a store's vocabulary was trained.
TRAINED = f"{WORK}/vocabulary"
#: The settings next to a vocabulary: names of special tokens, chat template and the like.
SETTINGS = "tokenizer/tokenizer_config.json"
# With this many times the text it was trained on, a vocabulary would be far better.
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
    """Choose or train the vocabulary, and save it in `folder`/tokenizer.

    A store whose sources have grown keeps the vocabulary that was trained for it. Another one would require encoding
    everything again, and models trained on the store would be useless. The vocabulary stays as long as three things
    hold: its training settings are unchanged, sources are read as before, and some of the input is unchanged (the
    beginning of a grown file suffices). It does not stay if it was trained on little text under a limit that has
    changed. With `fresh` it is trained again, unless a preparation that was killed has done so.

    Args:
        data: The config.
        sources: The sources.
        folder: The store that is being built.
        present: The present store, if there is one.
        hashes: Hashes of the inputs.
        fresh: Do not keep the present store's vocabulary.

    Raises:
        ConfigError: Documents must always begin with a token, and the given tokenizer has none for that.
        DataError: The given tokenizer cannot be used, the store's is damaged, or there is no text to train one on.
    """
    if data.tokenizer.path is not None:
        tokenizer = Tokenizer.load(data.tokenizer.path, data.tokenizer.pattern)
        begin = tokenizer.begin_of_text(data.begin_of_text)
        _report_begin(tokenizer, data.begin_of_text, begin)
        tokenizer.save(folder / "tokenizer", settings_beside(tokenizer), begin)
        return tokenizer
    how = fingerprint(_how(data))
    files = _files_fingerprint(sources)
    settings = data.tokenizer
    why = "data.tokenizer, or all of the input or how it is read has changed"
    # The store's vocabulary has precedence over that of a killed preparation: its `fresh` does not apply to this one.
    if present is not None and _was_trained(present, how):
        record = _record(present.path)
        if _was_a_trial(record, settings.training_bytes, sources):
            why = f"the store's has seen {format_bytes(record['seen'])} of text, under a limit that has changed since"
        elif _shares_input(present, data, sources, hashes):
            record = {**record, "files": files, "kept": True}
            return _keep_vocabulary(present, folder, record, settings.training_bytes, sources)
    resumed = _resumed(folder, how, files, fresh)
    if resumed is not None:
        return resumed
    if present is not None:
        notice(f"a new vocabulary is trained: {why}")
    tokenizer, seen = train_tokenizer(sources, settings.vocab_size, settings.training_bytes, settings.pattern)
    tokenizer.save(folder / "tokenizer")
    text = {"seen": seen, "input": _bytes(sources), "limits": _limits(sources)}
    _remember(folder, {"how": how, "files": files, "fingerprint": tokenizer.fingerprint, "kept": False, **text})
    return tokenizer


def _report_begin(tokenizer: Tokenizer, wanted: BeginOfText, begin: Mapping[str, int]) -> None:
    """Report which tokens begin documents, if the setting makes a difference."""
    if begin and wanted == "auto":
        hint = "data.begin_of_text: never omits it"
        notice(f"every document begins with {' '.join(begin)}, as the tokenizer's template says ({hint})")
    elif begin:
        notice(f"every document begins with {' '.join(begin)} (data.begin_of_text: {wanted})")
    elif tokenizer.template_tokens:
        tokens = " ".join(tokenizer.template_tokens)
        notice(f"no document begins with {tokens}, though the tokenizer's template says so (data.begin_of_text: never)")


def renew_settings(folder: Path, store: Path, data: DataConfig) -> None:
    """Update the settings next to the vocabulary of an up-to-date store: models trained with it inherit them.

    Next to a vocabulary that was trained here, the settings may be the user's own; they stay unless they are
    unreadable.

    Args:
        folder: The folder in which `vocabulary_of` has saved the vocabulary.
        store: The store.
        data: The config of the store.
    """
    wanted = (folder / SETTINGS).read_bytes()
    file = store / SETTINGS
    with suppress(OSError):
        if read_bytes(file) == wanted or (data.tokenizer.path is None and readable_json_object(file)):
            return
    with atomic_write(file) as output:
        output.write(wanted)
    notice(f"settings next to the tokenizer differ from the store's: {file} is written again")


def _keep_vocabulary(
    present: TokenStore, folder: Path, record: dict[str, Any], training_bytes: int, sources: Sequence[Source]
) -> Tokenizer:
    """Copy the present store's vocabulary to the new store."""
    tokenizer = _load_kept(present)
    tokenizer.save(folder / "tokenizer")
    _remember(folder, record)
    seen = record.get("seen", training_bytes)
    before = record.get("input", 0)
    if seen * _FAR_MORE <= training_bytes and 0 < before * _FAR_MORE <= _bytes(sources):
        notice(
            f"the store keeps its vocabulary, trained on {format_bytes(seen)} of text when there was far less input: "
            "--force trains another"
        )
    return tokenizer


def _resumed(folder: Path, how: str, files: str, fresh: bool) -> Tokenizer | None:
    """Return the vocabulary of a preparation that was killed, if it is the required one."""
    record = _record(folder)
    if (record.get("how"), record.get("files")) != (how, files) or (fresh and record.get("kept", True)):
        return None
    try:
        tokenizer = Tokenizer.load(folder / "tokenizer")
    except DataError:
        return None
    # Another preparation may have replaced it since.
    return tokenizer if tokenizer.fingerprint == record.get("fingerprint") else None


def _was_trained(present: TokenStore, how: str) -> bool:
    """Return whether the present store's vocabulary was trained with the settings `how`.

    A store with a given vocabulary may have the record of a training that was killed, so the fingerprint is compared
    too.
    """
    record = _record(present.path)
    return record.get("how") == how and record.get("fingerprint") == present.tokenizer_fingerprint


def _was_a_trial(record: Mapping[str, Any], training_bytes: int, sources: Sequence[Source]) -> bool:
    """Return whether a vocabulary was trained on little text because of a source limit that has changed since."""
    names = {source.name for source in sources}
    limits = _limits(sources)
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
    """Return the settings of a vocabulary's training."""
    return data.tokenizer.model_dump(mode="json", exclude={"path", "encoder", "special_tokens_in_text"})


def _files_fingerprint(sources: Sequence[Source]) -> str:
    """Return a fingerprint of the files and of how they are read, to compare with a preparation that was killed."""
    return fingerprint(
        [
            [
                s.field,
                s.template,
                str(s.limit),
                s.most,
                s.location if s.stream else "",
                [
                    [f.name, f.format, f.bytes, stamp_of(f) if f.local else f.version, *f.delimiter.strip(",")]
                    for f in s.files
                ],
            ]
            for s in sources
        ]
    )


def _remember(folder: Path, record: dict[str, Any]) -> None:
    with atomic_write(folder / TRAINED, "w") as file:
        json.dump(record, file)


def _record(place: Path) -> dict[str, Any]:
    """Read the record of how a store's vocabulary was trained; it is empty if there is none."""
    return read_json_or_empty(place / TRAINED, SETTINGS_BYTES)


def _shares_input(present: TokenStore, data: DataConfig, sources: Sequence[Source], hashes: InputHashes) -> bool:
    """Return whether some input of the present store is still there; the first file usually decides.

    A file is hashed only if its name, length and way of reading match: it may lie behind a limit, and would then be
    read for nothing.
    """
    try:
        described = present.inputs().get("sources", [])
    except DataError:  # the input is unknown, so the vocabulary stays
        return True
    files = [(source["field"], source.get("template"), file) for source in described for file in source["files"]]
    before = {_reading(*file) for file in files}
    outlines = {_reading(field, template, _outline(file)) for field, template, file in files}
    names = {(field, template, file["path"]) for field, template, file in files}
    with progress("comparing the input with the store's", None, "B") as bar:
        for number, source in enumerate(sources):
            how = source.field, source.template
            # The store's description names a stream by its source.
            listed = [source.name] if source.stream is not None else [file.name for file in source.files]
            if names.isdisjoint((*how, name) for name in listed):
                continue
            for unit in units_of(number, source, data.shard_bytes):
                if not any(_reading(*how, outline) in outlines for outline in outlines_of(unit)):
                    continue
                if any(_reading(*how, file) in before for file in hashes.of(unit)):
                    return True
                bar.advance(unit.bytes)
        return _has_grown_file(described, sources, bar)


def _outline(file: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a file without its content's hash or version."""
    return {key: fact for key, fact in file.items() if key not in ("sha256", "version")}


def _has_grown_file(described: Sequence[dict[str, Any]], sources: Sequence[Source], bar: Progress) -> bool:
    """Return whether some file begins with a whole file from which the present store was made."""
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
    """Compute the SHA-256 of a file's first bytes."""
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
    """Return a key for a file, or a span of a file, together with how it is read."""
    return canonical_json([field, template, file])
