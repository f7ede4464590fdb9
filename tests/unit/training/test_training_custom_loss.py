"""Losses on logits: summed over the global batch, by documents, with a teacher that is frozen and identified."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headway.api import Trainer, train
from headway.config import Config, ModelConfig, dump_config, load_config, load_resolved
from headway.config.derived.identity import changes
from headway.config.sections.losses import DistillConfig
from headway.core.code_identity import code_identity
from headway.core.errors import ConfigError, DataError
from headway.core.functions import load_function, name_of_function
from headway.core.types import IGNORE_TARGET
from headway.lab.plan.layout import Layout
from headway.lab.plan.losses import logits_loss_bytes
from headway.lab.plan.memory import plan_memory
from headway.models.build import build_model, complete
from headway.models.huggingface.export import export_model
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.checks import check_code
from headway.run.session.completed import completed
from headway.training.custom_loss import Distillation, checked, cross_entropy, divergence_from, load_teacher
from headway.training.job import Callback, Job
from headway.training.task import language_model_logits, own_code
from support.runs import state_hash
from support.waits import LONG

PLAIN = """
from torch.nn import functional as F

def plain(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100, reduction="sum")
"""


def reference(taught: Any, ours: Any, counted: Any, temperature: float) -> float:
    """Sum p (log p - log q) in float64, position by position."""
    total = 0.0
    for t, s, counts in zip(np.asarray(taught, float), np.asarray(ours, float), counts_of(counted), strict=True):
        if counts:
            p, q = (np.exp(x / temperature - (x / temperature).max()) for x in (t, s))
            p, q = p / p.sum(), q / q.sum()
            total += float((p * (np.log(p) - np.log(q))).sum())
    return total


def counts_of(targets: Any) -> list[bool]:
    return [target != IGNORE_TARGET for target in targets]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_divergence_is_summed_over_targets_that_count(temperature: float) -> None:
    torch.manual_seed(0)
    taught, ours = 3 * torch.randn(2, 5, 7), 3 * torch.randn(2, 5, 9)  # padded by two more rows
    targets = torch.tensor([[1, IGNORE_TARGET, 2, 3, 0], [IGNORE_TARGET, 4, 5, 6, IGNORE_TARGET]])
    found = float(divergence_from(taught, ours, targets, temperature))
    wanted = reference(taught.flatten(0, 1), ours[..., :7].flatten(0, 1), targets.flatten().tolist(), temperature)
    assert found == pytest.approx(wanted, rel=1e-5) and found > 1.0
    assert float(divergence_from(ours, ours, targets, temperature)) == pytest.approx(0.0, abs=1e-5)


def small(seed: int, dim: int = 16) -> nn.Module:
    return build_model(ModelConfig(dim=dim, layers=1, heads=2, ffn_dim=32, init_std=0.3), vocab_size=60, seed=seed)


def rows(documents: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 60, (2, 8))
    batch = {"ids": ids, "targets": ids.roll(-1, 1)}
    if documents:  # two in the first row, one in the second
        numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [2] * 8])
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], list(range(8))])
        batch |= {
            "documents": numbers,
            "positions": positions,
            "document_bounds": torch.tensor([0, 3, 8, 16], dtype=torch.int32),
        }
    return batch


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_teacher_is_weighed_against_the_loss(weight: float) -> None:
    teacher, student, batch = small(1, 32).eval(), small(2), rows(False)
    settings = DistillConfig(teacher="teacher", weight=weight, temperature=2.0)
    loss = Distillation(teacher, settings, language_model_logits, cross_entropy)
    logits = language_model_logits(student, batch)
    found = loss(logits, batch)
    with torch.no_grad():
        divergence = reference(teacher(batch["ids"]).flatten(0, 1), logits.detach().flatten(0, 1), [0] * 16, 2.0)
        entropy = float(student(batch["ids"], batch["targets"]))
    assert float(found.detach()) == pytest.approx((1 - weight) * entropy + weight * 4 * divergence, rel=1e-4)
    found.backward()
    assert all(p.grad is None for p in teacher.parameters()) and all(p.grad is not None for p in student.parameters())


def test_packed_documents_are_taught_one_by_one() -> None:
    teacher, student, batch = small(1).eval(), small(2), rows(True)
    settings = DistillConfig(teacher="teacher", weight=1.0)
    loss = Distillation(teacher, settings, language_model_logits, cross_entropy)
    with torch.no_grad():
        packed = float(loss(language_model_logits(student, batch), batch))
        alone = 0.0
        for row, first, last in ((0, 0, 3), (0, 3, 8), (1, 0, 8)):
            part = {key: batch[key][row : row + 1, first:last] for key in ("ids", "targets")}
            alone += float(loss(language_model_logits(student, part), part))
        whole = {key: batch[key] for key in ("ids", "targets")}
        together = float(loss(language_model_logits(student, whole), whole))
    assert packed == pytest.approx(alone, rel=1e-4) and abs(packed - together) > 1e-2


def test_a_teacher_is_frozen_in_evaluation_mode_and_its_buffers_keep_their_type(corpus: Path, tmp_path: Path) -> None:
    shape = ModelConfig(dim=16, layers=1, heads=2, ffn_dim=32, dropout=0.5)
    export_model(build_model(shape, vocab_size=300, seed=1), tmp_path / "teacher", corpus / "store/tokenizer")
    settings = DistillConfig(teacher=tmp_path / "teacher")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        teacher = load_teacher(settings, precision)
        assert not teacher.training and {p.dtype for p in teacher.parameters()} == {dtype}
        assert not any(p.requires_grad for p in teacher.parameters())
        assert {buffer.dtype for buffer in teacher.buffers()} == {torch.float32}


@pytest.mark.parametrize("result", [1.0, torch.zeros(2), torch.tensor(1)])
def test_what_is_no_loss_is_refused(result: Any) -> None:
    with pytest.raises(ConfigError, match="not one number"):
        checked(lambda logits, batch: result, "mine:loss")(torch.zeros(1, 1, 2), {})


@pytest.mark.parametrize("detached", [lambda x: x.detach().sum(), lambda x: torch.tensor(float(x.detach().sum()))])
def test_a_loss_without_a_gradient_is_explained_before_the_first_step(detached: Any, tiny: Callable[..., Path]) -> None:
    assert checked(lambda logits, batch: logits.sum(), "mine:loss")(torch.ones(1, 1, 2, requires_grad=True), {}) == 2
    with torch.no_grad():  # an evaluation asks for no gradient
        checked(lambda logits, batch: detached(logits), "mine:loss")(torch.ones(1, 1, 2), {})
    with pytest.raises(ConfigError, match="mine:loss returned has no gradient") as caught:
        checked(lambda logits, batch: detached(logits), "mine:loss")(torch.ones(1, 1, 2, requires_grad=True), {})
    assert "detach()" in caught.value.fix
    config = load_config(tiny(train={"steps": 1}))
    with pytest.raises(ConfigError, match="returned has no gradient"):
        Trainer(nn.Linear(1, 1), [torch.ones(1)], lambda model, batch: detached(model(batch)), config).fit()
    assert not list(config.run_directory.glob("checkpoints/step-*"))


def test_a_function_without_a_name_is_refused() -> None:
    assert name_of_function(cross_entropy, "loss") == "headway.training.custom_loss:cross_entropy"
    with pytest.raises(ConfigError, match="no function of a module"):
        name_of_function(lambda logits, batch: logits, "loss")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parallel": {"tensor": 2, "workers": 2}}, "parallel.tensor"),
        ({"parallel": {"context": 2, "workers": 2}}, "parallel.context"),
        ({"model": {"experts": 4}}, "balance the experts"),
    ],
)
def test_what_a_loss_on_logits_does_not_go_with_is_refused(
    sections: dict[str, Any], words: str, tiny: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(tiny(loss="mine:loss", **sections))


def test_a_module_of_ones_own_brings_its_loss(tmp_path: Path) -> None:
    config = Config(runs=tmp_path, loss="mine:loss").model_copy(
        update={"train": Config().train.model_copy(update={"steps": 1})}
    )
    with pytest.raises(ConfigError, match="brings its loss"):
        Trainer(nn.Linear(1, 1), [1.0], lambda model, batch: torch.zeros(()), config).fit()


class _Dies(Callback):
    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise RuntimeError("lost")


def test_a_loss_of_ones_own_is_summed_over_the_global_batch_and_resumed(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "plain_loss.py"
    module.write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    config = load_config(tiny(train={"steps": 4}, model={"dropout": 0.0}, evaluation={"every": "2 steps"}))
    own = config.model_copy(update={"loss": "plain_loss:plain"})
    built_in, whole = train(config), train(own.model_copy(update={"name": "whole"}))
    for metric in ("train/loss", "train/grad_norm", "evaluation/loss"):
        ours, theirs = (run.metrics.series(metric)[1] for run in (whole, built_in))
        assert list(ours) == pytest.approx(list(theirs), rel=1e-3)
    killed = own.model_copy(update={"name": "killed"})
    with pytest.raises(RuntimeError, match="lost"):
        train(killed, callbacks=[_Dies()])
    module.write_text(PLAIN + "# edited\n")
    with pytest.raises(DataError, match="source of the loss has changed"):
        train(killed)
    module.write_text(PLAIN)
    train(killed)
    assert state_hash(killed.run_directory) == state_hash(whole.directory)


def notebook(text: str, monkeypatch: pytest.MonkeyPatch, launcher: Path) -> Any:
    """Run a cell as a kernel does: `__main__` is the module of the launcher, whatever cell it runs."""
    main: Any = types.ModuleType("__main__")
    main.__file__ = str(launcher)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, "<ipython-input-1>", "exec"), vars(main))
    return main


def test_a_loss_of_a_notebook_cell_is_its_code(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of `__main__` is that of the kernel's launcher, which no edit of a cell changes."""
    launcher = tmp_path / "ipykernel_launcher.py"
    launcher.write_text("start()\n")
    cell = "SCALE = 1.0\n" + PLAIN.replace("return F", "return SCALE * F")
    config = load_config(tiny(train={"steps": 4}, model={"dropout": 0.0}))
    whole = train(config.model_copy(update={"name": "whole"}), loss=notebook(cell, monkeypatch, launcher).plain)
    with pytest.raises(RuntimeError, match="lost"):
        train(config, loss=notebook(cell, monkeypatch, launcher).plain, callbacks=[_Dies()])
    for edit in (("SCALE = 1.0", "SCALE = 2.0"), ("SCALE *", "0.5 * SCALE *")):
        edited = notebook(cell.replace(*edit), monkeypatch, launcher).plain
        with pytest.raises(DataError, match="code, or a value that it reads, of the loss has changed"):
            train(config, loss=edited)
    again = notebook(f"# run again\n\n{cell}", monkeypatch, launcher).plain
    train(config, loss=again)
    assert state_hash(config.run_directory) == state_hash(whole.directory)


