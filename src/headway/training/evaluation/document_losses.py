"""The loss of a trained model on each document by itself, which is what two models can be compared by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from headway.core.types import IGNORE_TARGET
from headway.models.decoder import Decoder
from headway.training.evaluation.inference import TrainedModel, explain_full_gpu
from headway.training.setup.precision import autocast

#: Documents whose windows are sorted by length together: memory is bounded, and little of a batch is padding.
_DOCUMENTS_AT_ONCE = 512
#: Positions of a batch, and elements of the logits that exist at a time.
_POSITIONS = 8192
_LOGITS = 2**25


@dataclass(frozen=True)
class Document:
    """One document as a model reads it."""

    ids: NDArray[np.int64]
    """Token ids, (tokens,): what begins a document, its text, and the token that ends it."""
    counted: NDArray[np.bool_] | None = None
    """Whether each token takes part in the loss; all do when None."""


@dataclass(frozen=True)
class DocumentLosses:
    """Losses of documents, in their order."""

    loss: NDArray[np.float64]
    """Summed over each document's tokens, in nats: (documents,)."""
    tokens: NDArray[np.int64]
    """Tokens in that sum: (documents,)."""


@dataclass(frozen=True)
class _Window:
    document: int
    ids: NDArray[np.int64]
    targets: NDArray[np.int64]


@explain_full_gpu()
@torch.no_grad()
def document_losses(
    trained: TrainedModel, documents: Iterable[Document], *, sequence_length: int, precision: str = "fp32"
) -> DocumentLosses:
    """Compute the loss of each document by itself: nothing before its first token is in the context.

    A document without begin-of-text tokens follows the token that ends a text, as in `continue_text`. One that is
    longer than a row is cut into rows, so that each of its tokens is predicted once.

    Args:
        trained: The model.
        documents: What it reads; they are consumed a few hundred at a time.
        sequence_length: Tokens per row.
        precision: `train.precision`.
    """
    begin = len(trained.begin_of_text)
    device = next(trained.model.parameters()).device
    losses: list[NDArray[np.float64]] = []
    tokens: list[NDArray[np.int64]] = []
    stream = iter(documents)
    while block := list(islice(stream, _DOCUMENTS_AT_ONCE)):
        loss = np.zeros(len(block))
        windows = [
            window
            for number, document in enumerate(block)
            for window in _windows(number, document, begin, trained.tokenizer.end_of_text_id, sequence_length)
        ]
        for batch in _batches(windows):
            ids_BT, targets_BT = _padded(batch)
            with autocast(precision, device):
                losses_BT = _token_losses(trained, ids_BT.to(device), targets_BT.to(device))
            sums = losses_BT.double().sum(1).tolist()
            np.add.at(loss, [window.document for window in batch], sums)
        counts = np.zeros(len(block), dtype=np.int64)
        np.add.at(
            counts,
            [window.document for window in windows],
            [np.count_nonzero(window.targets != IGNORE_TARGET) for window in windows],
        )
        losses.append(loss)
        tokens.append(counts)
    return DocumentLosses(np.concatenate(losses), np.concatenate(tokens))


def _windows(number: int, document: Document, begin: int, end_id: int, length: int) -> Iterator[_Window]:
    """Cut a document into rows of at most `length` targets."""
    ids = document.ids.astype(np.int64)
    targets = ids.copy() if document.counted is None else np.where(document.counted, ids, IGNORE_TARGET)
    targets[:begin] = IGNORE_TARGET
    before = np.concatenate([[end_id], ids[:-1]])
    first = min(begin, 1)  # the first of these tokens needs no context
    for start in range(first, len(ids), length):
        yield _Window(number, before[start : start + length], targets[start : start + length])


def _batches(windows: Sequence[_Window]) -> Iterator[list[_Window]]:
    """Group rows of about one length, the longest first, so that too little memory shows at once."""
    batch: list[_Window] = []
    for window in sorted(windows, key=lambda one: -len(one.ids)):
        if batch and (len(batch) + 1) * len(batch[0].ids) > _POSITIONS:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _padded(batch: Sequence[_Window]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets, int64 (rows, longest), with padding after the end, where attention does not look."""
    shape = (len(batch), len(batch[0].ids))
    ids_BT = np.zeros(shape, dtype=np.int64)
    targets_BT = np.full(shape, IGNORE_TARGET, dtype=np.int64)
    for row, window in enumerate(batch):
        ids_BT[row, : len(window.ids)] = window.ids
        targets_BT[row, : len(window.ids)] = window.targets
    return torch.from_numpy(ids_BT), torch.from_numpy(targets_BT)


def _token_losses(trained: TrainedModel, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each target, fp32 (B, T) on the CPU; 0 where there is none."""
    model = trained.model
    vocabulary = trained.tokenizer.vocab_size
    if isinstance(model, Decoder):
        # The logits of a whole batch may be larger than the model.
        x_ND = model.hidden_states(ids_BT).flatten(0, 1)
        rows = max(1, _LOGITS // vocabulary)
        parts = zip(x_ND.split(rows), targets_BT.flatten().split(rows), strict=True)
        losses = [_cross_entropy(model.logits(x_CD), targets_C) for x_CD, targets_C in parts]
    else:
        rows = max(1, _LOGITS // (vocabulary * ids_BT.shape[1]))
        pairs = zip(ids_BT.split(rows), targets_BT.split(rows), strict=True)
        losses = [_cross_entropy(model(ids_RT).flatten(0, 1), targets_RT.flatten()) for ids_RT, targets_RT in pairs]
    return torch.cat(losses).view(ids_BT.shape).cpu()


def _cross_entropy(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_CV.float(), targets_C, ignore_index=IGNORE_TARGET, reduction="none")
