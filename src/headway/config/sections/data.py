"""The section `data`: sources, cleaning, duplicates, the token store, the mixture, and how rows are packed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from headway.config.base import LocalPath, Section, Share, conflict
from headway.config.batches import Batches
from headway.config.sections.clean import CleanStep, step_list
from headway.config.sections.pretrained import PretrainedSource
from headway.config.template import CHAT, COMPLETION, LAYOUTS, parse_template
from headway.config.units import (
    SHARE_OR_INTERVAL,
    TOKENS,
    Amount,
    Bytes,
    Interval,
    Length,
    parse_count,
    share_or_interval,
)
from headway.core.errors import ConfigError
from headway.core.hub import is_on_hub

#: Default of `data.max_document_bytes`.
MAX_DOCUMENT_BYTES = 64 * 2**20
#: Globs of the files that hold a vocabulary, in order of precedence.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "tekken.json", "*.model")


# Templates of the formats whose records say by the names of their fields what they are.
_TEMPLATES = {"chat": CHAT, "completion": COMPLETION}
_DELIMITERS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}


def _pattern_list(value: Any) -> Any:
    """Accept one pattern in place of a list."""
    return [value] if isinstance(value, str) else value


def _delimiter(value: Any) -> Any:
    """Accept names of delimiters, which YAML and shells make hard to write."""
    value = _DELIMITERS.get(value, value) if isinstance(value, str) else value
    if value is not None and (not isinstance(value, str) or len(value) != 1 or not value.isascii() or value in '"\r\n'):
        raise ValueError("a delimiter is one ASCII character other than a quote, or tab, comma, semicolon, pipe")
    return value


class SourceConfig(Section):
    """One source of text."""

    path: str
    """File, folder, glob or URL (`s3://`, `gs://`, `az://`, `https://`); `hf://name` is a Hugging Face dataset
    (`hf://name@revision` at a commit, tag or branch), `python:module:function` the documents that a function yields,
    `stdlib:` the source text of Python's standard library."""
    name: str | None = None
    """Name in manifests and reports; the last part of the path when not given."""
    format: Literal["auto", "text", "jsonl", "parquet", "csv", "arrow", "chat", "completion"] = "auto"
    """`auto` uses the file's extension, below `.gz`, `.zst`, `.bz2` and `.xz`. A text file is one document. `chat`:
    conversations in JSON Lines, Parquet or Arrow, rendered with the tokenizer's chat template; only what the assistant
    says is trained ([continue-a-model.md](continue-a-model.md)). `completion`: records with `prompt` and `completion`,
    of which only the completion is trained."""
    field: str = "text"
    """The field (JSON Lines) or column (Parquet, CSV, Arrow) with a document's text; `a.b` is field `b` of `a`. In a
    file without `text` it is `content`, `body`, `message` or the only one with text, if that is unambiguous."""
    template: str | None = None
    """Renders several fields into one document, e.g. `Question: {question}\\nAnswer: {meta.answer}`, instead of
    `field`; `{{` and `}}` are braces."""
    delimiter: Annotated[str, BeforeValidator(_delimiter)] | None = None
    """The character between the columns of a CSV file, or `tab`. When not given: a tab in `.tsv` files, a comma in
    others."""
    exclude: Annotated[list[str], BeforeValidator(_pattern_list)] = []
    """Files of a folder or glob to leave out: `*.log`, `drafts/*`. A pattern without a slash is for the names of files
    and folders at any depth, one with a slash for the whole path below the source; `*` crosses folders."""
    also: Annotated[list[str], BeforeValidator(_pattern_list)] = []
    """Further files of a folder to read, which are left out otherwise because of their endings: `*.rst`, `*.py`,
    `*.json`. Patterns as in `exclude`."""
    limit: Amount | None = None
    """Read at most this much: `10k documents` or `2 GB` (of text, in input order)."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of the training rows, relative to the weights of the other sources; give all sources a weight, or none."""
    clean: Annotated[list[CleanStep], BeforeValidator(step_list)] = []
    """Further cleaning steps, of this source alone, after those of `data.clean`."""
    role: Literal["train", "replay"] = "train"
    """`replay`: text like that of the model's earlier training, whose validation loss is measured by itself
    (`evaluation/replay_loss`), so that forgetting is seen. Its share of the rows is set by weights."""
    max_epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Training repeats the source at most this many times; then the other sources take its share."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    streaming: bool = False
    """Read a Hugging Face dataset as a stream instead of through the local cache."""
    storage_options: dict[str, Any] = {}
    """Options of `fsspec` for the URL: `endpoint_url`, `profile`, ... Credentials come from the environment; in a
    value, `${NAME}` stands for the content of a variable, as in `headers: {Authorization: "Bearer ${NAME}"}`."""

    @property
    def text_template(self) -> str | None:
        """The template for readers."""
        return _TEMPLATES.get(self.format, self.template)

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        if self.format not in _TEMPLATES:
            return self
        what = "conversations" if self.format == "chat" else "prompts and completions"
        if self.template is not None or self.field != "text":
            raise conflict(f"the fields of {what} are found by their names", "format", "field", "template")
        if self.clean:
            raise conflict(f"cleaning steps are for texts, not for {what}", "format", "clean")
        if self.path == "stdlib:":
            raise conflict(f"the standard library has no {what}", "format", "path")
        return self

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        given = [key for key in ("exclude", "also", "delimiter") if getattr(self, key)]
        if given and self.path.startswith(("python:", "stdlib:")):
            raise conflict(f"{given[0]} is for files", "path", given[0])
        if self.delimiter is not None and self.format not in ("auto", "csv", "completion"):
            raise conflict("a delimiter is for CSV files", "format", "delimiter")
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.template is not None:
            try:
                parse_template(self.template)
            except ValueError as error:
                raise conflict(str(error), "template") from None
            if self.field != "text":
                raise conflict("a source has a field or a template, not both", "field", "template")
        return self


