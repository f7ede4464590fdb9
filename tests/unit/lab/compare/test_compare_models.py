"""Comparisons of real runs: the documents, the figures, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway
from headway.core.errors import CheckpointError, ConfigError, DataError
from headway.data.store import TokenStore
from headway.lab.compare import evaluating
from headway.lab.compare.candidates import find_groups
from headway.lab.compare.compare import Wanted, as_json, compare_models
from headway.lab.compare.evidence import ItemResults, Margin, item_differences
from headway.lab.compare.page import markdown, write_page
from headway.training.evaluation.document_losses import Document, document_losses
from headway.training.evaluation.inference import load_trained
from support.runs import headway_in_copy


@pytest.fixture(autouse=True)
def in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    yield


def found(*words: str, **wanted: Any) -> dict[str, Any]:
    compared = compare_models(words, Wanted(**wanted))
    if compared.why_not is not None:
        raise compared.why_not
    return as_json(compared)


def held_out(place: Path) -> list[Document]:
    store = TokenStore.open(place / "store")
    (source,) = store.sources("validation")
    starts = store.documents("validation", source).astype(int)
    bounds = itertools.pairwise(starts)
    return [Document(store.read("validation", source, first, end - first)) for first, end in bounds]


def texts_of(place: Path, split: str) -> list[str]:
    """The texts of one split of the store of a and b."""
    store = TokenStore.open(place / "store")
    (source,) = store.sources(split)
    starts = store.documents(split, source).astype(int)
    tokenizer = load_trained(place / "runs/a").tokenizer
    bounds = itertools.pairwise(starts)
    return [tokenizer.decode(store.read(split, source, first, end - first)[:-1]) for first, end in bounds]


def write_texts(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def test_the_effect_is_the_difference_of_mean_losses(place: Path) -> None:
    result = found("runs/a", "runs/b")
    losses = [
        document_losses(load_trained(place / "runs" / name), held_out(place), sequence_length=32) for name in ("a", "b")
    ]
    means = [one.loss.sum() / one.tokens.sum() for one in losses]
    assert result["baseline_loss"] == pytest.approx(means[0]) and result["loss"] == pytest.approx(means[1])
    assert result["effect"] == pytest.approx(means[1] - means[0])
    assert result["relative_effect"] == pytest.approx(means[1] / means[0] - 1)
    assert result["interval"][0] < result["effect"] < result["interval"][1]
    assert result["unit"] == "nats per token" and result["documents"] == len(held_out(place))
    assert result["differences"]["optimizer.learning_rate"] == [0.01, 0.02] and len(result["runs"]) == 2


def test_the_same_call_gives_the_same_figures_from_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = found("runs/a", "runs/b")

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("evaluated again")

    monkeypatch.setattr(evaluating, "load_trained", refused)
    assert found("runs/a", "runs/b") == first
    with pytest.raises(AssertionError, match="evaluated again"):
        found("runs/a", "runs/b", documents=5)


def test_damaged_kept_results_are_computed_again(place: Path) -> None:
    first = found("runs/a", "runs/b")
    for file in (place / "runs/a/document-losses").glob("*.json"):
        file.write_text('{"loss": [1, 2], "tokens": "x"}')
    assert found("runs/a", "runs/b") == first


def test_an_export_computes_what_its_run_does(place: Path) -> None:
    headway.export("runs/b", "exported")
    result = found("runs/b", "exported", sequence_length=32)
    assert result["effect"] == pytest.approx(0, abs=1e-6)
    assert any("exported" in note and "not known" in note for note in result["evidence"]["notes"])
    assert len(result["runs"]) == 1
    with pytest.raises(ConfigError, match="no data in common"):
        shutil.copytree("exported", "exported-too")
        found("exported", "exported-too")
    shutil.rmtree("exported-too")


def test_different_tokenizers_are_compared_per_byte(place: Path) -> None:
    texts = [f"green blue stone river {n} cloud under over" for n in range(12)]
    result = found("runs/a", "other/c", data=write_texts(place / "new.jsonl", texts))
    assert result["unit"] == "bits per byte"
    assert any("per byte" in note for note in result["evidence"]["notes"])
    trained = load_trained(place / "other/c")
    end = [trained.tokenizer.end_of_text_id]
    documents = [Document(np.array([*ids, *end])) for ids in trained.tokenizer.encode_batch(texts)]
    bits = document_losses(trained, documents, sequence_length=32).loss.sum() / np.log(2)
    assert result["loss"] == pytest.approx(bits / sum(len(text.encode()) for text in texts))


def test_a_store_is_decoded_for_another_tokenizer(place: Path) -> None:
    """Without what the other run was trained on, which holds out less of the same text."""
    result = found("runs/a", "other/c", data=place / "store")
    assert result["unit"] == "bits per byte"
    notes = " ".join(result["evidence"]["notes"])
    assert "left out, which other/c was trained on" in notes and "one run each" in notes
    store = TokenStore.open(place / "other-store")
    tokenizer = load_trained(place / "other/c").tokenizer
    starts = store.documents("train", "other").astype(int)
    bounds = itertools.pairwise(starts)
    trained = {tokenizer.decode(store.read("train", "other", first, end - first)[:-1]) for first, end in bounds}
    new = [text for text in texts_of(place, "validation") if text not in trained]
    assert result["documents"] == len(new) < len(texts_of(place, "validation"))


def test_documents_that_a_run_was_trained_on_are_left_out(place: Path) -> None:
    seen, new = texts_of(place, "train")[:5], [f"seven stone {n} over eight" for n in range(6)]
    result = found("runs/a", "runs/b", data=write_texts(place / "mixed.jsonl", seen + new))
    assert result["documents"] == 6
    notes = result["evidence"]["notes"]
    assert "5 documents left out, which runs/a was trained on" in notes
    with pytest.raises(DataError, match="trained on every one"):
        found("runs/a", "runs/b", data=write_texts(place / "seen.jsonl", seen))


def test_different_stores_are_refused_by_name(place: Path) -> None:
    with pytest.raises(ConfigError, match="different token stores") as caught:
        found("runs/a", "other/c")
    assert str(place / "store") in str(caught.value.where) and "other-store" in str(caught.value.where)
    assert "--data" in str(caught.value.fix)


def test_one_document_is_refused(place: Path) -> None:
    with pytest.raises(DataError, match="one document"):
        found("runs/a", "runs/b", data=write_texts(place / "one.jsonl", ["a single text"]))


def test_unknown_names_are_refused_with_the_nearest(place: Path) -> None:
    (place / "runs/empty").mkdir(exist_ok=True)
    for word, fix in (("runs/aa", "did you mean runs/a?"), ("a", "did you mean runs/a?"), ("none/x", "headway runs")):
        with pytest.raises(CheckpointError, match="does not exist") as caught:
            find_groups([word, "runs/b"])
        assert str(caught.value.fix).startswith(fix)
    with pytest.raises(CheckpointError, match="holds no run"):
        find_groups(["runs/empty", "runs/b"])
    for words in (["runs/a"], ["runs/a", "runs/b/../a"], ["runs/*", "runs/a"]):
        with pytest.raises(ConfigError, match="two or more different"):
            find_groups(words)


def test_a_group_is_a_folder_of_runs_or_a_pattern() -> None:
    by_folder, by_pattern = find_groups(["runs", "other/*"])
    assert [path.name for path in by_folder.paths] == ["a", "b"]
    assert [path.name for path in by_pattern.paths] == ["c"] and by_pattern.name == "*"


def test_a_group_counts_its_seeds(place: Path) -> None:
    shutil.copytree("runs/a", "third", dirs_exist_ok=True)
    result = found("runs", "third")
    means = [found("runs/a", "runs/b")[key] for key in ("baseline_loss", "loss")]
    assert result["baseline_loss"] == pytest.approx(np.mean(means))
    assert "Student's t over 2 and 1 seeds" in result["evidence"]["overall"][0]["method"]
    notes = result["evidence"]["notes"]
    assert any("differ in more than their seed: optimizer.learning_rate" in note for note in notes)
    assert not any("one run each" in note for note in notes)


def test_a_margin_is_a_share_or_an_amount() -> None:
    assert Margin.parse("1%") == Margin("1%", 0.01, True) and Margin.parse("0.02") == Margin("0.02", 0.02, False)
    for text in ("-1%", "0", "nan", "much", "inf", "%"):
        with pytest.raises(ConfigError, match="positive"):
            Margin.parse(text)


def test_non_inferior_is_an_interval_below_the_margin() -> None:
    plain = found("runs/b", "runs/a")
    low, high = plain["relative_interval"]
    assert low > 0, "a is worse"
    for share in (low / 2, (low + high) / 2):
        assert found("runs/b", "runs/a", margin=Margin.parse(f"{100 * share}%"))["non_inferior"] is False
    assert found("runs/b", "runs/a", margin=Margin.parse(f"{100 * high * 1.01}%"))["non_inferior"] is True
    assert found("runs/b", "runs/a", margin=Margin.parse(f"{plain['interval'][1] * 1.01}"))["non_inferior"] is True
    assert plain["non_inferior"] is None


def test_sources_are_compared_one_by_one(place: Path) -> None:
    folder = place / "texts"
    folder.mkdir(exist_ok=True)
    for name in ("first", "second"):
        write_texts(folder / f"{name}.jsonl", [f"{name} {n} stone river" for n in range(9)])
    (folder / "alone.txt").write_text("a text that is a source of its own")
    result = found("runs/a", "runs/b", data=folder)
    assert [one["source"] for one in result["evidence"]["by_source"]] == ["first", "second"]
    assert [one["documents"] for one in result["evidence"]["by_source"]] == [9, 9] and result["documents"] == 19


def test_items_of_benchmarks_are_compared_in_pairs() -> None:
    """Those that all runs have, by metric, with Holm's correction over all of them."""
    random = np.random.default_rng(1)
    hard = random.random(300)
    values = {model: (hard < share).astype(float) for model, share in (("a", 0.4), ("b", 0.5), ("c", 0.4))}
    results = {
        model: [
            {
                "task": ItemResults({"acc": dict(zip(map(str, range(300)), of.tolist(), strict=True))}, {"acc": True}),
                "other": ItemResults({"acc": {str(item): 1.0}}, {"acc": True}),
            }
        ]
        for item, (model, of) in enumerate(values.items())
    }
    better, same = item_differences(results)
    assert (better.model, better.task, better.metric, better.higher_is_better) == ("b", "task", "acc", True)
    assert better.estimate.effect == pytest.approx((values["b"] - values["a"]).mean())
    assert better.estimate.low > 0 and better.estimate.documents == 300
    assert better.corrected_p_value == pytest.approx(2 * better.estimate.p_value)
    assert (same.model, same.estimate.effect, same.corrected_p_value) == ("c", 0.0, 1.0)


