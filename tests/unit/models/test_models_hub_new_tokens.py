"""New tokens of a pretrained model: means of their pieces, everything else as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headway.config import Config
from headway.core.errors import ConfigError
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.models.build import build_any_model, complete
from headway.models.hub.new_tokens import extend_vocabulary, with_new_tokens
from support.chat import chat_tokenizer
from support.families import write_family
from support.runs import headway_in_copy

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("family", "rows"),
    [("llama-3", 320), ("qwen3", 305), ("gpt-2", 320), ("qwen3", 320)],
    ids=["untied", "tied", "gpt-2", "padded"],
)
def test_rows_of_new_tokens_are_means_of_their_pieces(family: str, rows: int, tmp_path: Path) -> None:
    source, folder = write_family(family, tmp_path / "model", vocab_size=rows), tmp_path / "extended"
    old = Tokenizer.load(chat_tokenizer(source))
    assert old.vocab_size == 305
    tokens = {"wide seas": False, "<|tool|>": True}
    pieces = {305 + number: old.encode_batch([token])[0] for number, token in enumerate(tokens)}
    assert all(len(parts) > 1 for parts in pieces.values())
    extend_vocabulary(source, folder, pieces, with_new_tokens(old.content, tokens, 305))

    before, after = (load_file(place / "model.safetensors") for place in (source, folder))
    assert before.keys() == after.keys()
    for name, matrix in before.items():
        if matrix.shape[:1] != (rows,):
            assert torch.equal(matrix, after[name])
            continue
        assert torch.equal(matrix[:305], after[name][:305]) and len(after[name]) == max(rows, 307)
        for number, parts in pieces.items():
            torch.testing.assert_close(after[name][number], torch.stack([matrix[p] for p in parts]).mean(0))

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("rain<|tool|>wide seas", add_special_tokens=False)["input_ids"][-2:] == [306, 305]
    assert tokenizer.chat_template and len(tokenizer) == 307 == Tokenizer.load(folder).vocab_size
    assert Tokenizer.load(folder).encode_batch(["rain wide seas"])[0][-1] == 305
    assert Tokenizer.load(folder).encode_batch(["<|tool|>"]) == old.encode_batch(["<|tool|>"])  # a text does not
    model = complete(Config.model_validate({"model": {"from_pretrained": str(folder)}}).model, 307)
    built = build_any_model(model, vocab_size=307, seed=0).eval()
    ids = torch.tensor([[5, 306, 305, 7]])
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        torch.testing.assert_close(built(ids), expected, rtol=1e-4, atol=1e-5)


def test_weights_keep_their_type_and_stay_tied(tmp_path: Path) -> None:
    source = write_family("qwen3", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(source)
    old = Tokenizer.load(chat_tokenizer(source))
    extend_vocabulary(source, tmp_path / "new", {330: [5, 6]}, with_new_tokens(old.content, {"x y": False}, 330))
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in found and len(found["model.embed_tokens.weight"]) == 331
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == 331


def test_the_verb_refuses_what_cannot_be_added(tmp_path: Path) -> None:
    source = chat_tokenizer(write_family("qwen3", tmp_path / "model"))
    for words, said in (
        ([], "no token is given"),
        (["-s", "<|im_end|>"], "has the token '<|im_end|>' already"),
        (["-t", " "], "a token has no text"),
    ):
        code, printed = headway_in_copy("tokenizer", "extend", source, tmp_path / "new", *words)
        assert code == 2 and said in printed
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="no earlier export"):
        extend_vocabulary(source, tmp_path / "new", {305: [5]}, b"{}")
