from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.training.evaluation import inference
from headway.training.evaluation.generation import generate, sample, stream_text

VOCAB = 64


@pytest.fixture
def model() -> Decoder:
    config = ModelConfig(
        dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, max_sequence_length=48, init_std=0.3, dropout=0.5
    )
    return build_model(config, vocab_size=VOCAB, seed=0)


def test_greedy_equals_the_argmax_without_a_cache(model: Decoder) -> None:
    prompt = [3, 1, 4, 1, 5]
    tokens = list(generate(model, prompt, max_new_tokens=30, temperature=0))
    model.eval()
    ids = list(prompt)
    for token in tokens:
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0, -1]
        assert int(logits.argmax()) == token
        ids.append(token)
    assert len(tokens) == 30 and len(set(tokens)) > 1


def test_seed_decides(model: Decoder) -> None:
    state = torch.get_rng_state()
    first = list(generate(model, [1], max_new_tokens=20, seed=7))
    torch.rand(3)
    assert list(generate(model, [1], max_new_tokens=20, seed=7)) == first
    assert list(generate(model, [1], max_new_tokens=20, seed=8)) != first
    torch.set_rng_state(state)
    list(generate(model, [1], max_new_tokens=5))
    assert torch.equal(torch.get_rng_state(), state)


def test_streams_and_restores_the_mode(model: Decoder) -> None:
    model.train()
    tokens = generate(model, [1], max_new_tokens=20)
    list(islice(tokens, 3))
    assert not model.training and torch.is_grad_enabled()
    tokens.close()  # type: ignore[attr-defined]
    assert model.training


def test_rows_that_fill_the_vocabulary_up_are_never_taken(model: Decoder) -> None:
    assert max(generate(model, [1], max_new_tokens=40, seed=7)) > 40
    assert max(generate(model, [1], max_new_tokens=40, seed=7, vocab_size=20)) < 20
    assert max(generate(model, [1], max_new_tokens=40, temperature=0, vocab_size=20)) < 20


def test_ends_before_the_end_token(model: Decoder) -> None:
    tokens = list(generate(model, [1], max_new_tokens=20, seed=7))
    end = tokens[5]
    assert (
        list(generate(model, [1], max_new_tokens=20, seed=7, stop_ids=[VOCAB - 1, end])) == tokens[: tokens.index(end)]
    )


def test_ends_where_the_positions_end(model: Decoder, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(generate(model, [1] * 40, max_new_tokens=100))) == 9
    assert "ends after 9 tokens" in capsys.readouterr().err
    assert len(list(generate(model, [1] * 48, max_new_tokens=1))) == 1
    assert capsys.readouterr().err == ""


def test_refuses_at_once_what_cannot_work(model: Decoder) -> None:
    """Before the first token is asked for."""
    for prompt in ([], [VOCAB], [-1]):
        with pytest.raises(ConfigError, match="vocabulary of 64"):
            generate(model, prompt, max_new_tokens=1)
    with pytest.raises(ConfigError, match="49 tokens, more than the model's 48"):
        generate(model, [1] * 49, max_new_tokens=1)
    for wrong in ({"temperature": -1.0}, {"top_p": 1.5}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match="must be"):
            generate(model, [1], **{"max_new_tokens": 1, **wrong})  # type: ignore[arg-type]


def _frequencies(temperature: float, top_p: float, draws: int = 4000) -> torch.Tensor:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[sample(logits, temperature, top_p, generator)] += 1
    return counts / draws


def test_sampling_follows_the_probabilities() -> None:
    torch.testing.assert_close(_frequencies(1, 1), torch.tensor([0.1, 0.5, 0.15, 0.25]), atol=0.03, rtol=0)


def test_temperature_sharpens() -> None:
    squared = torch.tensor([0.1, 0.5, 0.15, 0.25]) ** 2
    torch.testing.assert_close(_frequencies(0.5, 1), squared / squared.sum(), atol=0.03, rtol=0)


def test_a_set_that_has_just_reached_top_p_is_whole() -> None:
    logits = torch.tensor([0.0, 0.0, -torch.inf])
    generator = torch.Generator().manual_seed(0)
    assert {sample(logits, 1.0, 0.5, generator) for _ in range(50)} == {0}


