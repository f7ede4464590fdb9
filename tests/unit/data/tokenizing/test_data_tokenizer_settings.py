"""What files beside a tokenizer say is honoured as transformers' AutoTokenizer does, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import DataError
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.preparing.prepare import prepare

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEXT = "a <s> a<x>b [x] </s> <pad> <end>"


def added(content: str, **flags: bool) -> dict[str, Any]:
    return {**FLAGS, "content": content, **flags}


def folder_of(folder: Path, files: dict[str, Any], *tokens: dict[str, Any]) -> Path:
    """A tokenizer of a few words and `<s>`, with files beside it."""
    vocab = {"<unk>": 0, "a": 1, "b": 2, "<pad>": 3, "</s>": 4, "<s>": 5}
    tokens = ({**added("<s>"), "id": 5}, *({**token, "id": 6 + number} for number, token in enumerate(tokens)))
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    spec = {"version": "1.0", "added_tokens": tokens, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    for name, value in files.items():
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


HONOURED = {
    "nothing": {},
    "eos": {CONFIG: {"eos_token": "</s>"}},
    "eos as an object": {CONFIG: {"eos_token": {"__type": "AddedToken", **added("</s>")}}},
    "eos in added_tokens_decoder only": {
        CONFIG: {"eos_token": "<end>", "added_tokens_decoder": {"5": added("<s>"), "6": added("<end>")}}
    },
    "eos in special_tokens_map.json only": {MAP: {"eos_token": "<s>"}},
    "eos in special_tokens_map.json, an object": {MAP: {"eos_token": {**added("<s>")}}},
    "special_tokens_map.json goes before": {CONFIG: {"eos_token": "</s>"}, MAP: {"eos_token": "<s>"}},
    "added_tokens_decoder goes before": {
        CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {"5": added("<s>")}},
        MAP: {"eos_token": "<s>"},
    },
    "an added token": {CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {"6": added("<x>", special=False)}}},
    "a word that was added": {CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {"3": added("<pad>")}}},
    "flags": {CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {"5": added("<s>", special=False)}}},
    "flags that are not given": {CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {"6": {"content": "<x>"}}}},
    "added_tokens.json": {MAP: {"eos_token": "</s>"}, ADDED: {"<x>": 6, "<end>": 7}},
    "added_tokens.json, special": {MAP: {"eos_token": "<end>"}, ADDED: {"<s>": 5, "<end>": 6}},
    "names of tokens": {CONFIG: {"eos_token": "</s>", "pad_token": "<pad>", "image_token": "<s>"}},
    "lists": {CONFIG: {"eos_token": "</s>", "extra_special_tokens": ["<pad>"]}},
    "a dict": {CONFIG: {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<pad>"}}},
}


@pytest.mark.parametrize("name", HONOURED)
def test_settings_are_honoured_as_transformers_does(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path / "given", HONOURED[name])
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token in (None, ours.end_of_text)
    assert ours.vocab_size == len(theirs)
    special = {str(token) for token in theirs.added_tokens_decoder.values() if token.special}
    assert set(ours.special_tokens) == {ours.end_of_text, *special}
    for text in (TEXT, "<s><s>", "<x> <end>b"):
        (ids,) = ours.encode_arrays([text], special_tokens_in_text=True)
        if theirs.eos_token:  # or it does not know what ends a text
            assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert not ours.forbidden_ids.intersection(ours.encode_batch([text])[0])
    ours.save(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.get_vocab() == theirs.get_vocab() and again.eos_token == ours.end_of_text
    assert Tokenizer.load(tmp_path / "saved").fingerprint == ours.fingerprint


def test_a_file_that_lacks_nothing_is_left_as_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, HONOURED["names of tokens"])
    assert Tokenizer.load(folder).content == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (
            {CONFIG: {"eos_token": "</S>"}},
            r"the end-of-text token '</S>' is not in the vocabulary; did you mean '</s>'\?",
        ),
        ({MAP: {"eos_token": "<|endoftxt|>"}}, "'<|endoftxt|>' is not in the vocabulary"),
        ({CONFIG: '{"eos_token": '}, "the file is not JSON"),
        ({CONFIG: "[]"}, "the file is not a JSON object"),
        ({MAP: "nonsense"}, "the file is not JSON"),
        ({ADDED: '{"<x>": 6, "<x>": 7}'}, "gives the key '<x>' twice"),
        ({CONFIG: {"eos_token": 5}}, "eos_token is not a token: 5"),
        ({CONFIG: {"pad_token": ["<pad>"]}}, "pad_token is not a token"),
        ({CONFIG: {"added_tokens_decoder": {"9": added("<end>")}}}, "would get the id 6, but the file says 9"),
        ({CONFIG: {"added_tokens_decoder": {"2": added("</s>")}}}, "'</s>' has the id 4, but the file says 2"),
        ({CONFIG: {"added_tokens_decoder": {"3": added("<end>")}}}, "would get the id 6, but the file says 3"),
        (
            {CONFIG: {"added_tokens_decoder": {"6": added("<x>"), "7": added("<x>")}}},
            "'<x>' has the id 6, but the file says 7",
        ),
        ({CONFIG: {"added_tokens_decoder": {"6": "<x>"}}}, "added_tokens_decoder does not map ids to tokens"),
        ({CONFIG: {"added_tokens_decoder": [added("<x>")]}}, "added_tokens_decoder does not map ids to tokens"),
        ({ADDED: {"<x>": 16}}, "would get the id 6, but the file says 16"),
        ({ADDED: {"<x>": 6, "<y>": 6}}, "do not have distinct integer ids"),
        ({ADDED: {"<x>": "6"}}, "do not have distinct integer ids"),
        (
            {CONFIG: {"additional_special_tokens": ["<x>"]}},
            "additional_special_tokens names '<x>', which is not a token",
        ),
        ({CONFIG: {"extra_special_tokens": {"image_token": "<x>"}}}, "extra_special_tokens names '<x>'"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, files: dict[str, Any], what: str) -> None:
    folder = folder_of(tmp_path, {CONFIG: {"eos_token": "</s>"}, **files})
    with pytest.raises(DataError, match=what) as caught:
        Tokenizer.load(folder)
    assert str(tmp_path) in str(caught.value.where) and caught.value.fix


def test_a_fifo_in_place_of_settings_is_refused(tmp_path: Path) -> None:
    import os

    folder = folder_of(tmp_path, {})
    os.mkfifo(folder / CONFIG)
    with pytest.raises(DataError, match="not a regular file"):
        Tokenizer.load(folder)


def test_ids_that_two_tokens_share_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {})
    spec = json.loads((folder / "tokenizer.json").read_text())
    for change, what in (
        ({"model": {**spec["model"], "vocab": {**spec["model"]["vocab"], "b": 1}}}, "'a' and 'b'"),
        ({"added_tokens": [{**added("<x>"), "id": 2}]}, "'b' and '<x>'"),
        ({"model": {**spec["model"], "vocab": {**spec["model"]["vocab"], "b": 2.5}}}, "not a non-negative integer"),
        ({"model": {**spec["model"], "vocab": {**spec["model"]["vocab"], "b": -2}}}, "not a non-negative integer"),
    ):
        with pytest.raises(DataError, match=what):
            Tokenizer(json.dumps({**spec, **change}).encode(), "here", "</s>")


def test_names_without_a_token_are_told_and_left_out(
    tmp_path: Path, config: Callable[..., Any], jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files = {CONFIG: {"eos_token": "</s>", "bos_token": "</s>", "pad_token": "[PAD]", "image_token": "<s>"}}
    given = folder_of(tmp_path / "given", files)
    data = config(jsonl(tmp_path / "a.jsonl", ["a b", "b a b"]), tokenizer={"path": given}, validation=0)
    prepare(data, workers=1)
    assert "left out: pad_token ('[PAD]')" in capsys.readouterr().err
    saved = json.loads((data.store / "tokenizer" / CONFIG).read_text())
    assert {key: value for key, value in saved.items() if key.endswith("_token")} == {
        "eos_token": "</s>",
        "bos_token": "</s>",
        "image_token": "<s>",
    }
    (given / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="chat template cannot be read"):
        prepare(data, workers=1)
