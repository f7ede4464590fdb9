"""From text to batches: sources, cleaning, duplicates, the token store, the mixture, and how rows are packed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from headway.config.base import LocalPath, Section, Share, conflict
from headway.config.batches import Batches
from headway.config.clean import CleanStep, step_list
from headway.config.template import parse_template
from headway.config.units import SHARE_OR_INTERVAL, Amount, Bytes, Interval, share_or_interval

#: `data.max_document_bytes` where nothing is set.
MAX_DOCUMENT_BYTES = 64 * 2**20


class SourceConfig(Section):
    """One source of text."""

    path: str
    """File, folder, glob or URL (`s3://`, `gs://`, `az://`, `https://`); `hf://name` is a Hugging Face dataset
    (`hf://name@revision` as of a commit, tag or branch), `python:module:function` what a function yields, `stdlib:` the
    source text of Python's standard library."""
    name: str | None = None
    """Name in manifests and reports; the last part of the path when not given."""
    format: Literal["auto", "text", "jsonl", "parquet", "csv", "arrow"] = "auto"
    """`auto` goes by the file's ending, under `.gz`, `.zst`, `.bz2` and `.xz`. A text file is one document."""
    field: str = "text"
    """The field (JSON Lines), column (Parquet, CSV, Arrow) that holds a document's text; `a.b` is field `b` of `a`."""
    template: str | None = None
    """Renders several fields into one document, e.g. `Question: {question}\\nAnswer: {meta.answer}`, instead of
    `field`; `{{` and `}}` are braces."""
    limit: Amount | None = None
    """Read no more than this: `10k documents` or `2 GB` (of text, in input order)."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of the training rows, relative to the other sources' weights; all sources have one, or none has."""
    max_epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Training uses the source no more than this many times over; then the others take its share."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    streaming: bool = False
    """Read a Hugging Face dataset as a stream instead of through the local cache."""
    storage_options: dict[str, Any] = {}
    """What `fsspec` needs to reach a URL: `endpoint_url`, `profile`, ... Credentials come from the environment; in a
    value `${NAME}` stands for a variable's content, as in `headers: {Authorization: "Bearer ${NAME}"}`."""

    @model_validator(mode="after")
    def _template_is_one(self) -> Self:
        if self.template is not None:
            try:
                parse_template(self.template)
            except ValueError as error:
                raise conflict(str(error), "template") from None
            if self.field != "text":
                raise conflict("a source has a field or a template, not both", "field", "template")
        return self


def source_name(path: str) -> str:
    """A source's name from the last part of its path that says something: `corpus/*.jsonl` is "corpus"."""
    path = path.partition("?")[0] if "://" in path else path
    if path.startswith("hf://"):
        path = re.sub("@[^/]*", "", path)  # the revision
    for part in reversed(path.rstrip("/:").split("/")):
        name = part.split("*")[0].split(".")[0].strip("-_ ")
        if name:
            return name
    return "source"


def named_sources(sources: list[SourceConfig]) -> list[SourceConfig]:
    """Every source with a name of its own: `a/train.jsonl` and `b/train.jsonl` become "train" and "train-2"."""
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
    """What a token store calls the sources: names that can be folders, each another one."""
    names: list[str] = []
    for source in sources:
        base = re.sub(r"[^\w.-]+", "-", source.name or source_name(source.path)).strip(".-") or "source"
        names.append(base if base not in names else next(f"{base}-{n}" for n in count(2) if f"{base}-{n}" not in names))
    return names


