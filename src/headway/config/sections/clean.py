"""Cleaning steps, which each document passes in the given order before it is tokenized; every step is counted."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from headway.config.base import FUNCTION_PATTERN, LocalPath, Section, Share, conflict


class UnicodeStep(Section):
    """Normalise Unicode, repair mojibake, remove control characters."""

    step: Literal["unicode"] = "unicode"
    form: Literal["NFC", "NFKC", "none"] = "NFC"
    """Normalisation form (Unicode Standard Annex 15). NFKC also folds ligatures, full-width letters, superscripts."""
    mojibake: bool = False
    """Repair text that was decoded with the wrong encoding (`cafÃ©`), with `ftfy` (extra `clean`)."""
    control_characters: Literal["keep", "remove"] = "keep"
    """`remove`: remove all control characters (category Cc) except tab, line feed and carriage return."""


class LengthStep(Section):
    """Drop documents that are too short or too long."""

    step: Literal["length"] = "length"
    min_characters: PositiveInt | None = None
    """Minimum number of characters."""
    max_characters: PositiveInt | None = None
    """Maximum number of characters."""
    min_words: PositiveInt | None = None
    """Minimum number of words, as separated by white space."""
    max_words: PositiveInt | None = None
    """Maximum number of words."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        limits = ("min_characters", "max_characters", "min_words", "max_words")
        if all(getattr(self, name) is None for name in limits):
            raise conflict(f"give at least one of {', '.join(limits)}")
        for kind in ("characters", "words"):
            low = getattr(self, f"min_{kind}")
            high = getattr(self, f"max_{kind}")
            if low is not None and high is not None and low > high:
                raise conflict(f"min_{kind} is above max_{kind}", f"min_{kind}", f"max_{kind}")
        return self


class GopherQualityStep(Section):
    """Drop documents that do not look like English prose (Rae et al. 2021, appendix A.1.1, "Quality Filtering")."""

    step: Literal["gopher_quality"] = "gopher_quality"
    min_words: NonNegativeInt = 50
    """Minimum number of words, as separated by white space."""
    max_words: PositiveInt = 100_000
    """Maximum number of words."""
    min_mean_word_length: Annotated[float, Field(ge=0.0)] = 3.0
    """Shortest mean length of words, in characters."""
    max_mean_word_length: Annotated[float, Field(gt=0.0)] = 10.0
    """Longest mean length of words, in characters."""
    max_symbol_to_word_ratio: Annotated[float, Field(ge=0.0)] = 0.1
    """Maximum number of hash symbols per word, and of ellipses per word."""
    max_bullet_lines: Share = 0.9
    """Largest share of lines that begin with a bullet point."""
    bullets: list[str] = ["•", "‣", "◦", "▪", "-", "*"]
    """Characters that count as bullet points; the paper names none."""
    max_ellipsis_lines: Share = 0.3
    """Largest share of lines that end with an ellipsis."""
    min_alphabetic_words: Share = 0.8
    """Smallest share of words that contain an alphabetic character."""
    stop_words: list[str] = ["the", "be", "to", "of", "and", "that", "have", "with"]
    """English words for `min_stop_words`; case is ignored."""
    min_stop_words: NonNegativeInt = 2
    """Fewest different `stop_words` in a document; 0 for other languages."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.min_words > self.max_words:
            raise conflict("min_words is above max_words", "min_words", "max_words")
        if self.min_mean_word_length > self.max_mean_word_length:
            keys = "min_mean_word_length", "max_mean_word_length"
            raise conflict(f"{keys[0]} is above {keys[1]}", *keys)
        if self.min_stop_words > len(self.stop_words):
            raise conflict("min_stop_words is more than there are stop_words", "min_stop_words", "stop_words")
        if not all(self.stop_words) or not all(self.bullets):
            raise conflict("a stop word or bullet is empty", "stop_words", "bullets")
        return self


class GopherRepetitionStep(Section):
    """Drop documents that repeat themselves (Rae et al. 2021, appendix A.1.1, "Repetition Removal", table A1)."""

    step: Literal["gopher_repetition"] = "gopher_repetition"
    max_duplicate_lines: Share = 0.30
    """Largest share of lines that repeat an earlier one."""
    max_duplicate_paragraphs: Share = 0.30
    """Largest share of paragraphs that repeat an earlier one."""
    max_duplicate_line_characters: Share = 0.20
    """Largest share of characters in such lines."""
    max_duplicate_paragraph_characters: Share = 0.20
    """Largest share of characters in such paragraphs."""
    max_top_ngram_characters: dict[Annotated[int, Field(ge=1, le=32)], Share] = {2: 0.20, 3: 0.18, 4: 0.16}
    """By number of words: largest share of characters in the most frequent n-gram."""
    max_duplicate_ngram_characters: dict[Annotated[int, Field(ge=1, le=32)], Share] = {
        5: 0.15,
        6: 0.14,
        7: 0.13,
        8: 0.12,
        9: 0.11,
        10: 0.10,
    }
    """By number of words: largest share of characters in n-grams that repeat an earlier one."""


class C4Step(Section):
    """Keep lines of prose, drop pages without prose (Raffel et al. 2020, section 2.2)."""

    step: Literal["c4"] = "c4"
    terminal_punctuation: bool = True
    """Remove lines that do not end in a period, exclamation mark, question mark or end quotation mark."""
    min_words_per_line: NonNegativeInt = 5
    """Remove lines with fewer words."""
    max_word_length: NonNegativeInt = 1000
    """Remove lines with a longer word, as the authors' code does; 0: any length."""
    javascript_lines: bool = True
    """Remove lines with the word Javascript."""
    policy_lines: bool = True
    """Remove lines that mention terms of use, privacy and cookie policies, or the use of cookies."""
    citations: bool = True
    """Remove citation markers: `[1]`, `[edit]`, `[citation needed]`."""
    min_sentences: NonNegativeInt = 3
    """Drop pages with fewer sentences in the remaining lines."""
    lorem_ipsum: bool = True
    """Drop pages with the phrase "lorem ipsum"."""
    curly_brackets: bool = True
    """Drop pages with a curly bracket."""
    blocked_words: LocalPath | None = None
    """Drop pages with any word of this file: one word a line, UTF-8; case is ignored."""


