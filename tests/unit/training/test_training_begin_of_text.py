"""Documents in the store, evaluation, prompts and exports begin with the same token, or with none."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.api import train
from headway.cli.models.export import export
from headway.config import load_config
from headway.core.errors import DataError
from headway.data.store import TokenStore
from headway.text.inspect import describe_store, sample_text
from headway.text.preparing.prepare import prepare
from headway.training.evaluation import inference
from headway.training.evaluation.inference import continue_text, evaluate_trained, load_trained
from support.runs import WORDS, write_config, write_corpus


def given(folder: Path, template: bool) -> Path:
    """A tokenizer of the corpus' words, with a template that puts `<s>` before a text, or with `<s>` alone."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, processors

    names = ["<unk>", *WORDS, *map(str, range(60)), ":"]
    library = Library(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    if template:
        begin = ("<s>", library.token_to_id("<s>"))
        library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [begin])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    return folder


@pytest.mark.parametrize(
    ("template", "wanted", "begins"),
    [(True, "auto", True), (True, "never", False), (False, "always", True)],
)
def test_the_same_in_store_evaluation_generation_and_export(
    tmp_path: Path,
    template: bool,
    wanted: str,
    begins: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    source = write_corpus(tmp_path)
    tokenizer = {"path": str(given(tmp_path / "given", template))}
    data = {"sources": [str(source)], "store": str(tmp_path / "store"), "validation": 0.2, "tokenizer": tokenizer}
    config = load_config(write_config(tmp_path, data={**data, "begin_of_text": wanted}, train={"steps": 2}))
    prepare(config.data, workers=1)
    said = capsys.readouterr().err
    assert ("every document begins with <s>" in said) == begins
    assert ("no document begins with <s>, though" in said) == (template and not begins)

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "given")
    begin, end = [theirs.bos_token_id] * begins, theirs.eos_token_id
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    expected = sorted([*begin, *theirs(text, add_special_tokens=False)["input_ids"], end] for text in texts)
    store, found = TokenStore.open(tmp_path / "store"), []
    for split in ("train", "validation"):
        bounds = store.documents(split, "corpus").tolist()
        ids = store.read(split, "corpus", 0, bounds[-1]).tolist()
        found += [ids[start:stop] for start, stop in pairwise(bounds)]
    assert sorted(found) == expected
    assert store.begin_of_text == ({"<s>": begin[0]} if begins else {})
    assert sample_text(store).startswith("<s>") == begins
    assert describe_store(store)["tokenizer"].get("begin_of_text") == (["<s>"] if begins else None)
    assert prepare(config.data, workers=1).up_to_date

    train(config)
    trained = load_trained(config.run_directory)
    prompts: list[list[int]] = []

    def generate(model: Any, ids: list[int], **_: Any) -> list[int]:
        prompts.append(list(ids))
        return []

    with monkeypatch.context() as patch:
        patch.setattr(inference, "generate", generate)
        for prompt in ("red stone", ""):
            assert list(continue_text(trained, prompt, max_new_tokens=1, temperature=0, top_p=1, seed=0)) == []
    plain = theirs("red stone", add_special_tokens=False)["input_ids"]
    assert prompts == [[*begin, *plain], begin or [end]]
    assert evaluate_trained(config.run_directory)["tokens"] > 0

    capsys.readouterr()
    export(config.run_directory, tmp_path / "out", None, "fp32")
    assert ("texts begin with <s>" in capsys.readouterr().err) == begins
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("red stone")["input_ids"] == [*begin, *plain]
    assert exported("red", "stone")["input_ids"].count(theirs.bos_token_id) == 2 * begins
    again = load_trained(tmp_path / "out")
    assert list(again.begin_of_text.values()) == begin
    same = evaluate_trained(tmp_path / "out", store_path=tmp_path / "store", sequence_length=32)
    assert same["loss"] == pytest.approx(evaluate_trained(config.run_directory)["loss"], abs=1e-6)


def test_a_run_from_before_goes_on_without_a_token_at_the_beginning(tmp_path: Path) -> None:
    """Its store was made when templates were not looked at, and so was the copy of its tokenizer."""
    transformers = pytest.importorskip("transformers")
    source, folder = write_corpus(tmp_path), given(tmp_path / "given", True)
    data = {"sources": [str(source)], "store": str(tmp_path / "store"), "tokenizer": {"path": str(folder)}}
    config = load_config(write_config(tmp_path, data=data, train={"steps": 1}), ["data.begin_of_text=never"])
    prepare(config.data, workers=1)
    settings = tmp_path / "store/tokenizer/tokenizer_config.json"
    values = json.loads(settings.read_text())
    assert values.pop("add_bos_token") is False
    settings.write_text(json.dumps(values))
    train(config)
    assert load_trained(config.run_directory).begin_of_text == {}
    export(config.run_directory, tmp_path / "out", None, "fp32")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.convert_ids_to_tokens(exported("red")["input_ids"]) == ["red"]
    assert prepare(config.data, workers=1).up_to_date
    data_now = config.data.model_copy(update={"begin_of_text": "auto"})
    assert not prepare(data_now, workers=1, run=config.run_directory).up_to_date
    for model in (config.run_directory, tmp_path / "out"):
        with pytest.raises(DataError, match=r"documents of the store begin with <s>, those .* with no token") as caught:
            evaluate_trained(model, store_path=tmp_path / "store")
        assert "begin_of_text=never" in str(caught.value.fix)
    assert not prepare(config.data, workers=1, run=config.run_directory).up_to_date
    assert evaluate_trained(config.run_directory)["tokens"] > 0
