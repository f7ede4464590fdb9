"""Pages of `docs/extending`: the first block of Python of each is a module, and does what its page says."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import headway
from headway.cli import application
from headway.clouds.launchers.launcher import find_launcher
from headway.config import Config, find_optimizer
from headway.config.schema import OptimizerConfig
from headway.config.sections.clean import PythonStep
from headway.config.sections.data import DataConfig
from headway.config.sections.track import TrackConfig
from headway.core.functions import load_function
from headway.core.machine.system import Machine
from headway.models.conformance import check_model
from headway.parallel.strategy import Strategy
from headway.parallel.world import World
from headway.text.clean.cleaner import Cleaner
from headway.text.reading.sources import find_sources
from headway.text.reading.streams import read_stream
from headway.tracking.follow import follow
from headway.tracking.follower import Waiting
from headway.training.conditions.watch import ConditionWatch, conditions
from headway.training.custom_loss import checked
from headway.training.optimizer import build_optimizer, optimizer_tensors, set_learning_rate
from support.followers import steps, write_run
from support.launchers import Programs, job
from support.runs import manifest, state_hash

PAGES = Path(__file__).parents[2] / "docs" / "extending"
CPU = torch.device("cpu")


def example(page: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The first block of Python of a page, imported under the name of the file that its first line names."""
    block = re.search(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None, page
    named = re.match(r"# (?:.*/)?(\w+)\.py", block[1])
    assert named is not None, f"{page} does not say which file its example is"
    module = ModuleType(named[1])
    monkeypatch.setitem(sys.modules, named[1], module)
    exec(compile(block[1], f"{page}.md", "exec"), module.__dict__)
    return module


def test_every_page_is_listed_and_has_its_test() -> None:
    index, tests = (PAGES / "index.md").read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    pages = {path.stem for path in PAGES.glob("*.md")} - {"index"}
    assert len(pages) >= 8
    assert not {page for page in pages if f"({page}.md)" not in index or f'example("{page}"' not in tests}


def test_an_optimizer_is_built_by_its_name_and_keeps_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    example("optimizer", monkeypatch)
    config = OptimizerConfig(name="own_optimizer:SIGNUM", learning_rate=0.05)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(32, 4)
    optimizer = build_optimizer(config, model, CPU)
    losses = []
    for step in range(60):
        set_learning_rate(optimizer, 0.05 * (1 - step / 60))
        optimizer.zero_grad()
        error = (model(x) - x.sum(1, keepdim=True)).square().mean()
        error.backward()
        optimizer.step()
        losses.append(error.item())
    assert losses[-1] < losses[0] / 4
    names = {p: name for name, p in model.named_parameters()}
    state = optimizer_tensors(optimizer, names)
    assert sorted(state) == ["optimizer.momentum.bias", "optimizer.momentum.weight"]
    spec = find_optimizer(config.name)
    assert sum(t.nbytes for t in state.values()) == sum(spec.moment_bytes(n, tuple(p.shape)) for p, n in names.items())


def test_a_loss_is_found_by_its_name_and_sums_over_targets_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    example("loss", monkeypatch)
    loss = checked(load_function("own_loss:smoothed", "loss")[1], "own_loss:smoothed")
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 5, requires_grad=True), torch.tensor([[1, -100, 2], [4, 0, -100]])
    log_p = torch.log_softmax(logits, -1)
    counted = [(log_p[at], targets[at]) for at in ((0, 0), (0, 2), (1, 0), (1, 1))]
    wanted = sum(-0.9 * row[target] - 0.1 * row.mean() for row, target in counted)
    torch.testing.assert_close(loss(logits, {"targets": targets}), wanted)


def test_a_strategy_follows_the_protocol_and_sums_over_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("strategy", monkeypatch)
    asked = {name for name in vars(Strategy) if not name.startswith("_")}
    assert asked <= vars(module.PlainDataParallel).keys()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    unused = model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    batches = [torch.randn(2, 4) for _ in range(4)]
    whole = torch.autograd.grad(model(torch.cat(batches)).square().sum(), [model.weight, model.bias])
    spread = module.PlainDataParallel(model, World(0, 1, 0, CPU), Config.model_validate({"train": {"steps": 1}}))
    for _ in range(2):  # the second step must not see the gradients of the first
        spread.begin()
        for number, batch in enumerate(batches):
            with spread.micro_batch(last_of_lane=True, last=number == 3):
                model(batch).square().sum().backward()
            spread.end_lane()
        spread.reduce()
        spread.after_update()
    assert unused is None and torch.equal(model.unused.grad, torch.zeros(2))
    for p, expected in zip((model.weight, model.bias), whole, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, expected)


