"""Training from Python: configs as people write them, runs as they print, and what notebooks show."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

import headway
from headway.api.results import Run
from headway.config import load_config
from headway.core.errors import ConfigError
from headway.telemetry.metrics import Metrics
from headway.telemetry.plot import Plot
from headway.training.job import unknown_hooks

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog"]
TINY: dict[str, Any] = {
    "base": "quickstart",
    "name": "tiny",
    "data": {"sources": ["corpus.jsonl"], "tokenizer": {"vocab_size": 300}},
    "model": {"preset": None, "dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn_dim": 64},
    "train": {"steps": 60, "sequence_length": 32, "global_batch": 4, "precision": "fp32", "device": "cpu"},
    "optimizer": {"name": "adamw", "learning_rate": 0.003},
    "schedule.warmup": "5 steps",
    "checkpoint.every": "20 steps",
    "evaluation.every": "20 steps",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    texts = [" ".join(WORDS[(row * 7 + at * at) % len(WORDS)] for at in range(40)) for row in range(200)]
    (tmp_path / "corpus.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_keywords_and_mappings_are_overrides() -> None:
    config = load_config("quickstart", steps=7, optimizer={"learning_rate": 1e-3}, **{"checkpoint.every": "5 steps"})
    assert (config.train.steps, config.train.tokens) == (7, None), "it replaces what the preset gives"
    assert (config.optimizer.learning_rate, config.optimizer.name) == (1e-3, "muon"), "a section keeps its other keys"
    assert str(config.checkpoint.every) == "5 steps"
    mapping = load_config({"base": "quickstart", "train.steps": 9, "train": {"global_batch": 16}})
    assert (mapping.train.steps, mapping.train.global_batch) == (9, 16)
    assert load_config(mapping, steps=11) == load_config(mapping, ["train.steps=11"])
    assert load_config({"base": "quickstart"}) == load_config("quickstart")
    assert load_config("quickstart", sources=Path("a.txt")).data.sources[0].path == "a.txt"


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"stepz": 3}, "unknown key 'stepz'", "did you mean train.steps?"),
        ({"every": 3}, "the keyword 'every' could mean 4 keys", "checkpoint.every"),
        ({"steps": "many"}, "train.steps: 'many' is not a quantity", "Optimizer steps"),
    ],
)
def test_a_keyword_that_says_nothing(keys: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=what) as raised:
        load_config("quickstart", **keys)
    assert fix in str(raised.value.fix)


def test_a_config_prints_what_differs() -> None:
    text = repr(load_config("quickstart", steps=7))
    assert "steps: 7" in text and "every: 200 steps" in text and "supervise" not in text
    assert load_config(yaml.safe_load(text)) == load_config("quickstart", steps=7), "it is a config"


def test_an_error_is_three_lines_in_a_notebook() -> None:
    error = ConfigError("no such file", where="a.yaml", fix="give one")
    assert error._render_traceback_() == ["error: no such file", "  where: a.yaml", "  fix:   give one"]


def history(**series: list[float]) -> Metrics:
    metrics = Metrics()
    for step, values in enumerate(zip(*series.values(), strict=True), 1):
        metrics.add({"step": step, "attempt": 1, "time": float(step), **dict(zip(series, values, strict=True))})
    return metrics


def test_a_plot_needs_no_script_and_shows_every_curve(tmp_path: Path) -> None:
    metrics = history(loss=[4.0, 3.0, 2.0, float("nan")], other=[1.0, 1.0, 1.0, 1.0])
    plot = metrics.plot("loss", "other")
    path = plot.save(tmp_path / "loss.svg")
    svg = ElementTree.fromstring(path.read_text())
    points = [one.get("points", "").split() for one in svg.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(one) for one in points] == [3, 4], "what is not finite is left out"
    heights = [float(point.split(",")[1]) for point in points[0]]
    assert heights == sorted(heights), "a falling loss goes down the page"
    assert "script" not in plot._repr_html_()
    with pytest.raises(ConfigError, match="nothing is recorded under 'los'") as raised:
        metrics.plot("los")
    assert "loss" in str(raised.value.fix)
    hostile = Plot({"<script>": metrics.finite("loss")})
    assert "<script>" not in hostile.svg()


def test_a_table_has_a_row_for_each_step() -> None:
    pandas = pytest.importorskip("pandas")
    table = history(loss=[4.0, 3.0]).to_pandas()
    assert table.index.name == "step" and list(table.index) == [1, 2] and list(table["loss"]) == [4.0, 3.0]
    metrics = history(loss=[4.0, 3.0])
    metrics.add({"step": 2, "attempt": 1, "late": 1.0})
    assert pandas.isna(metrics.to_pandas().loc[1, "late"])


def test_without_pandas_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install"):
        history(loss=[1.0]).to_pandas()


def test_hooks_that_nothing_calls_are_named() -> None:
    class Mine(headway.Callback):
        def on_log(self) -> None: ...

        def on_steps(self) -> None: ...

        def on_step(self, *_: object) -> None: ...

        def before_lunch(self) -> None: ...

    texts = list(unknown_hooks(Mine()))
    assert [text.partition(":")[0] for text in texts] == [
        f"nothing calls Mine.{name}" for name in ("before_lunch", "on_log", "on_steps")
    ]
    assert texts[1].endswith("did you mean on_step?") and texts[2].endswith("did you mean on_step?")
    assert not list(unknown_hooks(headway.Callback()))


@pytest.mark.parametrize("given", [headway.Callback, [object()]])
def test_what_is_no_callback_is_refused(folder: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match="an object whose class derives from"):
        headway.train(TINY, callbacks=given)
    assert not (folder / "runs").exists()


def test_a_run_that_is_not_there_prints_so(tmp_path: Path) -> None:
    run = Run(str(tmp_path / "none"))  # type: ignore[arg-type]
    assert "does not exist" in repr(run) and run._repr_html_() is None


def test_what_verbs_do_from_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Seen(headway.Callback):
        steps: tuple[int, ...] = ()

        def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
            self.steps += (step,)

        def on_log(self) -> None: ...

    seen = Seen()
    report = headway.prepare(TINY)
    assert report.documents == 200 and headway.prepare(TINY).up_to_date
    run = headway.train(TINY, steps=20, callbacks=seen)
    assert seen.steps == tuple(range(1, 21)) and run.step == 20
    assert "nothing calls Seen.on_log: did you mean on_step?" in capsys.readouterr().err
    assert run.config.train.steps == 20 and run.state == "finished"
    assert "step 20 of 20" in repr(run) and "validation loss" in repr(run)
    found = headway.evaluate(run)
    assert found["loss"] == pytest.approx(run.validation_loss, abs=1e-4)
    text = headway.generate(run, "the cat", max_new_tokens=5, temperature=0)
    assert text == headway.generate("runs/tiny", "the cat", max_new_tokens=5, temperature=0) != ""
    exported = headway.export(run, "out")
    assert (exported / "model.safetensors").exists()
    assert headway.generate(exported, "the cat", max_new_tokens=5, temperature=0) == text