class FinewebStep(Section):
    """Drop lists, menus and boilerplate (Penedo et al. 2024, "The FineWeb Datasets", section 3.6: the three custom
    filters)."""

    step: Literal["fineweb"] = "fineweb"
    min_punctuated_lines: Share = 0.12
    """Drop when this share of lines, or less, end with terminal punctuation."""
    max_duplicate_line_characters: Share = 0.1
    """Drop when this share of characters, or more, is in lines that repeat an earlier one."""
    max_short_lines: Share = 0.67
    """Drop when this share of lines, or more, is short."""
    short_line: PositiveInt = 30
    """Lines with fewer characters are short."""


class LanguageStep(Section):
    """Keep documents in some languages, as detected by fastText's `lid.176.ftz` (Joulin et al. 2017); needs
    the extra `language`."""

    step: Literal["language"] = "language"
    languages: Annotated[list[str], Field(min_length=1)] = ["en"]
    """ISO 639 codes as fastText uses them: en, de, fr, zh, ..."""
    threshold: Share = 0.65
    """Smallest score of the likeliest language (Penedo et al. 2024, section 3.3)."""


class PiiStep(Section):
    """Replace personal data by placeholders."""

    step: Literal["pii"] = "pii"
    email: str | None = "<EMAIL>"
    """Placeholder for e-mail addresses; null leaves them as they are."""
    ip: str | None = "<IP>"
    """Placeholder for IPv4 and IPv6 addresses; null leaves them as they are."""
    phone: str | None = "<PHONE>"
    """Placeholder for telephone numbers; null leaves them as they are."""
    private_ips: bool = False
    """Also replace private addresses: 192.168.0.1, 127.0.0.1, fe80::1, ..."""

    @model_validator(mode="after")
    def _check_placeholders(self) -> Self:
        if self.email is None and self.ip is None and self.phone is None:
            raise conflict("nothing to replace: email, ip and phone are all null", "email", "ip", "phone")
        return self