def _source_list(value: Any) -> Any:
    """Accept one source, or paths in place of sources: `sources: corpus/*.jsonl`."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [{"path": item} if isinstance(item, str) else item for item in values]


class TokenizerConfig(Section):
    """The vocabulary: an existing one, or one trained on the sources."""

    path: LocalPath | None = None
    """A `tokenizer.json`, a SentencePiece `.model`, a `.tiktoken` file, or a folder with one. When not given, a
    byte-level BPE is trained."""
    vocab_size: Annotated[int, Field(ge=258)] = 8192
    """Vocabulary of a trained tokenizer, special tokens included."""
    training_bytes: Bytes = 256_000_000
    """Text that a trained tokenizer sees, at most; spread evenly over the sources."""
    pattern: str | None = None
    """How text is split into words: `headway` (each digit and line break alone; the default of a trained tokenizer),
    `gpt2`, `llama3`, `qwen2`, `o200k`, `tekken`, or a regular expression. A `.tiktoken` file that is not a published
    one needs it."""
    encoder: Literal["auto", "fastokens", "gigatoken", "tokenizers"] = "auto"
    """Library that encodes. `auto`: the fastest installed one that gives the very ids of `tokenizers`, checked on a
    sample of the sources."""
    special_tokens_in_text: bool = False
    """Encode special tokens that are spelled out in a text as the tokens they name, not as ordinary text."""


class DedupConfig(Section):
    """Which documents or paragraphs are left out because others say the same."""

    documents: bool = False
    """Leave out all but one of equal documents."""
    paragraphs: bool = False
    """Leave out paragraphs that another document has (Raffel et al. 2020, section 2.2, drops repeated spans)."""
    paragraph_bytes: Bytes = 100
    """Shorter paragraphs (headings, list items, closing lines) are left alone."""
    near: bool = False
    """Leave out all but one of equal and nearly equal documents (MinHash LSH: Broder 1997; Leskovec et al., ch. 3)."""
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
    def _bands_find_what_is_similar(self) -> Self:
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
        """Whether anything is to be left out."""
        return self.documents or self.paragraphs or self.near


class StageConfig(Section):
    """From a point of training on, other weights or another sequence length."""

    start: Annotated[Share | Interval, Field(union_mode="left_to_right"), SHARE_OR_INTERVAL]
    """Where the stage begins: a share of all steps, or `500 steps`, `1B tokens`."""
    weights: dict[str, Annotated[float, Field(ge=0.0)]] | None = None
    """Weight of every source by name, 0 for none; as before when not given."""
    sequence_length: PositiveInt | None = None
    """Tokens per row, a divisor of `train.sequence_length`; as before when not given. Tokens per step stay the same."""
    change: Literal["step", "linear"] = "step"
    """`linear`: the shares move from those of the stage before to these over the length of the stage."""

    @field_validator("start", mode="before")
    @classmethod
    def _share_or_interval(cls, value: Any) -> Any:
        return share_or_interval(value)

    def first_step(self, steps: int, batches: Batches) -> int:
        """The step, counted from 0, at which the stage begins in a run of so many steps."""
        if isinstance(self.start, Interval):
            return batches.steps_of(self.start)
        return round(Fraction(repr(self.start)) * steps)


class MixtureConfig(Section):
    """Which share of training each source has, and how it changes."""

    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sources without weights have shares proportional to rows^(1/temperature); 1 is every row equally often."""
    stages: list[StageConfig] = []
    """A curriculum: what changes at given points of training."""


class DataConfig(Section):
    """From text to the token store and to rows."""

    sources: Annotated[list[SourceConfig], BeforeValidator(_source_list), Field(min_length=1)] = [
        SourceConfig(path="stdlib:")
    ]
    """Where the text comes from: a list of sources or paths."""
    store: LocalPath = Path("data/{name}")
    """Folder of the token store; `{name}` is the run's name."""
    remote: str | None = None
    """URL of a prepared store to train from (`s3://`, `https://`, ...); shards come to `store` as they are needed."""
    remote_options: dict[str, Any] = {}
    """What `fsspec` needs to reach `remote`, as `data.sources.storage_options`."""
    cache_bytes: Bytes = 50_000_000_000
    """Local copies of a remote store's shards take at most this much."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    clean: Annotated[list[CleanStep], BeforeValidator(step_list)] = []
    """Steps that every document goes through, in this order; each is counted (`headway data inspect`)."""
    dedup: DedupConfig = DedupConfig()
    begin_of_text: Literal["auto", "always", "never"] = "auto"
    """Whether every document begins with the tokenizer's begin-of-text token. `auto`: where its template puts one
    before a text. Evaluation, generation and exports do as the store does."""
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of documents held out, chosen by a hash of the text, so equal documents are never on both sides."""
    verify: Literal["first_use", "never"] = "first_use"
    """Training checks the SHA-256 of a shard in the background when it first opens it; a damaged one ends the run."""
    shard_bytes: Bytes = 128 * 2**20
    """Input that becomes one shard, about: the unit that is prepared anew when something in it changes."""
    bad_documents: Literal["fail", "skip"] = "fail"
    """What to do with malformed documents; skipped ones are counted, and listed in the store."""
    max_document_bytes: Bytes = MAX_DOCUMENT_BYTES
    """A record (JSON line, CSV row, text of a table's row or of an item) with more bytes is malformed. Text files, one
    document each, may be larger."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes that prepare data; the bytes written do not depend on it."""
    mixture: MixtureConfig = MixtureConfig()
    packing: Literal["concat", "best_fit", "pad"] = "concat"
    """How documents fill rows. `concat`: one after the other, cut at row ends. `best_fit`: whole, unless longer than a
    row. `pad`: one document (or part of a longer one) per row."""
    document_mask: bool = False
    """No token attends to another document of its row, and positions start anew with each."""

    @model_validator(mode="after")
    def _begin_of_text_is_there(self) -> Self:
        if self.begin_of_text == "always" and self.tokenizer.path is None and self.remote is None:
            raise conflict("a tokenizer that is trained has no begin-of-text token", "begin_of_text", "tokenizer.path")
        return self

    @model_validator(mode="after")
    def _weights_are_whole(self) -> Self:
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            missing = ", ".join(str(s.name or s.path) for s in self.sources if s.weight is None)
            raise conflict(f"some sources have a weight, but not: {missing}", "sources")
        if any(weighted) and self.mixture.temperature != 1:
            raise conflict("a temperature is for sources without weights", "mixture.temperature", "sources")
        return self