def source_name(path: str) -> str:
    """Derive a source's name from the last part of its path that is no pattern: `corpus/*.jsonl` is "corpus"."""
    path = path.partition("?")[0] if "://" in path else path
    if path.startswith("hf://"):
        path = re.sub("@[^/]*", "", path)  # the revision
    for part in reversed(path.rstrip("/:").split("/")):
        name = part.split("*")[0].split(".")[0].strip("-_ ")
        if name:
            return name
    return "source"


def named_sources(sources: list[SourceConfig]) -> list[SourceConfig]:
    """Give every source a unique name: `a/train.jsonl` and `b/train.jsonl` become "train" and "train-2"."""
    taken = {source.name for source in sources}
    named = []
    for source in sources:
        name = source.name or source_name(source.path)
        if source.name is None and name in taken:
            name = next(f"{name}-{number}" for number in count(2) if f"{name}-{number}" not in taken)
        taken.add(name)
        named.append(source.model_copy(update={"name": name}))
    return named


def stored_names(sources: Iterable[SourceConfig]) -> list[str]:
    """Return the names of the sources in a token store: unique, and valid as folder names."""
    return folder_names(source.name or source_name(source.path) for source in sources)


def folder_names(given: Iterable[str]) -> list[str]:
    """Turn names of sources into unique ones that are valid as folder names."""
    names: list[str] = []
    for name in given:
        base = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "source"
        names.append(base if base not in names else next(f"{base}-{n}" for n in count(2) if f"{base}-{n}" not in names))
    return names


def sources_of_role(sources: Sequence[SourceConfig], role: str) -> list[str]:
    """Return the names in a token store of the sources with a role."""
    return [name for name, source in zip(stored_names(sources), sources, strict=True) if source.role == role]