@pytest.mark.parametrize("top_p, kept", [(0.0, [1]), (0.4, [1]), (0.6, [1, 3]), (0.8, [1, 2, 3]), (0.95, [0, 1, 2, 3])])
def test_top_p_keeps_the_smallest_likeliest_set(top_p: float, kept: list[int]) -> None:
    assert _frequencies(1, top_p, 400).nonzero().flatten().tolist() == kept


class ByteTokenizer:
    """One token per UTF-8 byte, and like SentencePiece it drops a text's leading space."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 and 🙂🙂", "a b  c", ""])
def test_text_comes_whole_and_as_early_as_it_can(text: str) -> None:
    pieces = list(stream_text(ByteTokenizer(), iter(text.encode())))
    assert pieces == list(text)


def test_a_continuation_keeps_the_space_after_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(
        encode_batch=lambda texts: [list(text.encode()) for text in texts],
        decode=ByteTokenizer().decode,
        end_of_text_id=0,
        vocab_size=256,
    )

    def generated(*_: object, **options: object) -> Iterator[int]:
        assert options["vocab_size"] == 256, "no id that the tokenizer lacks"
        return iter(b" and on")

    monkeypatch.setattr(inference, "generate", generated)
    trained: Any = SimpleNamespace(model=None, tokenizer=tokenizer, begin_of_text={}, stop_ids={0})
    settings: Any = {"max_new_tokens": 9, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    assert "".join(inference.continue_text(trained, "on", **settings)) == " and on"


def test_a_gpu_that_is_full_is_told_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While the model is loaded as well as after some tokens; on the CPU it is another matter."""

    def full(*_: object, **__: object) -> Iterator[int]:
        yield ord("a")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more")

    (tmp_path / "config.json").touch()
    monkeypatch.setattr(inference, "generate", full)
    monkeypatch.setattr(inference, "build_pretrained", lambda *_: next(islice(full(), 1, None)))
    tokenizer = SimpleNamespace(decode=ByteTokenizer().decode, end_of_text_id=0, vocab_size=256)
    trained: Any = SimpleNamespace(model=None, tokenizer=tokenizer, begin_of_text={}, stop_ids={0})
    settings: Any = {"max_new_tokens": 9, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    for on_gpu, kind in ((True, ConfigError), (False, torch.OutOfMemoryError)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda on_gpu=on_gpu: on_gpu)
        with pytest.raises(kind, match="Tried to allocate"):
            inference.load_trained(tmp_path)
        pieces = inference.continue_text(trained, "", **settings)
        assert next(pieces) == "a"
        with pytest.raises(kind, match="Tried to allocate"):
            next(pieces)


def test_broken_bytes_are_given_at_the_end() -> None:
    assert "".join(stream_text(ByteTokenizer(), b"ab\xf0\x9f")) == "ab\N{REPLACEMENT CHARACTER}"
    assert "".join(stream_text(ByteTokenizer(), b"a\xffb")) == "a\N{REPLACEMENT CHARACTER}b"


def test_text_with_a_real_tokenizer() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "Grüße, 世界! 🙂 done."
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    ids = tokenizer.encode(text).ids
    pieces = list(stream_text(tokenizer, ids))
    assert "".join(pieces) == text
    assert len(pieces) > 5 and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 5e-324])
def test_next_to_no_temperature_is_none(model: Decoder, temperature: float) -> None:
    """In fp32 it is zero, or its quotients are infinite."""
    greedy = list(generate(model, [1], max_new_tokens=5, temperature=0))
    assert list(generate(model, [1], max_new_tokens=5, temperature=temperature)) == greedy
    assert list(generate(model, [1], max_new_tokens=5, temperature=1e-19)) == greedy


@pytest.mark.parametrize(
    "wrong", [{"seed": 99999999999999999999}, {"seed": -(2**63) - 1}, {"temperature": float("nan")}]
)
def test_what_a_generator_does_not_take_is_refused(model: Decoder, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a number of 64 bits"):
        generate(model, [1], max_new_tokens=5, **wrong)
    list(generate(model, [1], max_new_tokens=1, seed=2**64 - 1))
    list(generate(model, [1], max_new_tokens=1, seed=-(2**63)))
