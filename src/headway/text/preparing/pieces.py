"""A piece of input on its way: what a worker takes for it, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from headway.config.sections.clean import CleanStep
from headway.config.sections.data import DedupConfig
from headway.config.units import Amount
from headway.core.arrays import Bools, Ints
from headway.core.errors import DataError
from headway.text.reading.documents import BadDocument
from headway.text.reading.sources import Piece

if TYPE_CHECKING:
    from headway.text.clean import CleanCounts
    from headway.text.dedup import DocumentPrints

SPLITS = ("train", "validation")
#: Limit on the skipped documents that are listed; all are counted.
LISTED = 1000

Bits = Bools


@dataclass(frozen=True)
class Recipe:
    """The settings that all pieces share."""

    tokenizer: Path | None
    """Folder of the vocabulary; None if documents are only surveyed."""
    encoder: str
    """Library that encodes."""
    special_tokens_in_text: bool
    bound: int
    """Documents whose hash is below it are held out for validation."""
    holds_out: bool
    """Whether documents are held out at all; if not, their hashes are not needed."""
    skip_bad: bool
    """Count and list malformed documents instead of failing on the first."""
    clean: tuple[tuple[CleanStep, ...], ...] = ()
    """The cleaning steps of each source, by its number; empty if there are none at all."""
    fingerprints: DedupConfig | None = None
    """Settings of the search for duplicates, for which documents are fingerprinted; None without a search."""
    begin: tuple[int, ...] = ()
    """The tokens that begin every document."""
    unavoidable: dict[int, str] = field(default_factory=dict)
    """Special tokens, by id, without which some text cannot be encoded; a document that needs one is malformed."""
    chat: str | None = None
    """The file of the tokenizer whose chat template renders conversations, for messages; None if there are none."""


@dataclass(frozen=True)
class Verdict:
    """The documents of a piece that remain after the survey and the search for duplicates.

    Attributes:
        keep: Per document read, whether it stays.
        paragraphs: Per paragraph of the documents that stay, in order, whether it stays; None if all stay.
        paragraph_counts: Number of paragraphs of each document that stays.
    """

    keep: Bits
    paragraphs: Bits | None = None
    paragraph_counts: Ints | None = None


@dataclass(frozen=True)
class Work:
    """One piece to process."""

    piece: Piece
    budget: Amount | None = None
    """The maximum amount to read of the piece."""
    verdict: Verdict | None = None


@dataclass
class SplitPart:
    """A piece's documents in one split."""

    tokens: NDArray[Any]
    """Ids of all documents, in the store's dtype, with the tokens that begin and end each document."""
    lengths: Ints
    """Tokens of each document, with those that begin and end it."""
    trained: Bits | None = None
    """For each token of conversations whether it is trained; None for texts, all of whose tokens are."""

    def split(self, documents: int) -> tuple[SplitPart, SplitPart]:
        """Return the first documents, and the others."""
        border = int(self.lengths[:documents].sum())
        masks = (None, None) if self.trained is None else (self.trained[:border], self.trained[border:])
        first = SplitPart(self.tokens[:border], self.lengths[:documents], masks[0])
        return first, SplitPart(self.tokens[border:], self.lengths[documents:], masks[1])


@dataclass
class ReadCounts:
    """Counts of what was read."""

    read: int = 0
    """Documents that have text."""
    read_bytes: int = 0
    """Their UTF-8 bytes."""
    empty: int = 0
    skipped: int = 0
    cut: int = 0
    """Skipped documents that stand for the rest of a file."""
    too_large: int = 0
    """Skipped documents that are larger than `data.max_document_bytes`."""


@dataclass
class EncodedCounts:
    """Counts of what was encoded."""

    documents: int = 0
    """Documents that were encoded, with their characters and UTF-8 bytes."""
    characters: int = 0
    text_bytes: int = 0
    unencodable: int = 0
    """Documents that the tokenizer cannot encode; they are omitted."""
    trained_tokens: int = 0
    """Tokens of conversations that are trained."""
    without_tokens: int = 0
    """Documents for which the tokenizer gives no token; they consist of the tokens that begin and end a document."""


@dataclass
class PieceResult(ReadCounts, EncodedCounts):
    """A worker's result for a piece."""

    skipped_list: list[BadDocument] = field(default_factory=list)
    failed: BadDocument | None = None
    """The malformed document at which reading stopped, if malformed documents are not skipped."""
    also_failed: list[BadDocument] = field(default_factory=list)
    """The malformed documents that were read together with it."""
    ended: bool = False
    """The budget ended the piece."""
    error: DataError | None = None
    """Why the piece could not be processed; then the other fields are empty."""
    kept: Bits | None = None
    """Per document read, whether it passed the cleaning; None if all did."""
    clean: CleanCounts | None = None
    prints: DocumentPrints | None = None
    splits: dict[str, SplitPart] = field(default_factory=dict)
    smallest: int = 2**64
    """Smallest and largest document hash."""
    largest: int = -1
    unencodable_list: list[BadDocument] = field(default_factory=list)
    first_without: str | None = None
    """Place of the first document without a token."""
