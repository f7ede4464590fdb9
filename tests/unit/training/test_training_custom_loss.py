"""Losses on logits: summed over the global batch, by documents, with a teacher that is frozen and identified."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headway.api import Trainer, train
from headway.config import Config, ModelConfig, dump_config, load_config, load_resolved
from headway.config.derived.identity import changes
from headway.config.sections.losses import DistillConfig
from headway.core.errors import ConfigError, DataError
from headway.core.functions import name_of_function
from headway.core.types import IGNORE_TARGET
from headway.models.build import build_model, complete
from headway.models.hub import implementation
from headway.models.huggingface.checkpoint import export_model
from headway.plan.layout import Layout
from headway.plan.losses import logits_loss_bytes
from headway.plan.memory import plan_memory
from headway.runs.run_directory import RunDirectory
from headway.session.completed import completed
from headway.training.custom_loss import Distillation, checked, cross_entropy, divergence_from, load_teacher
from headway.training.job import Callback, Job
from headway.training.task import language_model_logits
from support import state_hash

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
    with pytest.raises(ConfigError, match="the function returned has no gradient"):
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
    monkeypatch.setattr(implementation, "choose_implementation", lambda config: "transformers")
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