def test_the_page_has_curves_before_evidence(place: Path) -> None:
    compared = compare_models(["runs/a", "runs/b"], Wanted())
    text = write_page(compared, place / "page.html").read_text()
    assert text.count('<div class="plot"') == 3
    places = [text.index(part) for part in ('<div class="plot"', "Loss on held-out documents", "How many documents")]
    assert places == sorted(places) and "optimizer.learning_rate" in text and "0.02" in text
    assert "var(--series-1)" in text and "src=" not in text and "<link" not in text


def test_a_comment_has_ratios_and_curves(place: Path) -> None:
    text = markdown(compare_models(["runs/a", "runs/b"], Wanted(), evaluates=False))
    records = {name: [json.loads(line) for line in (place / f"runs/{name}/metrics.jsonl").open()] for name in "ab"}
    losses = {name: [one["train/loss"] for one in found if "train/loss" in one] for name, found in records.items()}
    lines = [json.loads(line) for line in re.findall(r"^    line (\[.*\])$", text, flags=re.MULTILINE)]
    assert 'title "training loss: a, b"' in text and 'x-axis "step" 1 --> 8' in text
    for name, line in zip("ab", lines, strict=True):
        assert len(line) == 30
        assert [line[0], line[-1]] == pytest.approx([losses[name][0], losses[name][-1]], rel=1e-3)
    ratios = re.search(r"^\| speed, to the first \| 1.00 \| (\S+) \|$", text, flags=re.MULTILINE)
    assert ratios is not None and float(ratios[1]) > 0
    assert "| tokens per second |" in text


