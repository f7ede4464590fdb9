"""What comes along with a vocabulary that is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.data.preparing.prepare import prepare
from headway.data.store import TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from support import write_config, write_corpus

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def _given(corpus: Path, folder: Path) -> Path:
    """The corpus's tokenizer, as a checkpoint of a chat model has it."""
    shutil.copytree(corpus / "store/tokenizer", folder)
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    last = max(spec["model"]["vocab"].values())
    for number, text in enumerate(("<s>", "<pad>", "<|user|>"), last + 1):
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": number, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def _prepared(tmp_path: Path, given: Path, store: str) -> TokenStore:
    data = {"store": str(tmp_path / store), "tokenizer": {"path": str(given)}}
    prepare(load_config(write_config(tmp_path, data=data)).data, workers=1)
    return TokenStore.open(tmp_path / store)


def test_what_belongs_to_a_given_tokenizer_comes_along(corpus: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_corpus(tmp_path)
    given = _given(corpus, tmp_path / "given")
    bare = _prepared(tmp_path, given, "bare")
    settings: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "auto_map": {"AutoTokenizer": ["code.Own", None]},
        "bos_token": {"content": "<s>"},
        "pad_token": None,
        "unk_token": "<not in the vocabulary>",
        "eos_token": bare.manifest["tokenizer"]["end_of_text"],
        "additional_special_tokens": ["<|user|>", "<neither this>"],
        "model_max_length": 4096,
    }
    (given / "tokenizer_config.json").write_text(json.dumps(settings))
    (given / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    (given / "chat_template.jinja").write_text(TEMPLATE)
    store = _prepared(tmp_path, given, "store")
    assert (store.fingerprint, store.tokenizer_fingerprint) == (bare.fingerprint, bare.tokenizer_fingerprint)
    config = json.loads((store.tokenizer_folder / "tokenizer_config.json").read_text())
    assert config == {
        **json.loads((bare.tokenizer_folder / "tokenizer_config.json").read_text()),
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<|user|>"],
        "model_max_length": 4096,
        "chat_template": TEMPLATE,
    }
    loaded = transformers.AutoTokenizer.from_pretrained(store.tokenizer_folder)
    ours = Tokenizer.load(store.tokenizer_folder)
    assert len(loaded) == ours.vocab_size and loaded.bos_token == "<s>" and loaded.model_max_length == 4096
    assert loaded("red stone")["input_ids"] == ours.encode_batch(["red stone"])[0]
    assert loaded.apply_chat_template([{"role": "user", "content": "red"}], tokenize=False) == "red"
