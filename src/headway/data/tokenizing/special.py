"""Prevention of special tokens from text that spells them out.

`tokenizers` has an option to match no special token in a text. It still produces one in two cases. First, if the
end-of-text token, or another token with a role, is not marked as special. Second, if a model has special tokens among
its own pieces and arrives at one by itself: as a piece of a Unigram model, as a run of characters unknown to such a
model, as a word in the vocabulary, or by merges. It produces pieces for single bytes (`<0x41>`) in these ways, too.

A low score does not ban a piece: an unknown character always has a lower one. So a token that must not be produced gets
a name that no text has. Byte tokens and the unknown token are looked up by name, so they keep it; instead, no merge
leads to them, or words that spell one out are cut in two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from headway.data.tokenizing.patterns import PATTERNS
from headway.data.tokenizing.spec import NEVER, added_tokens
from headway.data.tokenizing.tiktoken_files import byte_letters

# No word contains this name: words either have no spaces, or end after the mark (see `isolates`).
_MARK = "\U0010ffff"
_HIDDEN = _MARK + " unused {}"
_ALONE = {"type": "Split", "pattern": {"String": _MARK}, "behavior": "Isolated", "invert": False}
_CUT = {"type": "Split", "behavior": "MergedWithPrevious", "invert": False}
# The usual patterns split a token with a letter or digit before a mark at its end: `<eos>` becomes three words.
_OF_SEVERAL_WORDS = re.compile(r"[A-Za-z0-9].*[!-/:-@\[-^`{-~]\Z", re.DOTALL)
# Other pre-tokenizers that separate letters from the marks after them; and those whose words have no spaces.
_USUAL = ("BertPreTokenizer", "Whitespace")
_NO_SPACES = (*_USUAL, "ByteLevel", "Metaspace", "WhitespaceSplit")
#: The pieces that stand for the bytes of characters without a piece.
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_PAIRS = r"(?=(<0|0x|x[0-9A-F]|[0-9A-F]{2}|[0-9A-F]>))"
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


@dataclass(repr=False, eq=False)  # generating these methods would take longer than loading the rest of the module
class SpecialInText:
    """The ways in which ordinary text could become special tokens of a vocabulary."""

    special: frozenset[str]
    """All special tokens."""
    unmarked: frozenset[str]
    """Special tokens that are added tokens, but not marked as special."""
    unlisted: frozenset[str]
    """Special tokens that are words or pieces, but not added tokens."""
    hidden: dict[str, str] = field(default_factory=dict)
    """Tokens that pieces, words or merges may lead to, with the names that a library must get for them."""
    unmerged: frozenset[str] = frozenset()
    """Tokens that keep their names, but to which no merge may lead."""
    byte_names: frozenset[str] = frozenset()
    """Tokens that stand for single bytes."""
    cut: str | None = None
    """A regular expression; words are cut after its matches."""
    isolates: bool = False
    """Words may contain spaces, so the mark of hidden names must be split off."""
    unavoidable: frozenset[str] = frozenset()
    """Special tokens without which some text cannot be encoded: letters, halves of words, or the unknown token."""
    named_by_files: frozenset[str] = frozenset()
    """Special tokens that only files next to the tokenizer name, and that a text could become."""
    first_ways: set[str] = field(default_factory=set)
    """Ways in which texts became special tokens in the first versions, by their names in the keys of stores."""
    changed: bool = False
    """Texts became special tokens in further ways, which later versions closed."""

    def as_text(self, content: bytes) -> bytes:
        """Return the tokenizer.json with all these ways closed; no id changes."""
        import orjson

        if not (self.unmarked or self.hidden or self.unmerged or self.cut):
            return content
        spec = orjson.loads(content)
        self._mark(spec)
        for token in spec.get("added_tokens") or []:
            # A library gives another id to a token that is not in the vocabulary, so rename it there, too.
            token["content"] = self.hidden.get(token["content"], token["content"])
        model = spec["model"]
        if isinstance(model["vocab"], list):
            model["vocab"] = _without_bans(model, self.hidden)
        elif self.hidden:
            model["vocab"] = {self.hidden.get(token, token): number for token, number in model["vocab"].items()}
        unmerged = self.unmerged | self.hidden.keys()
        if unmerged and model.get("merges"):
            model["merges"] = [merge for merge in model["merges"] if _product(_pair(merge), model) not in unmerged]
        steps = [{**_CUT, "pattern": {"Regex": self.cut}}] if self.cut else []
        steps += [_ALONE] if self.isolates else []
        if steps:
            before = [spec["pre_tokenizer"]] if spec.get("pre_tokenizer") else []
            spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": before + steps}
        return orjson.dumps(spec)

    def as_tokens(self, content: bytes) -> bytes:
        """Return the tokenizer.json with which a library encodes every spelled-out special token as that token."""
        import orjson

        if not (self.unmarked or self.unlisted):
            return content
        spec = orjson.loads(content)
        self._mark(spec)
        vocab = spec["model"]["vocab"]
        ids = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
        unlisted = [{"id": ids[token], "content": token, **_FLAGS, "special": True} for token in self.unlisted]
        spec["added_tokens"] = [*(spec.get("added_tokens") or []), *unlisted]
        spec["added_tokens"] = added_tokens(spec)  # in order
        return orjson.dumps(spec)

    def key_marks(self, special_tokens_in_text: bool) -> list[str]:
        """Return marks for the keys of stored results, which differ from those of versions that gave other ids.

        The list is empty if no version gave other ids.
        """
        if special_tokens_in_text:
            return [*(self.first_ways & {"as text"}), *sorted(self.unlisted)]
        changed = ["no special tokens"] if self.changed else []
        return [*sorted(self.first_ways), *changed, *sorted(self.named_by_files)]

    def _mark(self, spec: dict[str, Any]) -> None:
        for token in spec.get("added_tokens") or []:
            token["special"] = bool(token.get("special")) or token["content"] in self.unmarked


def special_in_text(spec: dict[str, Any], end: str, named: Iterable[str] = ()) -> SpecialInText:
    """Find the ways in which text could become special tokens of a tokenizer.json.

    Args:
        spec: The content of the file.
        end: The end-of-text token.
        named: Other tokens of the vocabulary that have a role in the files next to it.
    """
    listed = {token["content"]: bool(token.get("special")) for token in added_tokens(spec)}
    marked = {token for token, is_special in listed.items() if is_special}
    special = {end, *named} | marked
    unmarked = {token for token in special if not listed.get(token, True)}
    ways = SpecialInText(frozenset(special), frozenset(unmarked), frozenset(special - listed.keys()))
    model = spec["model"]
    if model.get("byte_fallback"):
        vocab = model["vocab"] if isinstance(model["vocab"], dict) else {piece for piece, _ in model["vocab"]}
        ways.byte_names = frozenset(name for name in BYTES if name in vocab)
    known = {end} | marked
    if end in unmarked:
        ways.first_ways.add("as text")
    if isinstance(model["vocab"], list):
        _find_in_pieces(ways, model, end, known)
    else:
        _find_in_words(ways, spec, end, known)
    ways.isolates = bool(ways.hidden) and not _splits_spaces(spec)
    ways.named_by_files = frozenset(unmarked | (ways.unlisted & (ways.hidden.keys() | ways.unavoidable))) - {end}
    ways.changed |= bool(ways.isolates or ways.named_by_files or ways.unavoidable)
    return ways


def _find_in_words(ways: SpecialInText, spec: dict[str, Any], end: str, known: set[str]) -> None:
    """Find the ways of a model with a table of words; `known` are the tokens that the first versions handled."""
    model = spec["model"]
    vocab = model["vocab"]
    unknown = model.get("unk_token")
    found = {token for token in ways.special if token in vocab and token != unknown}
    kept = ways.byte_names | ({unknown} & vocab.keys())
    if _splits_marks(spec.get("pre_tokenizer") or {}):
        found = {token for token in found if not _OF_SEVERAL_WORDS.search(token)}
        kept = {token for token in kept if not _OF_SEVERAL_WORDS.search(token)}
    if unknown == end and not _knows_all(spec):
        ways.unavoidable |= {end}
    if model.get("type", "BPE") == "BPE":
        found = _find_in_merges(ways, model, found, kept, known)
    elif found & known:
        ways.first_ways.add("words as text")
    ways.changed |= not found <= known
    ways.hidden = {token: _HIDDEN.format(vocab[token]) for token in sorted(found)}


def _find_in_merges(
    ways: SpecialInText, model: dict[str, Any], found: set[str], kept: set[str], known: set[str]
) -> set[str]:
    """Find the ways of byte-pair encoding, and return the special tokens that must be hidden.

    A token that other merges use cannot be hidden: words that contain it, but do not spell out that token alone, would
    be encoded differently. Nor can the letters of an alphabet, if no other token stands for them.
    """
    if not found and not kept:
        return set()
    merges = [_pair(merge) for merge in model.get("merges") or []]
    by_lookup = bool(model.get("ignore_merges"))
    halves = {half for pair in merges for half in pair}
    made = {_product(pair, model) for pair in merges}
    letters = {token for token in found if len(token) == 1}
    reachable = found if by_lookup else (found & made) | letters
    if not (model.get("byte_fallback") or model.get("unk_token")):
        ways.unavoidable |= letters
        reachable -= letters
    ways.unavoidable |= reachable & halves
    hidden = reachable - halves
    plain = {left + right for left, right in merges} if model.get("continuing_subword_prefix") else made
    first = {token for token in hidden & known if len(token) > 1 and (by_lookup or token in plain)}
    if first:
        ways.first_ways.add("words as text")
    ways.unmerged = frozenset(kept & made)
    ways.cut, _ = _cut_within(kept & ways.byte_names if by_lookup else (), "")
    ways.changed |= bool(hidden - first or ways.unmerged or ways.cut)
    return hidden


def _find_in_pieces(ways: SpecialInText, model: dict[str, Any], end: str, known: set[str]) -> None:
    """Find the ways of a Unigram model; the unknown piece and pieces with a banning score are not for text either."""
    pieces: list[tuple[str, float]] = model["vocab"]
    number = model.get("unk_id")
    unknown = pieces[number][0] if isinstance(number, int) and number < len(pieces) else None
    names = {piece for piece, _ in pieces}
    in_bytes = ways.byte_names
    if unknown == end and len(in_bytes) < len(BYTES):
        ways.unavoidable |= {end}
    banned = {piece for piece, score in pieces if score <= NEVER}
    hidden = ((names & ways.special) | banned | {unknown}) & names - in_bytes
    ways.hidden = {piece: _HIDDEN.format(n) for n, (piece, _) in enumerate(pieces) if piece in hidden}
    usable = names - hidden - in_bytes
    ways.cut, is_exact = _cut_within(in_bytes, "\n".join(usable))
    first = (hidden & known) - banned - {unknown}
    if first:
        ways.first_ways.add("as text")
    # Low enough scores did ban pieces if every character is a piece, too.
    did_ban = {*"".join(names)} <= usable and _lowest(pieces) * max(map(len, names), default=0) > NEVER
    ways.changed |= not (did_ban and is_exact and hidden | in_bytes <= banned | first)


def _lowest(pieces: Iterable[tuple[str, float]]) -> float:
    return min((score for _, score in pieces if score > NEVER), default=0.0)


def _without_bans(model: dict[str, Any], hidden: Collection[str]) -> list[tuple[str, float]]:
    """Return the pieces of a Unigram model, with other names for the hidden ones.

    The score of an unknown character follows from the lowest score, so no score may be lower than those of the pieces
    that are for text.
    """
    lowest = _lowest(model["vocab"])
    return [
        (_HIDDEN.format(number) if piece in hidden else piece, max(score, lowest))
        for number, (piece, score) in enumerate(model["vocab"])
    ]


def _cut_within(names: Collection[str], pieces: str) -> tuple[str | None, bool]:
    """Make a pattern after which to cut words so that they do not spell out a byte's name.

    Returns:
        The pattern, and whether no other piece lies across such a cut.
    """
    if not names:
        return None, True
    across = {*re.findall(_PAIRS, pieces)}
    places = {name: [at for at in range(1, len(name)) if name[at - 1 : at + 1] not in across] for name in sorted(names)}
    patterns = [f"{name[:at]}(?={name[at:]})" for name, free in places.items() for at in (free or [1])[:1]]
    return "|".join(patterns), all(places.values())


def _knows_all(spec: dict[str, Any]) -> bool:
    """Return whether the vocabulary has a token for every byte, so that no text is unknown."""
    model = spec["model"]
    if model.get("byte_fallback"):
        return bool(model["vocab"].keys() >= {*BYTES})
    return "ByteLevel" in _kinds(spec) and model["vocab"].keys() >= {*byte_letters()}


def _splits_spaces(spec: dict[str, Any]) -> bool:
    """Return whether no word of a model contains a space."""
    normalizer = spec.get("normalizer") or {}
    replaces = any(
        step.get("type") == "Replace" and step.get("pattern") == {"String": " "} and " " not in step.get("content", " ")
        for step in normalizer.get("normalizers", [normalizer])
    )
    return replaces or not _kinds(spec).isdisjoint(_NO_SPACES)


def _kinds(spec: dict[str, Any]) -> set[str]:
    """Return the types of the pre-tokenizers and normalizers."""
    outer = spec.get("pre_tokenizer") or {}
    normalizer = spec.get("normalizer") or {}
    steps = [*outer.get("pretokenizers", [outer]), *normalizer.get("normalizers", [normalizer])]
    return {str(step.get("type")) for step in steps}


def _splits_marks(pre: dict[str, Any]) -> bool:
    """Return whether text is split between a letter or digit and the marks after it."""
    for step in pre.get("pretokenizers", [pre]):
        kind = step.get("type")
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if kind in _USUAL or (kind == "ByteLevel" and step.get("use_regex", True)):
            return True
        if kind == "Split" and regex in PATTERNS.values() and step.get("behavior") in ("Isolated", "Removed"):
            return True
    return False


def _product(pair: tuple[str, str], model: dict[str, Any]) -> str:
    """Return the token that a merge makes."""
    left, right = pair
    return left + right[len(model.get("continuing_subword_prefix") or "") :]


def _pair(merge: Any) -> tuple[str, str]:
    """Return the two halves of a merge, which older files write as one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