def test_markdown_for_a_pull_request() -> None:
    text = markdown(compare_models(["runs/a", "runs/b"], Wanted(margin=Margin.parse("1%"))))
    assert text.startswith("### Comparison with a\n") and "| b |" in text and "non-inferior within 1%" in text
    assert "optimizer.learning\\_rate" in text and "95 % interval" in text


def test_the_command_and_its_exit_codes(place: Path) -> None:
    code, printed = headway_in_copy("compare", "runs/a", "runs/b", "--json", "--margin", "90%")
    assert code == 0 and '"non_inferior": true' in printed
    code, printed = headway_in_copy("compare", "runs/b", "runs/a", "--margin", "0.001%", "-o", "p.html")
    assert code == 1 and "worse by more than 0.001%" in printed and (place / "p.html").is_file()
    code, printed = headway_in_copy("compare", "runs/a", "other/c", "--markdown")
    assert code == 2 and "different token stores" in printed and "| Config key" in printed


def test_runs_compare_is_the_same_command(place: Path) -> None:
    one = headway_in_copy("runs", "compare", "runs/a", "runs/b", "--json")
    assert one == headway_in_copy("compare", "runs/a", "runs/b", "--json") and one[0] == 0


def test_runs_without_weights_are_compared_by_what_they_recorded(place: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(place / "runs" / name, place / "bare" / name, dirs_exist_ok=True)
        shutil.rmtree(place / "bare" / name / "checkpoints")
    code, printed = headway_in_copy("runs", "compare", "bare/a", "bare/b", "-o", "bare.html")
    assert code == 0 and "optimizer.learning_rate" in printed and "no checkpoint yet" in printed
    assert (place / "bare.html").read_text().count('<div class="plot"') == 3
    code, printed = headway_in_copy("compare", "bare/a", "bare/b", "--margin", "1%")
    assert code == 4 and "no checkpoint yet" in printed
    code, printed = headway_in_copy("compare", "bare/a", "bare/b", "--curves", "--json")
    assert code == 0 and '"evidence": null' in printed and "no checkpoint" not in printed


def test_the_python_name_gives_what_the_command_prints() -> None:
    result = headway.compare(headway.Run("runs/a"), "runs/b", margin="50%")
    assert result["non_inferior"] is True and result["baseline"] == "a"
    with pytest.raises(ConfigError, match="different token stores"):
        headway.compare("runs/a", "other/c")
