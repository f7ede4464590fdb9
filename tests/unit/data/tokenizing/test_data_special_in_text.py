"""A text that spells out a special token is text, whatever a model's own pieces are."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import DataError
from headway.data.tokenizing.encoders import ENCODERS, REFERENCE, choose_encoder, open_encoder
from headway.data.tokenizing.settings_files import TokenizerSettings
from headway.data.tokenizing.special import BYTES, SpecialInText, special_in_text
from headway.data.tokenizing.tokenizer import Tokenizer

END = "<|endoftext|>"


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
SPLIT = {"type": "WhitespaceSplit"}


def of_model(
    model: dict[str, Any], end: str, pre: dict[str, Any] | None = SPLIT, named: tuple[str, ...] = (), **flags: bool
) -> Tokenizer:
    vocab = model["vocab"]
    ids = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    added = [{"id": ids[end], "content": end, "special": True, **FLAGS, **flags}]
    spec = {"version": "1.0", "added_tokens": added, "pre_tokenizer": pre, "model": model}
    beside = TokenizerSettings(Path(), {f"{number}_token": token for number, token in enumerate(named)})
    return Tokenizer(json.dumps(spec).encode(), "here", end, beside)


def of_words(kind: str, end: str = "</s>", pre: dict[str, Any] | None = None) -> Tokenizer:
    model: dict[str, Any] = {"type": kind, "vocab": {"<unk>": 0, end: 1, "a": 2, "b": 3}, "unk_token": "<unk>"}
    if kind == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return of_model(model, end, pre or SPLIT)


def of_merges(end: str, merges: list[str], **model: Any) -> Tokenizer:
    """Letters, their merges, and the end of a text, which may be one of these."""
    made = (merge.replace(" ", "") for merge in merges)
    vocab = {token: n for n, token in enumerate(dict.fromkeys([*"abcdenost<>", *made, end]))}
    return of_model({"type": "BPE", "vocab": vocab, "merges": merges, **model}, end)


def of_ranks(folder: Path, end: str, pattern: str) -> Tokenizer:
    """A .tiktoken file of the 256 bytes alone."""
    lines = [base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256)]
    (folder / "x.tiktoken").write_bytes(b"".join(lines))
    config = {"pat_str": pattern, "eos_token": end, "added_tokens_decoder": {"256": {"content": end, "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder / "x.tiktoken")


def encode(tokenizer: Tokenizer, text: str, asked: bool = False) -> list[int]:
    ids: list[int] = tokenizer.encode_arrays([text], special_tokens_in_text=asked)[0].tolist()
    return ids


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece"])
def test_a_special_token_among_a_models_words_is_unknown_in_a_text(kind: str) -> None:
    tokenizer = of_words(kind)
    assert encode(tokenizer, "a </s> b") == [2, 0, 3]
    assert encode(tokenizer, "a </s> b", asked=True) == [2, 1, 3]
    assert tokenizer.decode([2, 1, 3], skip_special_tokens=False) == "a </s> b"
    assert tokenizer.decode([2, 1, 3]) == "a b"


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(
    ("end", "pattern", "text"),
    [(END, r"\S+|\s+", f"a {END} b"), ("EOS", "gpt2", "the EOS.EOS"), ("<|EOS", "cl100k", "(<|EOS <EOS")],
)
def test_a_special_token_that_is_a_word_of_a_rank_file_is_bytes_in_a_text(
    tmp_path: Path, encoder: str, end: str, pattern: str, text: str
) -> None:
    if encoder != REFERENCE:
        pytest.importorskip(encoder)
    tokenizer = of_ranks(tmp_path, end, pattern)
    ids, _ = open_encoder(encoder, tokenizer).encode([text])
    assert ids.tolist() == list(text.encode())
    ids, _ = open_encoder(encoder, tokenizer, special_tokens_in_text=True).encode([text])
    assert 256 in ids.tolist()
    assert tokenizer.decode([97, 256], skip_special_tokens=False) == "a" + end
    assert choose_encoder(tokenizer, encoder, [text]) == encoder


def test_a_special_token_that_merges_make_is_its_parts_in_a_text() -> None:
    merges = ["< e", "n d", "<e nd", "<end >", "s t"]
    tokenizer = of_merges("<end>", merges)
    vocab = json.loads(tokenizer.content)["model"]["vocab"]
    assert encode(tokenizer, "a<end>st") == [vocab[token] for token in ("a", "<end", ">", "st")]
    assert encode(tokenizer, "a<end>st", asked=True) == [vocab[token] for token in ("a", "<end>", "st")]


@pytest.mark.parametrize(("end", "ignore_merges"), [("st", False), ("st", True), ("a", True)])
def test_a_special_token_that_words_are_made_of_is_found_in_them(end: str, ignore_merges: bool) -> None:
    """Hidden, it would take every word apart that has it within."""
    tokenizer = of_merges(end, ["s t", "st a"], ignore_merges=ignore_merges)
    assert not tokenizer.special_in_text.hidden
    assert tokenizer.unavoidable == {tokenizer.end_of_text_id: end}
    assert tokenizer.decode(encode(tokenizer, "sta"), skip_special_tokens=False) == "sta"
    assert len(encode(tokenizer, "sta")) == 1


@pytest.mark.parametrize(
    "pre", [{"type": "Whitespace"}, {"type": "BertPreTokenizer"}, {"type": "ByteLevel", "use_regex": True}]
)
def test_where_no_word_is_a_special_token_the_file_is_used_as_it_is(pre: dict[str, Any]) -> None:
    """Stores that were made with it need not be made anew."""
    tokenizer = of_words("WordLevel", pre={"add_prefix_space": False, "trim_offsets": True} | pre)
    assert tokenizer.content_for(special_tokens_in_text=False) is tokenizer.content
    assert 1 not in encode(tokenizer, "a </s> b</s>")


def test_published_patterns_part_the_usual_names(tmp_path: Path) -> None:
    for pattern in ("gpt2", "cl100k", "qwen2", "o200k", "tekken"):
        tokenizer = of_ranks(tmp_path, END, pattern)
        assert not tokenizer.special_in_text.hidden
        assert 256 not in encode(tokenizer, f"{END} a{END}b {END[1:]} 's{END}\n{END}")


def test_the_unknown_token_keeps_its_name() -> None:
    tokenizer = of_words("WordLevel", end="<unk>")
    assert encode(tokenizer, "a zebra") == [2, 1]


def test_a_hidden_end_of_a_text_that_is_not_marked_special() -> None:
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1, "a": 2}, "unk_token": "<unk>"}
    tokenizer = of_model(model, "</s>", special=False)
    assert encode(tokenizer, "a </s> a") == [2, 0, 2]


def of_letters(byte_fallback: bool, merges: list[str] = [], **model: Any) -> Tokenizer:  # noqa: B006
    """Letters, bytes if wanted, and "</s>"; as SentencePiece's are laid out."""
    made = [merge.replace(" ", "") for merge in merges]
    names = dict.fromkeys(["<unk>", "</s>", *(BYTES if byte_fallback else ()), *"▁abnuks<0x41>/", *made])
    vocab = {token: number for number, token in enumerate(names)}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", **model}
    return of_model(model | {"byte_fallback": byte_fallback, "fuse_unk": True}, "</s>", None)