def test_a_condition_is_measured_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = [1000.0]
    found = example("condition", monkeypatch).Load(read_load=lambda: (load[0], 0.0, 0.0))
    assert "load" not in conditions(tmp_path, Machine()), "the example is there already"
    watch, metrics = ConditionWatch({"load": found}, 60.0), dict[str, float]()
    watch.look()
    watch.look()
    watch.on_step(Any, 1, metrics)
    assert metrics == {"health/load": 1000.0}
    assert capsys.readouterr().err.count("other programs slow this run down") == 1
    load[0] = 0.5
    assert not found.read().warnings


def test_a_launcher_of_ones_own_starts_and_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = example("launcher", monkeypatch)
    programs, given = Programs(tmp_path, monkeypatch, "ssh"), job(machines=1)
    launcher = find_launcher("own_launcher:SSH")
    assert not list(launcher.problems(given)) and isinstance(launcher, own.Ssh)
    launcher.check(given)
    (tmp_path / "config.yaml").write_text(launcher.files(given)["config.yaml"])
    programs.answer("gpu-1.example.org", stdout="123\n")
    handle = launcher.submit(given, tmp_path)
    assert handle.id == "123" and "tiny-run" in programs.given
    assert launcher.status(handle).state == "running"
    launcher.cancel(handle)
    assert programs.calls[-1] == ["ssh", "gpu-1.example.org", "kill -TERM 123"]


def test_a_verb_is_one_file_and_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("verb", monkeypatch)
    monkeypatch.setitem(sys.modules, "headway.cli.runs.steps", module)
    verbs = {"steps": application.Verb("cli.runs", "Print steps."), "report": application.VERBS["report"]}
    monkeypatch.setattr(application, "VERBS", verbs)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    (run / "metrics.jsonl").write_text('{"step": 1200, "attempt": 1, "time": 1.0, "train/loss": 2.0}\n')
    app = application.application(("steps", "report"))
    told = CliRunner().invoke(app, ["steps", str(run)])
    assert told.output.strip() == f"{run}: 1,200 steps", told
    assert CliRunner().invoke(app, ["steps", str(run), "--quiet"]).output.strip() == "1200"


def test_a_function_is_a_cleaning_step(monkeypatch: pytest.MonkeyPatch) -> None:
    example("cleaning-step", monkeypatch)
    cleaner = Cleaner([PythonStep(function="own_cleaning:without_boilerplate")])
    prose = "One line that has some words in it.\nAnother line that is just as long."
    assert cleaner.clean(f"{prose}\nCopyright 2020") == prose
    assert cleaner.clean("Home\nNews\nAbout us") is None


def test_a_function_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example("source-format", monkeypatch)
    with sqlite3.connect("messages.sqlite") as connection:
        connection.execute("CREATE TABLE messages (title TEXT, body TEXT)")
        connection.executemany("INSERT INTO messages VALUES (?, ?)", [("A", "first"), ("B", "second")])
    path, template = "python:own_sources:messages", "{title}\n{text}"
    data = DataConfig.model_validate({"sources": [{"name": "chat", "path": path, "template": template}]})
    (source,) = find_sources(data.sources)
    assert source.stream is not None
    for _ in range(2):
        batches = [batch for batch, _ in read_stream("chat", source.stream, source.field, source.template, size=1000)]
        assert [text for batch in batches for text in batch.texts] == ["A\nfirst", "B\nsecond"]