def test_what_worker_processes_cannot_import_is_refused(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny(parallel={"workers": 2}))
    with pytest.raises(ConfigError, match="worker processes cannot import __main__:plain"):
        train(config, loss=notebook(PLAIN, monkeypatch, tmp_path / "launcher.py").plain)


def test_standard_input_may_define_a_loss(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Its `__main__` has the file "<stdin>", which does not exist."""
    path = tiny(train={"steps": 4})
    script = f"{PLAIN}\nimport headway\nheadway.train(headway.load_config({str(path)!r}), loss=plain)\n"

    def run(text: str, **variables: str) -> tuple[int, str]:
        environment = {**os.environ, **variables}
        done = subprocess.run(
            [sys.executable, "-"],
            input=text,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
            env=environment,
        )
        return done.returncode, done.stderr

    code, said = run(script, HEADWAY_FAULTS="stop@step=2")
    assert code and "is saved" in said, said
    code, said = run(script.replace("F.cross_entropy", "2 * F.cross_entropy"))
    assert code and "of the loss has changed" in said, said
    code, said = run(script)
    assert code == 0 and "resuming from" in said, said


def test_a_module_of_ones_own_continues_with_other_code_only_if_accepted(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import torch\nclass Mine(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n"
        "def loss(model, batch):\n    return model(batch).square().mean()\n"
    )
    config, rows = load_config(tiny(train={"steps": 4}, checkpoint={"every": "1 step"})), torch.ones(64, 1)

    def fit(text: str, callbacks: Sequence[Callback] = (), **options: bool) -> None:
        main = notebook(text, monkeypatch, tmp_path / "script.py")
        Trainer(main.Mine(1, 1), rows, main.loss, config, callbacks=callbacks).fit(**options)

    with pytest.raises(RuntimeError, match="lost"):
        fit(text, [_Dies()])
    with pytest.raises(DataError, match="of the loss has changed") as caught:
        fit(text.replace("square", "abs"))
    assert "accept_changes=True" in (caught.value.fix or "")
    with pytest.raises(DataError, match="of the model has changed"):
        fit(text.replace("forward(x)\n", "forward(2 * x)\n"))
    fit(text.replace("square", "abs"), accept_changes=True)


def test_own_specs_and_callbacks_count_with_the_modules_that_build_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec may name a builder in another module."""
    spec, builder, callbacks = (tmp_path / f"counted_{name}.py" for name in ("spec", "builder", "callbacks"))
    spec.write_text(
        "from headway.config import OptimizerSpec\n"
        "MINE = OptimizerSpec(name='mine', build='counted_builder:build', moment_bytes=len, update_bytes=len)\n"
    )
    builder.write_text("def build(inputs):\n    return None\n")
    callbacks.write_text("from headway import Callback\nclass Own(Callback):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(callbacks=["counted_callbacks:Own"])
    optimizer = config.optimizer.model_copy(update={"name": "counted_spec:MINE"})
    config = config.model_copy(update={"optimizer": optimizer})

    def code() -> dict[str, str]:
        for name in ("counted_spec", "counted_builder", "counted_callbacks"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return own_code(config.callbacks, config.optimizer.name, config.parallel.strategy)

    first = code()
    assert set(first) == {"optimizer.name", "callbacks counted_callbacks:Own"} and code() == first
    assert own_code([], "adamw", "auto") == {}
    for file, key in (
        (spec, "optimizer.name"),
        (builder, "optimizer.name"),
        (callbacks, "callbacks counted_callbacks:Own"),
    ):
        kept = file.read_text()
        file.write_text(f"{kept}\nMORE = 1\n")
        assert {name for name, value in code().items() if value != first[name]} == {key}
        file.write_text(kept)
    known = checkpoint_of(code=first)
    builder.write_text("def build(inputs):\n    return 1\n")
    with pytest.raises(DataError, match=r"source of the optimizer.name has changed"):
        check_code(config.loss, code(), known, accept=False)


def checkpoint_of(**context: Any) -> Any:
    return SimpleNamespace(path=Path("step-00000004"), context=context)


def test_a_run_of_an_earlier_version_continues_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "ipykernel_launcher.py"
    launcher.write_text("start()\n")
    main = notebook(PLAIN, monkeypatch, launcher)
    cell, config = code_identity(main.plain, main, "loss"), Config(loss="__main__:plain")
    of_launcher = hashlib.sha256(launcher.read_bytes()).hexdigest()
    # As they were written: the file of `__main__` for a cell, the version of Python for `python -c`.
    for before in (of_launcher, "built into Python 3.11"):
        check_code(config.loss, {"loss": cell}, checkpoint_of(loss=before), accept=False)
        assert "the code of loss is identified anew" in capsys.readouterr().err
    check_code(config.loss, {"loss": cell, "model": cell}, checkpoint_of(loss=cell), accept=False)
    assert "step-00000004 does not know the code of model" in capsys.readouterr().err
    newer = cell.replace("python-3.", "python-3.9")
    check_code(config.loss, {"loss": cell}, checkpoint_of(loss=newer, code={}), accept=False)
    assert "compiled by another version of Python" in capsys.readouterr().err
    check_code(config.loss, {"callbacks Mine": cell}, checkpoint_of(code={"callbacks Mine": newer[::-1]}), accept=False)
    assert "continues with changed code of callbacks Mine" in capsys.readouterr().err
    with pytest.raises(DataError, match="of the loss has changed"):  # a run of this version knows what it began with
        check_code(config.loss, {"loss": cell}, checkpoint_of(loss=of_launcher, code={}), accept=False)
    # A module that names the function of another one.
    for name, text in (("defines_it.py", PLAIN), ("names_it.py", "from defines_it import plain\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    named = Config(loss="names_it:plain")
    module, function = load_function("names_it:plain", "loss")
    now = code_identity(function, module, "loss")
    old = hashlib.sha256((tmp_path / "names_it.py").read_bytes()).hexdigest()
    check_code(named.loss, {"loss": now}, checkpoint_of(loss=old), accept=False)
    assert "identified anew" in capsys.readouterr().err
    with pytest.raises(DataError, match="source of the loss has changed"):
        check_code(named.loss, {"loss": now}, checkpoint_of(loss="0" * 64), accept=False)


def test_a_distilled_run_is_resumed_with_its_teacher_only(
    tiny: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    shape, folder = ModelConfig(dim=16, layers=1, heads=2, ffn_dim=32), tmp_path / "teacher"
    export_model(build_model(shape, vocab_size=300, seed=1), folder, corpus / "store/tokenizer")
    config = load_config(tiny(train={"steps": 4}, distill={"teacher": str(folder), "weight": 0.5}))
    whole = train(config.model_copy(update={"name": "whole"}))
    with pytest.raises(RuntimeError, match="lost"):
        train(config, callbacks=[_Dies()])
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="teacher has changed"):
        train(config)
    weights.write_bytes(content)
    train(config)
    assert state_hash(config.run_directory) == state_hash(whole.directory)


def test_a_teacher_stays_with_the_code_that_the_run_began_with(
    tiny: Callable[..., Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    shape, folder = ModelConfig(dim=16, layers=1, heads=2, ffn_dim=32), tmp_path / "teacher"
    export_model(build_model(shape, vocab_size=300, seed=1), folder, corpus / "store/tokenizer")
    config = load_config(tiny(distill={"teacher": str(folder)}))
    begun = completed(config)[0]
    assert begun.distill is not None and begun.distill.implementation == "native"
    saved = RunDirectory(begun.run_directory).config_path
    saved.parent.mkdir(parents=True)
    # A later version chooses other code for the teacher.
    monkeypatch.setattr("headway.run.session.completed.choose_implementation", lambda config: "transformers")
    for kept in ("native", "auto"):  # `auto`: a version that did not keep it
        saved.write_text(dump_config(begun).replace("implementation: native", f"implementation: {kept}"))
        resumed = completed(config)[0]
        assert resumed.distill is not None and resumed.distill.implementation == kept
        assert not changes(load_resolved(saved), resumed)
    shutil.copytree(folder, tmp_path / "other")
    other = completed(load_config(tiny(distill={"teacher": str(tmp_path / "other")})))[0]
    assert other.distill is not None and other.distill.implementation == "transformers", "its own code"
    saved.unlink()
    anew = completed(config)[0]
    assert anew.distill is not None and anew.distill.implementation == "transformers"
    assert type(load_teacher(anew.distill, "fp32")).__name__ == "TransformersModel"
    assert type(load_teacher(begun.distill, "fp32")).__name__ == "Decoder"


@pytest.mark.parametrize(("precision", "element"), [("fp32", 4), ("bf16", 2)])
def test_the_plan_counts_logits_and_the_teacher(
    precision: str, element: int, tiny: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    shape, folder = ModelConfig(dim=16, layers=1, heads=2, ffn_dim=32), tmp_path / "teacher"
    teacher = build_model(shape, vocab_size=300, seed=1)
    export_model(teacher, folder, corpus / "store/tokenizer")
    parameters = sum(p.numel() for p in teacher.parameters())
    kinds: dict[str, Any] = {"plain": {}, "loss": {"loss": "a:b"}, "distill": {"distill": {"teacher": str(folder)}}}
    plans = {}
    for name, sections in kinds.items():
        config = load_config(tiny(train={"precision": precision, "micro_batch": 8}, **sections))
        moments = plan_memory(config, complete(config.model, 300), Layout.of(config, 1), "cpu").moments
        plans[name] = {moment.name: moment for moment in moments}
    assert {m.weights - plans["plain"][n].weights for n, m in plans["distill"].items()} == {element * parameters}
    assert plans["distill"]["loss"].buffers > plans["loss"]["loss"].buffers > plans["plain"]["loss"].buffers
    # The cross-entropy keeps its softmax in fp32 beside the logits, and copies those that are in 16 bits.
    least = (8 if precision == "fp32" else 10) * 256 * 320
    forward, backward = logits_loss_bytes(config.model_copy(update={"distill": None}), 320, 32, 256)
    assert least <= forward <= 1.3 * least and 12 * 256 * 320 <= backward <= 1.5 * 12 * 256 * 320
