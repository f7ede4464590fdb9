"""Cleaning steps in a config: names alone, sections, overrides, and what is said to mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config.loading.load import dump_config, load_config
from headway.config.loading.reference import json_schema, reference
from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError


def config(tmp_path: Path, clean: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"base: quickstart\ndata:\n  clean:\n{clean}", "utf-8")
    return path


def test_steps_by_name_and_as_sections(tmp_path: Path) -> None:
    path = config(tmp_path, "    - unicode\n    - {step: length, min_words: 5}\n    - pii\n")
    loaded = load_config(path)
    assert [step.step for step in loaded.data.clean] == ["unicode", "length", "pii"]
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(loaded), "utf-8")
    assert load_config(again) == loaded
    assert [step.step for step in DataConfig.model_validate({"clean": "c4"}).clean] == ["c4"]


def test_overrides_reach_into_steps(tmp_path: Path) -> None:
    path = config(tmp_path, "    - unicode\n    - gopher_quality\n")
    loaded = load_config(path, ["data.clean.0.form=NFKC", "data.clean.1.min_words=7"])
    assert [step.model_dump(exclude_unset=True) for step in loaded.data.clean] == [
        {"step": "unicode", "form": "NFKC"},
        {"step": "gopher_quality", "min_words": 7},
    ]


@pytest.mark.parametrize(
    ("clean", "what", "fix"),
    [
        ("    - gopher_qualty\n", "no step 'gopher_qualty'", "did you mean gopher_quality?"),
        ("    - step: something\n", "no step 'something'", "one of unicode, length"),
        ("    - {min_words: 3}\n", "'step' is missing", "give data.clean.0.step"),
        ("    - {step: c4, min_sentence: 4}\n", "unknown key 'data.clean.0.min_sentence'", "data.clean.min_sentences?"),
        ("    - decontaminate\n", "data.clean.0.sets is missing", "give data.clean.0.sets"),
        ("    - length\n", "give at least one of min_characters", None),
        ("    - {step: length, min_words: 5, max_words: 4}\n", "min_words is above max_words", None),
        ("    - {step: gopher_quality, min_words: 5, max_words: 4}\n", "min_words is above max_words", None),
        ("    - {step: gopher_quality, stop_words: [der]}\n", "more than there are stop_words", None),
        ("    - {step: gopher_quality, min_mean_word_length: 11}\n", "min_mean_word_length is above", None),
        ("    - {step: pii, email: null, ip: null, phone: null}\n", "nothing to replace", None),
        ("    - {step: python, function: upper}\n", "data.clean.0.function", None),
        ("    - {step: decontaminate, sets: x, min_ngram: 14}\n", "min_ngram is above ngram", None),
        ("    - {step: decontaminate, sets: [{path: x, name: n}, {path: y, name: n}]}\n", "have the name 'n'", None),
    ],
)
def test_mistakes_are_named(clean: str, what: str, fix: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(config(tmp_path, clean))
    assert what in error.value.render()
    assert fix is None or fix in error.value.render()
    assert "config.yaml:4" in error.value.render()


def test_the_reference_has_a_table_for_each_step() -> None:
    text = reference()
    for step in ("unicode", "length", "gopher_quality", "gopher_repetition", "c4", "fineweb", "decontaminate"):
        assert f"## `data.clean`, `step: {step}`" in text
    assert "`data.clean.sets.path`" in text


def test_editors_accept_names_and_sections() -> None:
    schema = json_schema()
    clean = schema["$defs"]["DataConfig"]["properties"]["clean"]
    kinds = clean["anyOf"][0]["anyOf"][0]["items"]["anyOf"]
    assert "unicode" in kinds[0]["enum"] and "python" not in kinds[0]["enum"]  # which needs a function
    assert kinds[1]["discriminator"]["propertyName"] == "step"
