"""The loss of each document by itself, beside the loss of a row that holds nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.config import ModelConfig
from headway.core.types import IGNORE_TARGET
from headway.data.store import TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.training.evaluation import document_losses as module
from headway.training.evaluation.document_losses import Document, document_losses
from headway.training.evaluation.inference import TrainedModel


@pytest.fixture(scope="module")
def store(corpus: Path) -> TokenStore:
    return TokenStore.open(corpus / "store")


@pytest.fixture(scope="module")
def trained(store: TokenStore) -> TrainedModel:
    shape = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, init_std=0.5)
    model = build_model(shape, vocab_size=store.vocab_size, seed=1).eval()
    tokenizer = Tokenizer.load(store.tokenizer_folder)
    return TrainedModel(model, tokenizer, store.tokenizer_folder, {}, None, None)


def documents_of(store: TokenStore) -> list[np.ndarray]:
    source = store.sources("train")[0]
    starts = store.documents("train", source).astype(np.int64)
    return [store.read("train", source, int(a), int(b - a)).astype(np.int64) for a, b in itertools.pairwise(starts)]


@torch.no_grad()
def alone(model: Decoder, ids: np.ndarray, targets: np.ndarray) -> float:
    """The model's own summed loss of one row."""
    return float(model(torch.from_numpy(ids)[None], torch.from_numpy(targets)[None]))


def test_each_document_has_the_loss_of_a_row_of_its_own(store: TokenStore, trained: TrainedModel) -> None:
    documents = [*documents_of(store)[:20], np.array([store.end_of_text_id])]
    found = document_losses(trained, map(Document, documents), sequence_length=2000)
    for ids, loss, tokens in zip(documents, found.loss, found.tokens, strict=True):
        before = np.concatenate([[store.end_of_text_id], ids[:-1]])
        assert loss == pytest.approx(alone(trained.model, before, ids), rel=1e-5)
        assert tokens == len(ids)


def test_a_long_document_is_cut_into_rows(store: TokenStore, trained: TrainedModel) -> None:
    ids = documents_of(store)[0]
    found = document_losses(trained, [Document(ids)], sequence_length=50)
    before = np.concatenate([[store.end_of_text_id], ids[:-1]])
    rows = range(0, len(ids), 50)
    expected = sum(alone(trained.model, before[row : row + 50], ids[row : row + 50]) for row in rows)
    assert found.loss[0] == pytest.approx(expected, rel=1e-5) and found.tokens[0] == len(ids)


def test_begin_of_text_tokens_are_context_only(store: TokenStore, trained: TrainedModel) -> None:
    begins = TrainedModel(trained.model, trained.tokenizer, trained.tokenizer_folder, {"<a>": 5, "<b>": 7}, None, None)
    ids = np.concatenate([[5, 7], documents_of(store)[0]])
    found = document_losses(begins, [Document(ids)], sequence_length=2000)
    targets = ids[1:].copy()
    targets[0] = IGNORE_TARGET
    assert found.loss[0] == pytest.approx(alone(trained.model, ids[:-1], targets), rel=1e-5)
    assert found.tokens[0] == len(ids) - 2


def test_tokens_that_a_mask_leaves_out_do_not_count(store: TokenStore, trained: TrainedModel) -> None:
    ids = documents_of(store)[0]
    counted = np.arange(len(ids)) % 3 == 0
    found = document_losses(trained, [Document(ids, counted)], sequence_length=2000)
    before = np.concatenate([[store.end_of_text_id], ids[:-1]])
    expected = alone(trained.model, before, np.where(counted, ids, IGNORE_TARGET))
    assert found.loss[0] == pytest.approx(expected, rel=1e-5) and found.tokens[0] == counted.sum()


def test_blocks_and_batches_change_nothing_but_the_last_bits(
    store: TokenStore, trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Document(ids) for ids in documents_of(store)[:12]]
    whole = document_losses(trained, documents, sequence_length=40)
    for name in ("_DOCUMENTS_AT_ONCE", "_POSITIONS", "_LOGITS"):
        monkeypatch.setattr(module, name, 5)
    small = document_losses(trained, documents, sequence_length=40)
    np.testing.assert_allclose(small.loss, whole.loss, rtol=1e-5)
    assert (small.tokens == whole.tokens).all()


def test_a_model_of_transformers_gives_the_same_losses(
    store: TokenStore, trained: TrainedModel, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from headway.models.build import build_pretrained
    from headway.models.huggingface.export import export_model

    export_model(trained.model, tmp_path / "model", store.tokenizer_folder)
    theirs = build_pretrained(ModelConfig(from_pretrained=tmp_path / "model", implementation="transformers")).eval()
    other = TrainedModel(theirs, trained.tokenizer, store.tokenizer_folder, {}, None, None)
    documents = [Document(ids) for ids in documents_of(store)[:8]]
    mine = document_losses(trained, documents, sequence_length=64)
    found = document_losses(other, documents, sequence_length=64)
    np.testing.assert_allclose(found.loss, mine.loss, rtol=1e-4)
