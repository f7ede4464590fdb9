"""Special tokens that a text spells out, and how libraries are kept from making them of it.

`tokenizers` can be told to find no special token in a text. It makes one all the same when the token that ends a text
is an added one not marked as special, and when a model has special tokens among its own pieces and comes to one of them
by itself: as a likely piece of a Unigram model, as a word that is in the vocabulary, by merges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from headway.data.tokenizing.patterns import PATTERNS
from headway.data.tokenizing.spec import NEVER, added_tokens

# A name that no text has: no word holds a space, and nobody writes a noncharacter of Unicode.
_HIDDEN = "\U0010ffff unused {}"
# No word of the usual patterns has a letter or digit and then such a mark at its end: `<eos>` is three of them.
_OF_SEVERAL_WORDS = re.compile(r"[A-Za-z0-9].*[!-/:-@\[-^`{-~]\Z", re.DOTALL)
# Other pre-tokenizers that part letters from the marks behind them.
_USUAL = ("BertPreTokenizer", "Whitespace")


@dataclass(frozen=True)
class SpecialInText:
    """By which ways a text could become special tokens of a vocabulary, though it is to be text."""

    unmarked: str | None
    """The token that ends a text, where it is an added one not marked as special."""
    likely: tuple[int, ...]
    """Numbers of the special pieces of a Unigram model that a text could be split into."""
    hidden: dict[str, str]
    """Special tokens to which a table of words or merges may lead, and the names they must have for a library."""

    def as_text(self, content: bytes) -> bytes:
        """The tokenizer.json, of which these are the ways, without them; all ids are the same."""
        import orjson

        spec = orjson.loads(content)
        for token in spec.get("added_tokens") or []:
            if token["content"] == self.unmarked:
                token["special"] = True
            # Libraries give a token that is not in the vocabulary another id.
            token["content"] = self.hidden.get(token["content"], token["content"])
        model = spec["model"]
        if self.likely:
            lowest = min(NEVER, *(score for _, score in model["vocab"]))
            for number in self.likely:
                model["vocab"][number][1] = lowest
        if self.hidden:
            model["vocab"] = {self.hidden.get(token, token): number for token, number in model["vocab"].items()}
        if self.hidden and model.get("merges"):
            model["merges"] = [merge for merge in model["merges"] if "".join(_pair(merge)) not in self.hidden]
        return orjson.dumps(spec)


def special_in_text(spec: dict[str, Any], end: str) -> SpecialInText:
    """Look at a tokenizer.json.

    Args:
        spec: Its content.
        end: The token that ends a text.
    """
    added = added_tokens(spec)
    unmarked = any(token["content"] == end and not token.get("special") for token in added)
    special = {end, *(token["content"] for token in added if token.get("special"))}
    model = spec["model"]
    likely: list[int] = []
    if isinstance(model["vocab"], list):
        pieces, unknown = enumerate(model["vocab"]), model.get("unk_id")
        likely = [n for n, (piece, score) in pieces if piece in special and n != unknown and score > NEVER]
    return SpecialInText(end if unmarked else None, tuple(likely), _hidden(spec, special))


def _hidden(spec: dict[str, Any], special: set[str]) -> dict[str, str]:
    """See `SpecialInText.hidden`. The unknown token is none of them, since its name is looked for."""
    model = spec["model"]
    vocab = model["vocab"]
    if not isinstance(vocab, dict):
        return {}
    found = {token for token in special if token in vocab and token != model.get("unk_token")}
    if _parts_marks(spec.get("pre_tokenizer") or {}):
        found = {token for token in found if not _OF_SEVERAL_WORDS.search(token)}
    if found and model.get("type", "BPE") == "BPE":
        found = _within_reach(found, model)
    return {token: _HIDDEN.format(vocab[token]) for token in sorted(found)}


def _within_reach(special: set[str], model: dict[str, Any]) -> set[str]:
    """The special tokens that byte-pair encoding may come to.

    Not letters of the alphabet, and not what other merges go on from: words that have it within them, and do not spell
    out the token alone, would be encoded otherwise.
    """
    merges = [_pair(merge) for merge in model.get("merges") or []]
    whole = {token for token in special if len(token) > 1}
    whole -= {half for pair in merges for half in pair}
    return whole if model.get("ignore_merges") else whole & {left + right for left, right in merges}


def _parts_marks(pre: dict[str, Any]) -> bool:
    """Whether text is split between a letter or digit and the marks behind it."""
    for step in pre.get("pretokenizers", [pre]):
        kind, pattern = step.get("type"), step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if kind in _USUAL or (kind == "ByteLevel" and step.get("use_regex", True)):
            return True
        if kind == "Split" and regex in PATTERNS.values() and step.get("behavior") in ("Isolated", "Removed"):
            return True
    return False


def _pair(merge: Any) -> tuple[str, str]:
    """The two halves of a merge, of which older files make one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
