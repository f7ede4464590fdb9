"""A byte-level `tokenizer.json` for tiktoken."""

from __future__ import annotations

import json
from pathlib import Path

import tiktoken

END = "<|endoftext|>"
# The pattern of GPT-2, in the equal form that tiktoken's own registry has for it because it is the faster one.
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def tiktoken_encoding(path: str) -> tiktoken.Encoding:
    """The same vocabulary: ids are ranks, since a trained vocabulary numbers its merges in their order."""
    vocabulary = json.loads(Path(path).read_bytes())["model"]["vocab"]
    end = vocabulary.pop(END)
    to_byte = {letter: byte for byte, letter in _byte_letters().items()}
    ranks = {bytes(to_byte[letter] for letter in token): number for token, number in vocabulary.items()}
    return tiktoken.Encoding("trained", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={END: end})


def _byte_letters() -> dict[int, str]:
    """The letters by which byte-level vocabularies write bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}