def of_pieces(
    pieces: str, byte_fallback: bool = True, more: tuple[str, ...] = (), score: float = 0.0, pre: Any = None
) -> Tokenizer:
    """A Unigram model: some letters, pieces, and what is not for text with a likely score or with one that bans."""
    names = dict.fromkeys(["<unk>", "</s>", *(BYTES if byte_fallback else ())])
    vocab = [[name, score] for name in names]
    vocab += [[piece, -float(number)] for number, piece in enumerate((*pieces, *more), 3)]
    return of_model({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": byte_fallback}, "</s>", pre)


VOCABULARIES = {
    "words": of_words("WordLevel"),
    "words with spaces": of_words("WordLevel", pre={"type": "Digits", "individual_digits": False}),
    "word pieces": of_words("WordPiece"),
    "word pieces with spaces": of_words("WordPiece", pre={"type": "Digits", "individual_digits": False}),
    "merges": of_letters(False, ["< u", "<u n", "<un k", "<unk >", "< 0"]),
    "merges to the end": of_letters(False, ["< /", "s >", "</ s>"]),
    "bytes by merges": of_letters(True, ["< 0", "<0 x", "4 1", "41 >", "<0x 41>"]),
    "bytes as words": of_letters(True, ["< 0"], ignore_merges=True),
    "likely pieces": of_pieces("ab<"),
    "banned pieces": of_pieces("ab", score=-1e5),
    "no bytes": of_pieces("ab", byte_fallback=False, score=-1e5),
    "pieces across": of_pieces("ab0x41>", more=("<0", "0x", "x4", "41", "1>")),
}
SPELLED = ["</s>", "<unk>", "<0x41>", "<0x0A>", "\U0010ffff unused 1", "\U0010ffff", *"ab <0x41>/s漢\n▁"]


@pytest.mark.parametrize("name", VOCABULARIES)
@given(st.lists(st.sampled_from(SPELLED), max_size=8).map("".join))
@settings(max_examples=60, deadline=None)
def test_no_text_becomes_a_special_token(name: str, text: str) -> None:
    tokenizer = VOCABULARIES[name]
    assert not tokenizer.forbidden_ids.intersection(encode(tokenizer, text))
    assert not tokenizer.unavoidable


@pytest.mark.parametrize(
    "name", ["bytes by merges", "bytes as words", "likely pieces", "banned pieces", "pieces across"]
)
def test_the_name_of_a_byte_is_text_in_a_text(name: str) -> None:
    tokenizer = VOCABULARIES[name]
    vocab = json.loads(tokenizer.content)["model"]["vocab"]
    tokens = {number: token for token, number in vocab.items()} if isinstance(vocab, dict) else [v[0] for v in vocab]
    for text in ("<0x41>", "a<0x41>b", "<<0x41>0x41>", "<0x0A>a", "<0x0A><0x0A>", "a\nb<0x62>"):
        found = [tokens[number] for number in encode(tokenizer, text)]
        spelled = b"".join(bytes.fromhex(token[3:5]) if token in BYTES else token.encode() for token in found)
        assert spelled.decode() == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_sentencepiece_ids_of_texts_that_spell_out_what_is_unknown(
    tmp_path: Path, kind: str, byte_fallback: bool
) -> None:
    """The model knows neither "<" nor "/", and of `<0x41>` the letter alone."""
    library = pytest.importorskip("sentencepiece")
    draw = random.Random(3)
    words = ["".join(draw.choices("asxu", k=draw.randint(1, 6))) for _ in range(50)]
    (tmp_path / "corpus.txt").write_text("\n".join(" ".join(draw.choices(words, k=10)) for _ in range(200)))
    options = {"byte_fallback": byte_fallback, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
    options |= {"model_type": kind, "vocab_size": 40 + 256 * byte_fallback, "control_symbols": ["xx", "u"]}
    library.SentencePieceTrainer.train(input="corpus.txt", model_prefix="m", **options)
    tokenizer, reference = Tokenizer.load(tmp_path / "m.model"), library.SentencePieceProcessor(model_file="m.model")
    spelled = ["</s>", "<s>", "<unk>", "<0x41>", "<0x3C>", "xx", "u", "as", "漢", "é", "<", " ", " ", "\U0010ffff"]
    texts = ["".join(draw.choices(spelled, k=draw.randint(1, 8))) for _ in range(1000)]
    assert tokenizer.encode_batch(texts) == reference.encode(texts)
    assert choose_encoder(tokenizer, "auto", texts) in ENCODERS
    assert choose_encoder(tokenizer, REFERENCE, texts) == REFERENCE


def test_a_special_letter_is_unknown_or_bytes_in_a_text() -> None:
    model = {"type": "BPE", "vocab": {"<unk>": 0, "\n": 1, "a": 2}, "merges": [], "unk_token": "<unk>"}
    assert encode(of_model(model, "\n", None), "a\na") == [2, 0, 2]
    vocab = {"\n": 256, "a": 257} | {name: byte for byte, name in enumerate(BYTES)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    assert encode(of_model(model, "\n", None), "a\na") == [257, 10, 257]


def test_merges_with_a_prefix_lead_to_no_special_token() -> None:
    vocab = {"a": 0, "##b": 1, "ab": 2, "##c": 3, "abc": 4}
    model = {"type": "BPE", "vocab": vocab, "merges": ["a ##b", "ab ##c"], "continuing_subword_prefix": "##"}
    assert encode(of_model(model, "abc"), "ab abc") == [2, 2, 3]


def test_an_end_of_text_that_is_the_unknown_token_cannot_be_avoided(tmp_path: Path) -> None:
    for kind in ("WordLevel", "WordPiece"):
        assert of_words(kind, end="<unk>").unavoidable.keys() == {of_words(kind, end="<unk>").end_of_text_id}
    pieces = [["</s>", 0.0], ["a", -1.0]]
    assert of_model({"type": "Unigram", "unk_id": 0, "vocab": pieces}, "</s>", None).unavoidable == {0: "</s>"}
    assert not of_ranks(tmp_path, END, "gpt2").unavoidable


def test_tokens_with_another_part_to_play_are_special_too() -> None:
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1, "<pad>": 2, "a": 3}, "unk_token": "<unk>"}
    tokenizer = of_model(model, "</s>", named=("<pad>", "<not there>"))
    assert encode(tokenizer, "a <pad> </s>") == [3, 0, 0]
    assert encode(tokenizer, "a<pad>a</s>", asked=True) == [3, 2, 3, 1]
    assert tokenizer.special_tokens == {"</s>": 1, "<pad>": 2}
    assert tokenizer.decode([3, 2, 3, 1]) == "a a"


@pytest.mark.parametrize("encoder", [*ENCODERS, "auto"])
@pytest.mark.parametrize("name", ["merges to the end", "likely pieces", "bytes by merges"])
def test_an_encoder_that_makes_special_tokens_of_text_is_refused(
    encoder: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encoder not in (REFERENCE, "auto"):
        pytest.importorskip(encoder)
    monkeypatch.setattr("headway.data.tokenizing.encoders._last", None)
    monkeypatch.setattr("headway.data.tokenizing.tokenizer.special_in_text", _only_looked_at)
    tokenizer = Tokenizer(VOCABULARIES[name].content, "here")
    with pytest.raises(DataError, match=r"encoded as the special token|fastokens cannot|fastokens does not|gigatoken"):
        choose_encoder(tokenizer, encoder, [])


def _only_looked_at(*arguments: Any) -> SpecialInText:
    """What is known of a vocabulary, without what would be done about it."""
    ways = special_in_text(*arguments)
    ways.hidden, ways.unmerged, ways.cut = {}, frozenset(), None
    return ways


def test_stores_are_made_anew_only_where_some_ids_are_others() -> None:
    def marks(tokenizer: Tokenizer, asked: bool = False) -> list[str]:
        return tokenizer.special_in_text.key_marks(asked)

    everything = "▁ab</s>unk0123456789ABCDEFx"
    pre = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    assert marks(of_pieces(everything, score=-1e5, pre=pre)) == []  # the scores did what they were to do
    assert marks(of_pieces("▁ab", score=-1e5, pre=pre)) == ["no special tokens"]
    assert marks(of_words("WordLevel")) == ["words as text"]
    assert marks(of_words("WordLevel"), asked=True) == []
    assert marks(of_merges("<end>", ["< e", "n d", "<e nd", "<end >"])) == ["words as text"]
    assert marks(of_letters(True, ["a b"])) == []
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "<pad>": 1, "<unk>": 2}, "unk_token": "<unk>"}
    assert marks(of_model(model, "</s>", named=("<pad>",))) == ["words as text", "no special tokens", "<pad>"]
    assert marks(of_model(model, "</s>", named=("<pad>",)), asked=True) == ["<pad>"]
    assert marks(VOCABULARIES["bytes by merges"]) == ["no special tokens"]
