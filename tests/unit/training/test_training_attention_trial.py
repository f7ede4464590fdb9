"""Attention on a CPU: the trial that chooses between two ways, when there is none, and what a run keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.config import Config, ModelConfig, override, resolve
from headway.models.decoder import Decoder
from headway.models.layers.attention import attends_by_products, choose_products, has_causal_products
from headway.models.shape import Shape
from headway.parallel.strategy import make_strategy
from headway.parallel.world import World
from headway.run.session.measured_choices import decide_attention
from headway.run.session.process_state import restore_process_state
from headway.training.optimizer import build_optimizer
from headway.training.setup.attention_trial import AttentionSeconds, products_pay
from headway.training.state import TrainState
from headway.training.task import LANGUAGE_MODELLING, Task
from support.states import parts

CPU = torch.device("cpu")
MODEL = ModelConfig(dim=32, layers=2, heads=2, ffn_dim=32, vocab_size=64)
#: So many micro-batches that a trial pays.
MANY = 10**9


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = attends_by_products()
    yield tmp_path / "headway" / "attention.json"
    choose_products(before)


def pays(micro_batches: int) -> bool:
    return products_pay(Shape.of(MODEL), "bf16", rows=2, length=32, micro_batches=micro_batches)


@pytest.mark.parametrize(
    ("products", "kernel", "with_rule", "against_rule"),
    [(1.0, 2.0, True, True), (2.0, 1.0, False, False), (1.05, 1.0, True, False), (1.0, 1.05, True, False)],
)
def test_the_other_way_must_be_clearly_faster(
    products: float, kernel: float, with_rule: bool, against_rule: bool
) -> None:
    seconds = AttentionSeconds(products, kernel)
    assert (seconds.favour_products(True), seconds.favour_products(False)) == (with_rule, against_rule)


@pytest.mark.parametrize("by_rule", [True, False])
def test_a_short_run_follows_the_processor_without_a_trial(by_rule: bool, file: Path) -> None:
    choose_products(by_rule)
    assert pays(1) is by_rule and not file.exists()


def test_a_trial_is_kept_and_decides_for_later_runs(file: Path) -> None:
    choose_products(True)
    pays(MANY)
    assert attends_by_products(), "a trial changes nothing by itself"
    ((key, found),) = json.loads(file.read_text()).items()
    assert min(found.values()) > 0
    for products, expected in ((1.0, True), (9.0, False)):
        file.write_text(json.dumps({key: {"products": products, "kernel": 3.0}}))
        assert pays(1) is expected


def test_a_run_keeps_its_way_of_attention_and_one_from_before_the_rule(file: Path) -> None:
    c = resolve(Config.model_validate({"train": {"steps": MANY, "sequence_length": 32}}))
    world, model = World(0, 1, 0, CPU), Decoder(MODEL)
    state = TrainState(model, build_optimizer(c.optimizer, model, CPU))
    task = Task(model, None, LANGUAGE_MODELLING)  # type: ignore[arg-type]
    assembled = parts(c, task, state, make_strategy(c, model, world), world)

    def decided(**context: bool) -> bool:
        start: Any = SimpleNamespace(context=context)
        return decide_attention(assembled, start)

    for by_rule in (True, False):
        choose_products(by_rule)
        kept = [decided(attention_by_products=before) for before in (True, False)]
        assert kept == [True, False] and decided() is by_rule
    decide_attention(replace(assembled, config=override(c, ["determinism=elastic"])), None)
    assert not file.exists()
    decide_attention(assembled, None)
    assert file.exists(), "a new run tries"


def test_a_run_leaves_the_caller_its_way_of_attention(file: Path) -> None:
    q = torch.zeros(1, 32, 2, 16)
    choose_products(True)
    with restore_process_state():
        choose_products(False)
        assert not has_causal_products(q, q)
    assert has_causal_products(q, q)