class PythonStep(Section):
    """Your own function, called with the text of each document."""

    step: Literal["python"] = "python"
    function: Annotated[str, Field(pattern=FUNCTION_PATTERN)]
    """`package.module:function`, importable from here. It returns the new text, true to keep the text unchanged, or
    false or null to drop the document. Equal texts must give equal results."""


class ScoreStep(Section):
    """Keep the documents to which your own function gives a score within bounds, such as a level of difficulty."""

    step: Literal["score"] = "score"
    function: Annotated[str, Field(pattern=FUNCTION_PATTERN)]
    """`package.module:function`, importable from here. It returns a number for the text of a document. Equal texts must
    give equal numbers."""
    at_least: float | None = None
    """Lowest score to keep."""
    below: float | None = None
    """Scores from here on are dropped."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.at_least is None and self.below is None:
            raise conflict("give at_least, below or both")
        if self.at_least is not None and self.below is not None and not self.at_least < self.below:
            raise conflict("at_least is not lower than below, so nothing is kept", "at_least", "below")
        return self


class EvaluationSet(Section):
    """Texts that must not be trained on."""

    path: str
    """File, folder or glob, as for a source."""
    name: str | None = None
    """Name in reports; the last part of the path when not given."""
    format: Literal["auto", "text", "jsonl", "parquet", "csv", "arrow"] = "auto"
    """As for a source."""
    field: str = "text"
    """The field or column that holds an example's text."""
    template: str | None = None
    """Renders several fields into one text, as for a source."""


def _set_list(value: Any) -> Any:
    """Accept one set, or paths in place of sets: `sets: evaluation/*.jsonl`."""
    values = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in values]


class DecontaminateStep(Section):
    """Find documents that share an n-gram with evaluation sets (Brown et al. 2020, appendix C)."""

    step: Literal["decontaminate"] = "decontaminate"
    sets: Annotated[list[EvaluationSet], BeforeValidator(_set_list), Field(min_length=1)]
    """Evaluation sets: a list of sections or paths."""
    ngram: Annotated[int, Field(ge=1, le=64)] = 13
    """Words in an n-gram; case, punctuation and white space do not count."""
    min_ngram: Annotated[int, Field(ge=1, le=64)] = 8
    """Examples shorter than `ngram` are searched for as a whole, if they have at least this many words."""
    min_matches: PositiveInt = 1
    """A document overlaps with a set if it contains at least this many of its n-grams."""
    action: Literal["report", "remove"] = "remove"
    """`report` counts such documents and keeps them."""

    @model_validator(mode="after")
    def _check_ngrams(self) -> Self:
        if self.min_ngram > self.ngram and "min_ngram" in self.model_fields_set:
            raise conflict("min_ngram is above ngram", "min_ngram", "ngram")
        return self

    @field_validator("sets", mode="after")
    @classmethod
    def _check_unique_names(cls, sets: list[EvaluationSet]) -> list[EvaluationSet]:
        names = [item.name for item in sets if item.name is not None]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two evaluation sets have the name '{twice}'")
        return sets


CleanStep = Annotated[
    UnicodeStep
    | LengthStep
    | GopherQualityStep
    | GopherRepetitionStep
    | C4Step
    | FinewebStep
    | LanguageStep
    | PiiStep
    | PythonStep
    | ScoreStep
    | DecontaminateStep,
    Field(discriminator="step"),
]


#: Paths of word lists and evaluation sets do not matter; the hashes of their content represent them.
_PLACES: dict[str, set[str]] = {"c4": {"blocked_words"}, "decontaminate": {"sets"}}


def step_settings(step: CleanStep) -> dict[str, Any]:
    """Return a step's settings as plain JSON, without paths."""
    return step.model_dump(mode="json", exclude=_PLACES.get(step.step))


def step_list(value: Any) -> Any:
    """Accept a step's name in place of a step: `clean: [unicode]`."""
    values = value if isinstance(value, list) else [value]
    return [{"step": item} if isinstance(item, str) else item for item in values]
