"""What stands before a text: read from a template, and written into one, as `tokenizers` and transformers see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError, DataError
from headway.data.tokenizing.begin_of_text import is_same_but_for_template, tokens_before, with_tokens_before
from headway.data.tokenizing.tokenizer import Tokenizer

IDS = {"<unk>": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4, "[g]": 5}


def template(single: str, pair: str) -> dict[str, Any]:
    from tokenizers import processors

    special = [(token, number) for token, number in IDS.items() if len(token) > 1]
    made = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return json.loads(made.__getstate__())  # type: ignore[no-any-return]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BERT = {"type": "BertProcessing", "sep": ["</s>", 4], "cls": ["<s>", 3]}
ROBERTA = {**BERT, "type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}
LLAMA = ("<s>:0 $A:0", "<s>:0 $A:0 <s>:1 $B:1")
PROCESSORS: dict[str, tuple[Any, list[int]]] = {
    "none": (None, []),
    "bytes": (BYTES, []),
    "llama": (LLAMA, [3]),
    "behind": (("$A </s>", "$A </s> $B:1 </s>:1"), []),
    "both": (("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"), [3]),
    "two": (("[g] <s> $A", "[g] <s> $A $B:1"), [5, 3]),
    "bert": (BERT, [3]),
    "roberta": (ROBERTA, [3]),
    "sequence": ([BYTES, LLAMA], [3]),
    "sequence, the other way": ([LLAMA, BYTES], [3]),
    "sequence, behind": ([("$A </s>", "$A </s> $B:1 </s>:1"), BYTES], []),
}


def content_of(processor: Any) -> bytes:
    def made(part: Any) -> Any:
        if isinstance(part, list):
            return {"type": "Sequence", "processors": [made(step) for step in part]}
        return template(*part) if isinstance(part, tuple) else part

    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": IDS[t], "content": t, "special": True, **flags} for t in ("<s>", "</s>", "[g]")]
    model = {"type": "WordLevel", "vocab": IDS, "unk_token": "<unk>"}
    spec = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    return json.dumps({**spec, "post_processor": made(processor)}).encode()


def ids_of(content: bytes, *texts: str) -> list[int]:
    from tokenizers import Tokenizer as Library

    return Library.from_str(content.decode()).encode(*texts).ids  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_a_template_puts_before_a_text(name: str) -> None:
    processor, expected = PROCESSORS[name]
    content = content_of(processor)
    ids = ids_of(content, "a b")
    assert ids[: ids.index(1)] == expected == tokens_before(json.loads(content))


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("tokens", [{}, {"<s>": 3}, {"[g]": 5, "<s>": 3}])
def test_a_template_puts_before_a_text_what_it_is_told_to(name: str, tokens: dict[str, int]) -> None:
    processor, before = PROCESSORS[name]
    content = content_of(processor)
    other = with_tokens_before(content, tokens)
    expected = [*tokens.values(), *ids_of(content, "a b")[len(before) :]]
    assert ids_of(other, "a b") == expected
    assert ids_of(other, "a b", "b")[: len(expected)] == expected
    if not tokens:
        assert not {3, 5}.intersection(ids_of(other, "a", "b"))
    assert tokens_before(json.loads(other)) == list(tokens.values())
    assert is_same_but_for_template(content, other)
    assert (other is content) == (list(tokens.values()) == before)
    assert with_tokens_before(other, tokens) is other


def test_what_was_added_is_gone_again() -> None:
    for name in ("none", "bytes", "behind"):
        content = content_of(PROCESSORS[name][0])
        there_and_back = with_tokens_before(with_tokens_before(content, {"<s>": 3}), {})
        assert json.loads(there_and_back)["post_processor"] == json.loads(content)["post_processor"]


def folder_of(folder: Path, processor: Any, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content_of(processor))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    return folder


@pytest.mark.parametrize(
    ("processor", "settings", "auto", "always"),
    [
        (LLAMA, {}, ["<s>"], ["<s>"]),
        (LLAMA, {"bos_token": "[g]", "add_bos_token": False}, ["<s>"], ["<s>"]),
        (PROCESSORS["two"][0], {}, ["[g]", "<s>"], ["[g]", "<s>"]),
        (None, {"bos_token": "<s>"}, [], ["<s>"]),
        (None, {"bos_token": "<s>", "add_bos_token": True}, [], ["<s>"]),
        (None, {}, [], None),
        (None, {"bos_token": "<not there>"}, [], None),
    ],
)
def test_what_documents_begin_with(
    tmp_path: Path, processor: Any, settings: dict[str, Any], auto: list[str], always: list[str] | None
) -> None:
    """`auto` is what transformers does."""
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path / "given", processor, **settings)
    tokenizer, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert list(tokenizer.begin_of_text()) == auto == theirs.convert_ids_to_tokens(theirs("a")["input_ids"])[:-1]
    assert tokenizer.begin_of_text("never") == {}
    if always is None:
        with pytest.raises(ConfigError, match="no begin-of-text token"):
            tokenizer.begin_of_text("always")
        return
    settings.pop("add_bos_token", None)  # which is the store's to say
    begin = tokenizer.begin_of_text("always")
    assert list(begin) == always
    tokenizer.save(tmp_path / "saved", settings, begin)
    assert Tokenizer.load(tmp_path / "saved").saved_begin_of_text() == begin
    tokenizer.save(tmp_path / "saved", settings, {})
    assert Tokenizer.load(tmp_path / "saved").saved_begin_of_text() == {}


def test_formats_without_a_template_begin_as_the_settings_say(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus.txt").write_text("some words and more words\n" * 20)
    options = {"vocab_size": 30, "hard_vocab_limit": False, "minloglevel": 2}
    library.SentencePieceTrainer.train(input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "m"), **options)
    assert Tokenizer.load(tmp_path / "m.model").begin_of_text() == {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    tokenizer = Tokenizer.load(tmp_path / "m.model")
    assert tokenizer.begin_of_text() == {"<s>": 1}
    tokenizer.save(tmp_path / "saved", {"bos_token": "<s>"}, tokenizer.begin_of_text())
    assert Tokenizer.load(tmp_path / "saved").saved_begin_of_text() == {"<s>": 1}


def test_a_template_with_a_token_that_is_none_is_refused() -> None:
    spec = json.loads(content_of(LLAMA))
    spec["post_processor"]["special_tokens"]["<s>"]["ids"] = [77]
    with pytest.raises(DataError, match="a token before texts that it does not have: 77"):
        Tokenizer(json.dumps(spec).encode(), "here")
