"""Prompts with completions to token ids, with a mask of the tokens that are trained: those of the completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints

if TYPE_CHECKING:
    from headway.data.tokenizing.encoders import TextEncoder


class CompletionEncoder:
    """Encodes a prompt and its completion (`headway.text.reading.conversations`) as one text, without a template.

    A text is encoded as a whole, since a model reads it so. Its prompt is encoded alone too, as it will be when the
    model continues it: the tokens that both begin with are the prompt's, all others are trained.

    Args:
        encoder: The encoder of texts.
        begin: Ids that begin each document.
        end: Id that ends each document, and is trained: a model must learn where a completion ends.
    """

    def __init__(self, encoder: TextEncoder, begin: Sequence[int], end: int) -> None:
        self._encoder = encoder
        self._begin = list(begin)
        self._end = end

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], Ints]:
        """Encode records as texts, without the tokens that begin and end a document.

        Raises:
            UnencodableTextError: A text cannot be encoded.
        """
        return self._encoder.encode([joined(text) for text in texts])

    def encode_masked(self, texts: Sequence[str]) -> tuple[NDArray[Any], Ints, Bools]:
        """Encode records.

        Returns:
            The ids of all records, each with the tokens that begin and end a document; the number of ids of each; and
            for each id whether it is trained.

        Raises:
            UnencodableTextError: A text cannot be encoded.
        """
        records = [json.loads(text) for text in texts]
        ids, lengths = self._encoder.encode([record["prompt"] + record["completion"] for record in records])
        prompts, prompt_lengths = self._encoder.encode([record["prompt"] for record in records])
        parts: list[NDArray[Any]] = []
        masks: list[Bools] = []
        start = prompt_start = 0
        for length, prompt_length in zip(lengths.tolist(), prompt_lengths.tolist(), strict=True):
            document = ids[start : start + length]
            prompt = prompts[prompt_start : prompt_start + prompt_length]
            start = start + length
            prompt_start = prompt_start + prompt_length
            first = len(self._begin) + _common(document, prompt)
            whole = np.concatenate([self._begin, document, [self._end]]).astype(ids.dtype)
            parts.append(whole)
            masks.append(np.arange(len(whole)) >= first)
        return np.concatenate(parts), lengths + len(self._begin) + 1, np.concatenate(masks)


def joined(text: str) -> str:
    """Return the text of a record, as it is trained on."""
    record = json.loads(text)
    return str(record["prompt"] + record["completion"])


def _common(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Return the number of ids with which both begin."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