def _source_list(value: Any) -> Any:
    """Accept one source, or paths in place of sources: `sources: corpus/*.jsonl`."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [{"path": item} if isinstance(item, str) else item for item in values]


class TokenizerConfig(Section):
    """The vocabulary: an existing one, or one trained on the sources."""

    path: PretrainedSource | None = None
    """A `tokenizer.json`, a SentencePiece `.model`, a `.tiktoken` file, a folder with one, or
    `hf://organisation/name@revision` for that of a model on the Hub. When not given, it is that of
    `model.from_pretrained`; without that, a byte-level BPE is trained."""
    vocab_size: Annotated[int, BeforeValidator(lambda v: parse_count(v, "tokens")), Field(ge=258), TOKENS] = 8192
    """Vocabulary of a trained tokenizer, special tokens included; e.g. `8192` or `32k`."""
    training_bytes: Bytes = 256_000_000
    """Maximum amount of text that a tokenizer is trained on; spread evenly over the sources."""
    pattern: str | None = None
    """How text is split into words: `headway` (each digit and line break alone; the default of a trained tokenizer),
    `gpt2`, `llama3`, `qwen2`, `o200k`, `tekken`, or a regular expression. A `.tiktoken` file needs it,
    unless it is a published one."""
    encoder: Literal["auto", "fastokens", "gigatoken", "tokenizers"] = "auto"
    """Library that encodes. `auto`: the fastest installed one that gives the same ids as `tokenizers`, checked on a
    sample of the sources."""
    special_tokens_in_text: bool = False
    """Encode the names of special tokens in a text as these tokens, not as ordinary text."""


class DedupConfig(Section):
    """Which documents or paragraphs are removed as duplicates."""

    documents: bool = False
    """Remove all but one of equal documents."""
    paragraphs: bool = False
    """Remove paragraphs that another document contains (Raffel et al. 2020, section 2.2, drops repeated spans)."""
    paragraph_bytes: Bytes = 100
    """Shorter paragraphs (headings, list items, closing lines) are kept."""
    near: bool = False
    """Remove all but one of equal and nearly equal documents (MinHash LSH: Broder 1997; Leskovec et al., ch. 3)."""
    similarity: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.8
    """Jaccard similarity of word n-grams from which documents are nearly equal."""
    ngram: PositiveInt = 5
    """Words in an n-gram."""
    bands: PositiveInt = 20
    """Bands: documents that agree in a whole band are compared. P = 1 - (1 - similarity^rows)^bands."""
    rows: PositiveInt = 6
    """MinHash values in a band."""
    max_cluster: Share = 0.1
    """Refuse when one cluster of duplicates has a larger share of all documents: boilerplate, or a wrong field."""
    max_removed: Share = 0.5
    """Refuse when a larger share of all documents, or of all paragraphs, would be removed."""
    max_removed_per_source: Share = 0.9
    """Refuse when a larger share of one source's documents, or of its paragraphs, would be removed."""

    @model_validator(mode="after")
    def _check_bands(self) -> Self:
        found = 1 - (1 - self.similarity**self.rows) ** self.bands
        if self.near and found < 0.5:
            fitting = max(1, math.floor(math.log(2 / self.bands) / math.log(self.similarity)))
            raise conflict(
                f"{self.bands} bands of {self.rows} rows find only {found:.0%} of the documents that are"
                f" {self.similarity:g} similar; set rows to {min(fitting, max(1, self.rows - 1))}, or more bands",
                "bands",
                "rows",
                "similarity",
            )
        return self

    @property
    def wanted(self) -> bool:
        """Whether any kind of duplicate is removed."""
        return self.documents or self.paragraphs or self.near


class StageConfig(Section):
    """A stage of training with other weights or another sequence length."""

    start: Annotated[Share | Interval, Field(union_mode="left_to_right"), SHARE_OR_INTERVAL]
    """Where the stage begins: a share of all steps, or `500 steps`, `1B tokens`."""
    weights: dict[str, Annotated[float, Field(ge=0.0)]] | None = None
    """Weight of every source by name, 0 for none; unchanged when not given."""
    sequence_length: Length | None = None
    """Tokens per row, a divisor of `train.sequence_length`; unchanged when not given. Tokens per step stay the same."""
    change: Literal["step", "linear"] = "step"
    """`linear`: the shares change from those of the previous stage to these over the length of the stage."""

    @field_validator("start", mode="before")
    @classmethod
    def _parse_start(cls, value: Any) -> Any:
        return share_or_interval(value)

    def first_step(self, steps: int, batches: Batches) -> int:
        """Return the step, counted from 0, at which the stage begins in a run of so many steps."""
        if isinstance(self.start, Interval):
            return batches.steps_of(self.start)
        return round(Fraction(repr(self.start)) * steps)


