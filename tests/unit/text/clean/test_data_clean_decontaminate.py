"""Overlap with evaluation sets."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.text.clean import Cleaner, describe_steps
from headway.text.clean.contamination import _all_grams, _WordHashes

Make = Callable[..., Cleaner]

QUESTION = "Which of the five islands did the fishermen name first when the two brothers asked them on the quay?"
SHORT = "The mill wheel has not turned since spring."


def jsonl(path: Path, *texts: str, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), "utf-8")
    return path


def step(*sets: Any, **values: Any) -> dict[str, Any]:
    return {"step": "decontaminate", "sets": [str(s) if isinstance(s, Path) else s for s in sets], **values}


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "questions.jsonl", QUESTION, SHORT, "Too short.")


def counts(cleaner: Cleaner) -> dict[str, int]:
    return dict(cleaner.take_counts().steps[0].reasons)


def test_documents_that_hold_an_ngram_are_removed(questions: Path, prose: str, cleaner: Make) -> None:
    one = cleaner(step(questions))
    assert one.clean(prose) == prose and counts(one) == {}
    thirteen = " ".join(QUESTION.split()[3:16])
    assert one.clean(f"{prose} And so: {thirteen} {prose}") is None
    found = one.take_counts().steps[0]
    assert found.reasons == {"questions": 1, "removed": 1}
    (example,) = found.examples
    assert example.kind == "dropped" and thirteen.lower() in example.reason
    assert thirteen in example.text and len(example.text) <= 200
    twelve = " ".join(QUESTION.split()[3:15])
    text = f"{prose} And so: {twelve}, {prose}"
    assert one.clean(text) == text


def test_case_punctuation_and_white_space_do_not_count(questions: Path, cleaner: Make) -> None:
    one = cleaner(step(questions))
    assert one.clean("x " + QUESTION.upper().replace(" ", "\n--") + "!") is None
    assert one.clean("x " + QUESTION.replace("five", "six").replace("brothers", "sisters")) is not None


FORMS = "The ﬁrst of its kind weighs ½ of what the second does, at 2² metres a turn, in a café by the Ångström bridge."


@pytest.mark.parametrize("steps", [[], ["unicode"], [{"step": "unicode", "form": "NFKC"}]], ids=["", "NFC", "NFKC"])
@pytest.mark.parametrize("written", ["NFC", "NFD", "NFKC", "NFKD"])
@pytest.mark.parametrize("stored", ["NFC", "NFD", "NFKC"])
def test_the_normal_form_does_not_count(
    tmp_path: Path, cleaner: Make, steps: list[Any], stored: str, written: str
) -> None:
    """Neither that of the set, nor that of the text, nor the one that an earlier step gives it."""
    example = jsonl(tmp_path / "set.jsonl", unicodedata.normalize(stored, FORMS))
    one = cleaner(*steps, step(example))
    assert one.clean("So: " + unicodedata.normalize(written, FORMS)) is None
    (found,) = one.take_counts().steps[-1].examples
    assert "The first of its kind" in found.text


CHINESE = "那是最美好的时代,那是最糟糕的时代;那是智慧的年头,那是愚昧的年头;那是信仰的时期,那是怀疑的时期。"


@pytest.mark.parametrize(
    "text",
    [
        CHINESE,
        "ไม่มีใครรู้ว่าเรือลำแรกกลับมาถึงท่าเมื่อไหร่",
        "だれも最初の船がいつ港に戻ったのか知らなかった",
        "𠀀𠀁𠀂𠀃𠀄𠀅𠀆𠀇𠀈𠀉𠀊𠀋𠀌𠀍",
    ],
    ids=["Chinese", "Thai", "Japanese", "plane 2"],
)
def test_scripts_without_spaces_are_read_by_character(tmp_path: Path, cleaner: Make, text: str) -> None:
    one = cleaner(step(jsonl(tmp_path / "set.jsonl", text)))
    assert one.clean(f"其他{text}还有别的") is None
    assert one.clean(f"其他{text[: len(text) // 4]}还有别的") is not None
    assert one.clean("这里没有什么可以找到的东西,只是一些别的句子而已。") is not None


def test_words_of_other_scripts_stay_whole(tmp_path: Path, cleaner: Make) -> None:
    one = cleaner(step(jsonl(tmp_path / "set.jsonl", "семь восемь девять десять больше меньше столько ещё")))
    assert one.clean("раз: семь восемь девять десять больше меньше столько ещё раз") is None
    assert one.clean("раз: семь восемь девять десять больше меньше столько же") is not None


def test_short_examples_are_looked_for_whole(questions: Path, cleaner: Make) -> None:
    assert cleaner(step(questions)).clean(f"He said: {SHORT} And left.") is None
    assert cleaner(step(questions)).clean("He said: the mill wheel has not turned since. And left.") is not None
    # One match is all that a short example can have.
    assert cleaner(step(questions, min_matches=3)).clean(f"He said: {SHORT} And left.") is None
    assert cleaner(step(questions, min_ngram=9)).clean(f"He said: {SHORT} And left.") is not None
    # `Too short.` has two words.
    assert cleaner(step(questions)).clean("It was too short.") is not None
    assert cleaner(step(questions, min_ngram=2)).clean("It was too short.") is None


def test_enough_matches(questions: Path, cleaner: Make) -> None:
    fifteen = " ".join(QUESTION.split()[:15])  # three n-grams of 13 words
    assert cleaner(step(questions, min_matches=3)).clean(fifteen) is None
    assert cleaner(step(questions, min_matches=4)).clean(fifteen) == fifteen
    assert cleaner(step(questions, ngram=16)).clean(fifteen) == fifteen
    assert cleaner(step(questions, ngram=5)).clean(" ".join(QUESTION.split()[:5])) is None


def test_report_keeps_and_counts_each_set(tmp_path: Path, questions: Path, prose: str, cleaner: Make) -> None:
    other = jsonl(tmp_path / "other.jsonl", QUESTION + " Or second?", prose)
    one = cleaner(step(questions, other, action="report"))
    texts = [f"So: {QUESTION}", prose, "nothing of the kind " * 10]
    assert [one.clean(text) for text in texts] == texts
    found = one.take_counts().steps[0]
    assert found.documents_out == 3 and found.changed == 0
    assert found.reasons == {"questions": 1, "other": 2}
    assert [example.kind for example in found.examples] == ["found", "found"]
    assert "questions: 7 n-grams, the first: which of the five" in found.examples[0].reason


def test_all_formats_and_fields(tmp_path: Path, cleaner: Make) -> None:
    (tmp_path / "plain.txt").write_text(QUESTION, "utf-8")
    jsonl(tmp_path / "lines.jsonl", QUESTION, field="question")
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question"], [QUESTION]])
    sets: list[Any] = [tmp_path / "plain.txt"]
    sets += [{"path": str(tmp_path / name), "field": "question"} for name in ("lines.jsonl", "table.csv")]
    if pytest.importorskip("pyarrow"):
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        parquet.write_table(arrow.table({"question": [QUESTION]}), tmp_path / "columns.parquet")
        sets.append({"path": str(tmp_path / "columns.parquet"), "field": "question", "name": "mine"})
    one = cleaner(step(*sets, action="report"))
    one.clean(QUESTION)
    assert counts(one) == {"plain": 1, "lines": 1, "table": 1, "mine": 1}


def test_sets_that_cannot_be_used(tmp_path: Path, cleaner: Make) -> None:
    with pytest.raises(DataError, match="no such file"):
        cleaner(step(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="holds no text of 8 words or more") as error:
        cleaner(step(jsonl(tmp_path / "short.jsonl", "a b c")))
    assert "field" in str(error.value.fix)
    with pytest.raises(DataError, match="no field 'text'"):
        cleaner(step(jsonl(tmp_path / "other.jsonl", QUESTION, field="question")))


def test_descriptions_know_what_is_in_a_set_and_not_where(tmp_path: Path, questions: Path) -> None:
    def describe(*sets: Any, **values: Any) -> Any:
        return describe_steps(DataConfig.model_validate({"clean": [step(*sets, **values)]}).clean)

    first = describe({"path": str(questions), "name": "q"})
    (tmp_path / "folder").mkdir()
    moved = questions.rename(tmp_path / "folder" / "moved.jsonl")
    assert describe({"path": str(moved), "name": "q"}) == first
    assert describe({"path": str(moved), "name": "q"}, ngram=12) != first
    jsonl(moved, QUESTION, SHORT + " So", "Too short.")
    assert describe({"path": str(moved), "name": "q"}) != first


def test_examples_that_are_too_short_are_reported_once_for_all_workers(
    questions: Path, cleaner: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaner(step(questions))  # a worker's
    assert capsys.readouterr().err == ""
    describe_steps(DataConfig.model_validate({"clean": [step(questions)]}).clean)
    assert "1 of 3 examples are too short to be matched" in capsys.readouterr().err


def test_equal_in_every_process(questions: Path, prose: str, cleaner: Make) -> None:
    script = (
        "import sys, json; from headway.config.sections.clean import DecontaminateStep\n"
        "from headway.text.clean import Cleaner\n"
        "c = Cleaner([DecontaminateStep(**json.loads(sys.argv[1]))]); c.clean(sys.argv[2])\n"
        "print(json.dumps(c.take_counts().to_json()))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script, json.dumps(step(questions)), f"{prose} {QUESTION}"],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and "questions: 7 n-grams" in outputs.pop()


def test_hashes_are_the_same_everywhere() -> None:
    hashes = _WordHashes()
    words = np.array([hashes[word] for word in ("mill", "wheel", "語")], np.uint64)
    assert [int(word) for word in words] == [12901546797544725962, 2727832217181998370, 4122675868058923746]
    ((length, grams),) = _all_grams(words, [2])
    assert length == 2 and [int(gram) for gram in grams] == [9103417040734017204, 17241176234527194796]


WORDS = st.lists(st.sampled_from("the mill wheel has not Turned since SPRING, é 語".split()), min_size=1, max_size=14)  # noqa: SIM905


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS, min_size=1, max_size=4), WORDS, st.integers(2, 6), st.integers(1, 3))
def test_overlap_is_that_of_the_definition(
    tmp_path: Path, examples: list[list[str]], document: list[str], ngram: int, least: int
) -> None:
    def words(tokens: list[str]) -> list[str]:
        return re.findall(r"\w+", " ".join(tokens).lower())

    wanted = set()
    for example in map(words, examples):
        length = min(ngram, len(example))
        if length >= 2:
            wanted |= {tuple(example[i : i + length]) for i in range(len(example) - length + 1)}
    if not wanted:
        return
    tokens = words(document)
    grams = [tuple(tokens[i : i + n]) for n in range(2, ngram + 1) for i in range(len(tokens) - n + 1)]
    hits = [gram for gram in grams if gram in wanted]
    overlaps = len(hits) >= least or any(len(gram) < ngram for gram in hits)
    path = jsonl(tmp_path / "set.jsonl", *(" ".join(example) for example in examples))
    settings_ = step(path, ngram=ngram, min_ngram=2, min_matches=least)
    cleaner = Cleaner(DataConfig.model_validate({"clean": [settings_]}).clean)
    assert (cleaner.clean(" ".join(document)) is None) == overlaps