def test_a_module_is_trained_with_a_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, callbacks = example("model", monkeypatch), example("callback", monkeypatch)
    config = Config.model_validate(
        {
            "name": "wave",
            "runs": str(tmp_path),
            "train": {"steps": 3, "global_batch": 8, "device": "cpu"},
            "parallel": {"threads": 1},
            "telemetry": {"report": False},
        }
    )
    rows = [own.Rows()[index] for index in range(4)]
    check_model(own.Wave(), own.loss, {key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    run = headway.train(
        config, model=own.Wave(), dataset=own.Rows(), loss=own.loss, callbacks=[callbacks.TokensPerStep()]
    )
    assert run.step == 3
    assert run.metrics.last("mine/tokens") is not None


def test_a_tracker_gets_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example("tracker", monkeypatch)
    run, values = write_run(tmp_path, steps(1, 3)), tmp_path / "values.jsonl"
    tracker = TrackConfig.model_validate({"own_tracker:JsonLines": {"path": str(values)}})
    follow(run, tracker, "track.0", report=lambda text: None, waiting=Waiting(lambda: True))
    lines = list(map(json.loads, values.read_text().splitlines()))
    losses = [line["value"] for line in lines if line.get("name") == "train/loss"]
    assert losses == [1.0, 1 / 2, 1 / 3]
    assert lines[0]["parameters"]["train.steps"] == "10" and lines[-1] == {"status": "finished"}


class Stop(headway.Callback):
    """Ends an attempt after a checkpoint."""

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise KeyError("stopped")


def test_a_strategy_and_an_optimizer_from_outside_train_plan_and_resume_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = example("model", monkeypatch)
    strategy, _ = example("strategy", monkeypatch), example("optimizer", monkeypatch)
    reduced, reduce = [], strategy.PlainDataParallel.reduce
    monkeypatch.setattr(strategy.PlainDataParallel, "reduce", lambda self: reduced.append(1) or reduce(self))

    def config(name: str) -> Config:
        return Config.model_validate(
            {
                "name": name,
                "runs": str(tmp_path),
                "train": {"steps": 4, "global_batch": 8, "device": "cpu"},
                "parallel": {"threads": 1, "strategy": "own_strategy:PLAIN"},
                "optimizer": {"name": "own_optimizer:SIGNUM"},
                "checkpoint": {"every": "2 steps"},
                "telemetry": {"report": False},
            }
        )

    def train(name: str, *callbacks: headway.Callback) -> str:
        run = headway.train(config(name), model=own.Wave(), dataset=own.Rows(), loss=own.loss, callbacks=callbacks)
        return state_hash(run.directory)

    whole = train("whole")
    assert len(reduced) == 4, "the strategy has summed the gradients of each step"
    with pytest.raises(KeyError, match="stopped"):
        train("stopped", Stop())
    assert train("stopped") == whole
    assert len(reduced) == 4 + 3 + 2, "the resumed run continues from step 2"
    saved = manifest(tmp_path / "whole")["tensors"]
    assert {name for name in saved if name.startswith("optimizer.")} == {
        f"optimizer.momentum.{name}" for name, _ in own.Wave().named_parameters()
    }


def test_a_strategy_and_an_optimizer_from_outside_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    example("strategy", monkeypatch), example("optimizer", monkeypatch)
    names = ["parallel.strategy=own_strategy:PLAIN", "optimizer.name=own_optimizer:SIGNUM", "train.steps=10"]
    small = ["model.preset=4m", "model.vocab_size=8192", "train.global_batch=16", "train.micro_batch=8"]
    asked = ["plan", "gpu", "--gpus", "2xH100", "--json", *small]

    def plan(*overrides: str) -> dict[str, dict[str, Any]]:
        told = CliRunner().invoke(application.application(("plan",)), [*asked, *overrides])
        assert told.exit_code == 0, told.output
        options = json.loads(told.output)["options"]
        return {option["strategy"]: option for option in options if option["activation_checkpointing"] == "none"}

    own, usual = plan(*names), plan("optimizer.name=lion", "train.steps=10")
    plain = own["own_strategy:PLAIN"]
    # One moment like Lion's, copies of everything like ddp; its sums hide behind nothing.
    assert plain["parts_bytes"]["optimizer"] == usual["ddp"]["parts_bytes"]["optimizer"] > 0
    assert plain["parts_bytes"]["weights"] == usual["ddp"]["parts_bytes"]["weights"]
    assert plain["step_seconds"] > own["ddp"]["step_seconds"]
    assert own.keys() - usual.keys() == {"own_strategy:PLAIN"}