class MixtureConfig(Section):
    """Which share of training each source has, and how it changes."""

    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sources without weights have shares proportional to rows^(1/temperature); with 1, all rows occur equally
    often."""
    stages: list[StageConfig] = []
    """A curriculum: changes at given points of training."""


class DataConfig(Section):
    """From text to the token store and to rows."""

    sources: Annotated[list[SourceConfig], BeforeValidator(_source_list), Field(min_length=1)] = [
        SourceConfig(path="stdlib:")
    ]
    """Where the text comes from: a list of sources or paths."""
    store: LocalPath = Path("data/{name}")
    """Folder of the token store; `{name}` is the run's name."""
    remote: str | None = None
    """URL of a prepared store to train from (`s3://`, `https://`, ...); shards are downloaded to `store` when
    needed."""
    remote_options: dict[str, Any] = {}
    """Options of `fsspec` for `remote`, as in `data.sources.storage_options`."""
    cache_bytes: Bytes = 50_000_000_000
    """Maximum disk space for local copies of a remote store's shards."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    clean: Annotated[list[CleanStep], BeforeValidator(step_list)] = []
    """Steps that every document passes, in this order; each is counted (`headway data inspect`)."""
    dedup: DedupConfig = DedupConfig()
    begin_of_text: Literal["auto", "always", "never"] = "auto"
    """Whether every document begins with the tokenizer's begin-of-text token. `auto`: if its template puts one
    before a text. Evaluation, generation and exports follow the store."""
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of documents held out, chosen by a hash of the text, so equal documents are never on both sides."""
    verify: Literal["first_use", "never"] = "first_use"
    """Check the SHA-256 of each shard in the background when training first opens it; a damaged shard ends the run."""
    shard_bytes: Bytes = 128 * 2**20
    """Approximate input of one shard, which is the unit that is prepared again when its input changes."""
    bad_documents: Literal["fail", "skip"] = "fail"
    """What to do with malformed documents; skipped ones are counted, and listed in the store."""
    max_document_bytes: Bytes = MAX_DOCUMENT_BYTES
    """A record (JSON line, CSV row, text of a table's row or of an item) with more bytes is malformed. Text files are
    one document each and may be larger."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes that prepare data; the written bytes do not depend on their number."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Processes of each worker that read and decode the samples of a task of your own ([own-task.md](own-task.md));
    with 0 a thread does. The bits do not depend on their number."""
    mixture: MixtureConfig = MixtureConfig()
    packing: Literal["concat", "best_fit", "pad"] = "concat"
    """How documents fill rows. `concat`: in sequence, cut at row ends. `best_fit`: whole, unless longer than a row.
    `pad`: one document (or part of a longer one) per row."""
    document_mask: bool = False
    """Tokens attend only to their own document of a row, and positions restart with each document."""

    @model_validator(mode="after")
    def _check_layouts(self) -> Self:
        formats = {source.format for source in self.sources if source.text_template in LAYOUTS}
        if not formats:
            return self
        what = "conversations" if "chat" in formats else "prompts and completions"
        if self.clean:
            text = f"these steps are for texts, and a source has {what}: give them to the others"
            raise conflict(text, "clean", "sources")
        if self.dedup.paragraphs:
            raise conflict(f"{what} have no paragraphs", "dedup.paragraphs", "sources")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        weighted = [source.weight is not None for source in self.sources]
        if all(source.role == "replay" for source in self.sources):
            raise conflict("all sources are replayed, so there is nothing to learn", "sources")
        if any(weighted) and not all(weighted):
            missing = ", ".join(str(s.name or s.path) for s in self.sources if s.weight is None)
            raise conflict(f"some sources have a weight, but not: {missing}", "sources")
        if any(weighted) and self.mixture.temperature != 1:
            raise conflict("a temperature is for sources without weights", "mixture.temperature", "sources")
        return self


def given_tokenizer(data: DataConfig, model: PretrainedSource | None) -> Path | str | None:
    """Return the source of the given vocabulary: `data.tokenizer.path`, or else the model to continue, if it has one.

    None if a vocabulary is trained, or comes with the remote store. A model that is not there yet counts as one with a
    vocabulary.

    Args:
        model: `model.from_pretrained`.
    """
    if data.tokenizer.path is not None or data.remote is not None or model is None:
        return data.tokenizer.path
    if is_on_hub(model) or not Path(model).is_dir():
        return model
    return model if any(any(Path(model).glob(name)) for name in TOKENIZER_FILES) else None


def vocabulary_problems(data: DataConfig, model: PretrainedSource | None) -> Iterator[ConfigError]:
    """Yield that a model to continue has no tokenizer with which its data could be prepared.

    Where the data are prepared already, the vocabulary is there.

    Args:
        model: `model.from_pretrained`.
    """
    if model is not None and data.remote is None and given_tokenizer(data, model) is None:
        yield ConfigError(
            "the model to continue has no tokenizer, and the data must be prepared with that of its training",
            where=f"model.from_pretrained: {model}",
            fix="data.tokenizer.path: the tokenizer that it was trained with, or put that file into the model's folder"
            f" ({', '.join(TOKENIZER_FILES)})",
        )


def tokenizer_problems(data: DataConfig, model: PretrainedSource | None) -> Iterator[ConfigError]:
    """Yield what only a given tokenizer can do, where none is given.

    Args:
        model: `model.from_pretrained`.
    """
    if data.remote is not None or given_tokenizer(data, model) is not None:
        return
    if data.begin_of_text == "always":
        yield ConfigError(
            "a tokenizer that is trained has no begin-of-text token",
            where="data.begin_of_text, data.tokenizer.path",
            fix="data.tokenizer.path, or data.begin_of_text=auto",
        )
    if any(source.format == "chat" for source in data.sources):
        yield ConfigError(
            "conversations need a tokenizer with a chat template",
            where="data.sources, data.tokenizer.path",
            fix="data.tokenizer.path: the model's folder, or hf://ORG/NAME",
        )
