"""A real vocabulary, documents as its ids, and what a store has of them."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.data.store import TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.importing import documents as import_documents
from headway.text.importing import files as import_files
from headway.text.importing.store import ImportReport, import_store, plan_import

Documents = list[list[int]]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Python's own source: modules of all lengths, the longest of 200 kB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text("utf-8") for path in sorted(root.glob("*.py"))[:40] if path.stat().st_size]


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A `tokenizer.json` with 1,000 tokens, `<|endoftext|>` the first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|endoftext|>", "<|begin|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="session")
def ids(texts: list[str], vocabulary: Path) -> Documents:
    """Each text's ids, no end-of-text token among them."""
    return Tokenizer.load(vocabulary).encode_batch(texts)


@pytest.fixture
def ended(ids: Documents) -> list[tuple[int, ...]]:
    """The documents as a store should have them."""
    return [(*document, 0) for document in ids]


@pytest.fixture(params=[(2**21, 2**20), (5000, 1000)], ids=["large blocks", "small blocks"])
def blocks(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading in one block, and in many, with documents that are longer than a block and than what is held."""
    monkeypatch.setattr(import_files, "BLOCK_TOKENS", request.param[0])
    monkeypatch.setattr(import_documents, "DECIDING_TOKENS", request.param[1])


@pytest.fixture
def imported(tmp_path: Path, vocabulary: Path) -> Callable[..., tuple[TokenStore, ImportReport]]:
    """Imports into a new store, which verifies."""

    def run(
        kind: str, *paths: Path | str, tokenizer: Path | None = vocabulary, name: str = "store", **wishes: Any
    ) -> tuple[TokenStore, ImportReport]:
        shard_bytes = wishes.pop("shard_bytes", 20_000)
        plan = plan_import(kind, [str(path) for path in paths], tokenizer=tokenizer, **wishes)
        report = import_store(plan, tmp_path / name, shard_bytes=shard_bytes)
        store = TokenStore.open(tmp_path / name)
        assert store.verify() == []
        assert report.fingerprint == store.fingerprint
        return store, report

    return run


def documents_of(store: TokenStore, split: str, source: str | None = None) -> list[tuple[int, ...]]:
    """A split's documents, in order."""
    found = []
    for name in [source] if source else store.sources(split):
        bounds = store.documents(split, name).astype(int).tolist()
        flat = store.read(split, name, 0, bounds[-1]).tolist()
        found += [tuple(flat[start:end]) for start, end in pairwise(bounds)]
    return found


@pytest.fixture(name="documents_of")
def _documents_of() -> Callable[..., list[tuple[int, ...]]]:
    return documents_of
