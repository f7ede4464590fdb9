"""Import of token files of other projects into a version-2 token store."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.config.sections.data import folder_names
from headway.core.console import progress, warning
from headway.core.errors import ConfigError, DataError
from headway.core.files.atomic import write_json
from headway.core.files.hashes import fingerprint, sha256_file
from headway.core.files.paths import expanded
from headway.core.format import format_bytes, format_count, format_seconds
from headway.core.process.faults import fault_point
from headway.core.statistics import add_counts
from headway.data.in_use import check_not_in_use
from headway.data.store_manifest import MANIFEST
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.importing import datatrove, megatron, nanogpt
from headway.text.importing.documents import SPLIT_RULE, Counts, DocumentWriter, ShardSeries
from headway.text.importing.files import ImportSource, TokenFile, read_blocks
from headway.text.preparing.building import building, check_not_foreign, publish, writing_store
from headway.text.preparing.manifest import head_json, part_json
from headway.text.preparing.pieces import SPLITS
from headway.text.preparing.prepare import settled_bound
from headway.text.reading.places import unicode_name

KINDS = ("megatron", "nanogpt", "datatrove")
#: Default share of documents held out, if the files have no validation split of their own.
VALIDATION = 0.05
SHARD_BYTES = 128 * 2**20


@dataclass(frozen=True)
class ImportPlan:
    """Inputs and settings of an import."""

    kind: str
    sources: tuple[ImportSource, ...]
    tokenizer: Tokenizer
    share: float
    """Share of the training documents to hold out."""

    @property
    def files(self) -> list[tuple[str, str, TokenFile]]:
        """All files with their source and split."""
        return [
            (source.name, split, file)
            for source in self.sources
            for split, files in source.splits.items()
            for file in files
        ]

    @property
    def bytes(self) -> int:
        """Bytes of ids to read."""
        return sum(file.bytes for _, _, file in self.files)


@dataclass(frozen=True)
class ImportReport:
    """Results of an import."""

    store: str
    fingerprint: str
    dtype: str
    documents: int
    validation_documents: int
    tokens: int
    ended_documents: int
    """Documents to which the end-of-text token was added."""
    empty_documents: int
    """Documents without tokens; they were skipped."""
    files: int
    input_bytes: int
    weights: dict[str, float]
    """Weights of sources in a blend."""
    seconds: float

    def describe(self) -> str:
        """Format the report as one line."""
        parts = [
            f"{format_count(self.documents)} documents ({format_count(self.validation_documents)} for validation)",
            f"{format_count(self.tokens)} tokens as {self.dtype}",
            f"{format_bytes(self.input_bytes)} in {format_seconds(self.seconds)}"
            f" ({self.input_bytes / 1e6 / self.seconds:.0f} MB/s)",
        ]
        if self.ended_documents:
            parts.append(f"end-of-text token added to {format_count(self.ended_documents)} documents")
        if self.empty_documents:
            parts.append(f"{format_count(self.empty_documents)} empty documents skipped")
        return f"{self.store}: " + " · ".join(parts)


def plan_import(
    kind: str,
    paths: Sequence[str],
    *,
    tokenizer: Path | None = None,
    end_of_text: str | None = None,
    names: Sequence[str] = (),
    validation: Sequence[str] = (),
    share: float | None = None,
    dtype: str | None = None,
) -> ImportPlan:
    """Find the files, and run all checks that do not need to read them completely.

    Args:
        kind: One of `KINDS`.
        paths: Files to import; see `find` of the kind's module.
        tokenizer: The tokenizer of the ids. It may be None if the files name one that is on this machine.
        end_of_text: The token that ends documents; by default the tokenizer's own.
        names: Names of the sources: one for each, or one for all files together.
        validation: Validation files, for the first source.
        share: Share of the documents to hold out; by default `VALIDATION`, or 0 if there are validation files.
        dtype: Type of the ids, `uint16` or `uint32`, in files without that information (nanoGPT); by default the
            narrower one that fits the vocabulary.

    Raises:
        ConfigError: options contradict each other, or there is no tokenizer.
        DataError: a file is missing, cannot be read, or is damaged; or the tokenizer cannot be used.
    """
    if kind not in KINDS:
        raise ConfigError(f"'{kind}' is not a known format", fix=f"one of: {', '.join(KINDS)}")
    vocabulary = _tokenizer(tokenizer, end_of_text) if tokenizer is not None else None
    if vocabulary is None and kind != "datatrove":
        raise ConfigError(
            "the files hold ids but do not name the tokenizer that wrote them",
            where=str(paths[0]),
            fix="--tokenizer PATH (a tokenizer.json, SentencePiece .model or .tiktoken file, or a folder with one)",
        )
    find = _finder(kind, vocabulary, dtype)
    sources = _named(find(paths), names)
    if validation:
        held_out = tuple(file for source in find(validation) for file in (*source.train, *source.validation))
        sources = [replace(sources[0], validation=sources[0].validation + held_out), *sources[1:]]
    if kind == "nanogpt":
        nanogpt.check_something_to_train(sources)
    if vocabulary is None:
        vocabulary = _tokenizer(_named_tokenizer(sources), end_of_text)
    given = any(source.validation for source in sources)
    if share and given:
        raise ConfigError(
            "there are validation files, so no share of the documents can be held out",
            where=str(next(source.validation[0].path for source in sources if source.validation)),
            fix="leave out --validation-share, or the validation files",
        )
    plan = ImportPlan(kind, tuple(sources), vocabulary, share if share is not None else 0.0 if given else VALIDATION)
    _check_plan(plan)
    return plan


def _finder(kind: str, tokenizer: Tokenizer | None, given: str | None) -> Callable[[Sequence[str]], list[ImportSource]]:
    if given is not None and kind != "nanogpt":
        raise ConfigError(f"{kind} files record the type of their ids", where="--dtype", fix="leave it out")
    if kind == "megatron":
        return megatron.find
    if kind == "nanogpt":
        assert tokenizer is not None
        dtype = tokenizer.dtype
        return lambda paths: nanogpt.find(paths, dtype, given)
    return lambda paths: datatrove.find(paths, tokenizer.dtype if tokenizer is not None else None)


def _named(sources: Sequence[ImportSource], names: Sequence[str]) -> list[ImportSource]:
    """Return the sources with unique names that are valid folder names."""
    if len(names) == 1 and len(sources) > 1:
        if any(source.weight is not None for source in sources):
            raise ConfigError("each source of a blend needs its own name", where="--name", fix="leave out --name")
        train = tuple(file for source in sources for file in source.train)
        sources = [ImportSource("", train, tuple(file for source in sources for file in source.validation))]
    if names and len(names) != len(sources):
        raise ConfigError(
            f"{len(names)} names for {len(sources)} sources: {', '.join(source.name for source in sources)}",
            where="--name",
            fix="give one name for each, or one for all together",
        )
    unique = folder_names(names or [source.name for source in sources])
    return [replace(source, name=name) for source, name in zip(sources, unique, strict=True)]


def _tokenizer(path: Path, end_of_text: str | None) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    if end_of_text is None:
        return tokenizer
    settings = replace(tokenizer.settings, values={**tokenizer.settings.values, "eos_token": end_of_text})
    try:
        return Tokenizer(tokenizer.content, tokenizer.where, settings=settings)
    except DataError:
        raise ConfigError(
            f"the tokenizer has no token '{end_of_text}'",
            where="--end-of-text",
            fix=f"its special tokens: {', '.join(tokenizer.special_tokens)}",
        ) from None


def _named_tokenizer(sources: Sequence[ImportSource]) -> Path:
    """Return the path of the tokenizer that the files name, if it is on this machine."""
    found = {file.tokenizer: file for source in sources for files in source.splits.values() for file in files}
    names = sorted(str(name) for name in found if name is not None)
    if len(names) == 1 and None not in found:
        file = found[names[0]]
        for path in (expanded(names[0], str(file.path)), file.path.parent / names[0]):
            if path.exists():
                return path
    said = f"name {' and '.join(repr(name) for name in names)}" if names else "do not name one"
    missing = ", which is not on this machine" if len(names) == 1 else ""
    raise ConfigError(
        f"the import needs the tokenizer that wrote the ids, but the files {said}{missing}",
        where=str(sources[0].train[0].path),
        fix="--tokenizer PATH (a tokenizer.json, SentencePiece .model or .tiktoken file, or a folder with one)",
    )


def _check_plan(plan: ImportPlan) -> None:
    for _, _, file in plan.files:
        if 2 ** (8 * file.dtype.itemsize) < plan.tokenizer.vocab_size and file.tokens:
            raise DataError(
                f"the file was written with a smaller vocabulary: {file.dtype.name} cannot hold the"
                f" {plan.tokenizer.vocab_size:,} ids of the tokenizer",
                where=str(file.path),
                fix="give the tokenizer that wrote it (--tokenizer)",
            )
    paths = [file.path.resolve() for _, _, file in plan.files]
    twice = next((path for path, times in Counter(paths).items() if times > 1), None)
    if twice is not None:
        raise ConfigError("this file is named twice", where=str(twice), fix="name each file once")


def import_store(
    plan: ImportPlan, output: Path, *, force: bool = False, shard_bytes: int = SHARD_BYTES
) -> ImportReport:
    """Build a token store from a plan. An error or a kill leaves no incomplete store.

    Args:
        plan: The result of `plan_import`.
        output: Folder of the store.
        force: Whether to replace an existing store.
        shard_bytes: Approximate size of a shard.

    Raises:
        ConfigError: a store exists.
        DataError: an id is outside the vocabulary, a file is damaged, the store cannot be written, or a training reads
            the existing store.
    """
    started = time.monotonic()
    output = output.resolve() if output.is_symlink() else output
    check_not_foreign(output)
    if (output / MANIFEST).exists() and not force:
        raise ConfigError("there is a token store already", where=str(output), fix="--force replaces it")
    check_not_in_use(output)
    fix = "free space there, or choose another place; an existing store is unchanged"
    with writing_store(output, fix), building(output, resumes=False) as folder:
        manifest, counts = _build(plan, folder, shard_bytes)
        publish(folder, output)
    weights = {source.name: source.weight for source in plan.sources if source.weight is not None}
    return ImportReport(
        store=str(output),
        fingerprint=fingerprint(manifest),
        dtype=manifest["dtype"],
        documents=counts.documents,
        validation_documents=sum(part["documents"] for part in manifest["splits"]["validation"].values()),
        tokens=counts.tokens,
        ended_documents=counts.ended,
        empty_documents=counts.empty,
        files=len(plan.files),
        input_bytes=plan.bytes,
        weights=weights,
        seconds=time.monotonic() - started,
    )


def _build(plan: ImportPlan, folder: Path, shard_bytes: int) -> tuple[dict[str, Any], Counts]:
    """Write all files of the store to a folder, which may contain remains of a killed import."""
    bound = int(plan.share * 2**64)
    builder = _Builder(plan, folder, shard_bytes)
    builder.run(bound)
    total = builder.total
    if not total.documents:
        raise DataError("the files hold no tokens", where=str(plan.files[0][2].path), fix="check the paths")
    settled = settled_bound(plan.share, total.smallest, total.largest) if bound else bound
    if settled != bound:
        builder.run(settled)
    if plan.share and not total.smallest < settled:
        warning("a single document (or equal ones) cannot be split: nothing is held out for validation")
    plan.tokenizer.save(folder / "tokenizer", begin=builder.begin)
    manifest = builder.manifest(settled)
    write_json(folder / MANIFEST, manifest, exact=True)
    return manifest, builder.total


class _Builder:
    """Writer of the shards of all sources, and of the manifest."""

    def __init__(self, plan: ImportPlan, folder: Path, shard_bytes: int) -> None:
        self._plan = plan
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._series: dict[str, dict[str, ShardSeries]] = {}
        self._counts: dict[str, Counts] = {}
        self._hashes: dict[Path, str] = {}
        self._begins = plan.tokenizer.usual_begin()

    @property
    def begin(self) -> dict[str, int]:
        """The begin-of-text token with its id, if every written document begins with it; else empty."""
        total = self.total
        return self._begins if total.begun == total.documents else {}

    @property
    def total(self) -> Counts:
        """Counts over all sources."""
        total = Counts()
        for counts in self._counts.values():
            add_counts(total, counts, ("documents", "tokens", "begun", "ended", "empty"))
            total.smallest = min(total.smallest, counts.smallest)
            total.largest = max(total.largest, counts.largest)
        return total

    def run(self, bound: int) -> None:
        """Write all shards from scratch; hold out training documents with a hash below `bound`."""
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with progress("importing", self._plan.bytes, "B") as bar:
            for source in self._plan.sources:
                self._source(source, bound, bar.advance)

    def _source(self, source: ImportSource, bound: int, advance: Callable[[float], None]) -> None:
        tokenizer = self._plan.tokenizer
        series = {
            split: ShardSeries(self._folder / split / source.name, tokenizer.dtype, self._shard_bytes)
            for split in SPLITS
        }
        writer = DocumentWriter(series, tokenizer.end_of_text_id, bound, begin=next(iter(self._begins.values()), None))
        for split, files in source.splits.items():
            for file in files:
                fault_point("import.file")
                hashed = hashlib.sha256()
                for block in read_blocks(file, tokenizer.vocab_size, tokenizer.end_of_text_id, hashed, advance):
                    writer.add(block, split)
                if not file.continues:
                    writer.end_document(split)
                self._hashes[file.path] = hashed.hexdigest()
                self._hashes.update({path: sha256_file(path) for path in file.companions})
            writer.end_document(split)
        writer.finish()
        self._series[source.name] = series
        self._counts[source.name] = writer.counts

    def manifest(self, bound: int) -> dict[str, Any]:
        """Return the store's manifest."""
        return {
            **head_json(self._plan.tokenizer, self.begin),
            "settings": {"validation": self._plan.share},
            "split": {"rule": SPLIT_RULE, "bound": str(bound)},
            "imported": {"from": self._plan.kind, "files": [self._file(*found) for found in self._plan.files]},
            "sources": [self._summary(source) for source in self._plan.sources],
            "splits": {
                split: {
                    source.name: part_json(self._series[source.name][split].entries) for source in self._plan.sources
                }
                for split in SPLITS
            },
        }

    def _file(self, source: str, split: str, file: TokenFile) -> dict[str, Any]:
        companions = [{"name": unicode_name(path.name), "sha256": self._hashes[path]} for path in file.companions]
        return {
            "source": source,
            "split": split,
            "name": unicode_name(file.path.name),
            "dtype": file.dtype.name,
            "tokens": file.tokens,
            "bytes": file.bytes,
            "sha256": self._hashes[file.path],
            **({"beside": companions} if companions else {}),
        }

    def _summary(self, source: ImportSource) -> dict[str, Any]:
        files = [*source.train, *source.validation]
        counts = self._counts[source.name]
        return {
            "name": source.name,
            "files": len(files),
            "input_bytes": sum(file.bytes for file in files),
            "read": counts.documents,
            "empty": counts.empty,
            "skipped": 0,
            "documents": counts.documents,
            "tokens": counts.tokens,
            "ended": counts.ended,
        }
