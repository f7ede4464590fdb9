"""Rows none of whose tokens is trained: left out of a store's rows, and in no other store.

Right values come from reading all rows of the same store, whose manifest lacks the entry that leaves them out.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headway.api import train
from headway.config import Config, resolve
from headway.config.sections.data import DataConfig
from headway.core.types import IGNORE_TARGET
from headway.data.feeding import packing_plans
from headway.data.feeding.micro_batches import micro_batch_of
from headway.data.feeding.rows import SourceRows, open_rows
from headway.data.feeding.split import SplitRows
from headway.data.loss_mask import ROWS_WITHOUT_TARGET
from headway.data.store import TokenStore
from headway.run.directory.ledger_proof import prove
from headway.telemetry.metrics import WITHOUT_TARGET, read_metrics
from headway.text.preparing.prepare import prepare
from support.chat import WORDS, chat_tokenizer, write_records
from support.runs import headway, manifest

pytest.importorskip("transformers")

LENGTH = 24
#: Long questions with short answers, so that most rows have no target.
RECORDS = [
    {
        "messages": [
            {"role": "user", "content": " ".join(WORDS[(number + place) % len(WORDS)] for place in range(9 * number))},
            {"role": "assistant", "content": WORDS[number % len(WORDS)]},
        ]
    }
    for number in range(1, 40)
]


def data_config(validation: float = 0) -> DataConfig:
    write_records(Path("chats.jsonl"), RECORDS)
    sources = [{"path": "chats.jsonl", "format": "chat"}]
    tokenizer = {"path": str(chat_tokenizer(Path("tokenizer")))}
    values = {"sources": sources, "store": "store", "tokenizer": tokenizer, "validation": validation}
    return DataConfig.model_validate(values)


def made_store(validation: float = 0) -> TokenStore:
    prepare(data_config(validation), workers=1)
    return TokenStore.open(Path("store"))


def of_an_earlier_version(store: TokenStore) -> TokenStore:
    """The same store, which says nothing of such rows."""
    path = store.path / "manifest.json"
    content = json.loads(path.read_text())
    for split in content["splits"].values():
        for part in split.values():
            part.pop(ROWS_WITHOUT_TARGET, None)
    path.write_text(json.dumps(content))
    return TokenStore.open(store.path)


def rows_of(rows: SourceRows) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The inputs and targets of each row."""
    batch = micro_batch_of(rows.read(np.arange(rows.count)))
    pairs = zip(batch["ids"].tolist(), batch["targets"].tolist(), strict=True)
    return [(tuple(ids), tuple(targets)) for ids, targets in pairs]


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
def test_rows_without_a_target_are_left_out(packing: str, document_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_plans, "_MASK_TOKENS", 64)  # read in many parts
    store = made_store()
    rows = open_rows(store, "train", "chats", LENGTH, packing, document_mask=document_mask)
    kept, figures = rows_of(rows), rows.figures()
    whole = rows_of(
        open_rows(of_an_earlier_version(store), "train", "chats", LENGTH, packing, document_mask=document_mask)
    )
    with_target = [row for row in whole if set(row[1]) != {IGNORE_TARGET}]
    assert 0 < len(with_target) < len(whole) and rows.count == figures.rows == len(kept)
    if packing == "best_fit":  # pieces without a target leave room for others, which share rows then
        targets = [sorted(t for _, row in found for t in row if t != IGNORE_TARGET) for found in (kept, with_target)]
        assert targets[0] == targets[1] and all(set(row) != {IGNORE_TARGET} for _, row in kept)
        assert len(kept) <= len(with_target)
    else:
        assert kept == with_target
        assert figures.untrained == len(whole) - len(kept)
        assert figures.untrained_share == 1 - len(kept) / len(whole)


def test_a_store_of_an_earlier_version_keeps_its_rows_and_plans() -> None:
    store = made_store()
    open_rows(store, "train", "chats", LENGTH, "pad")
    made = {folder.name for folder in Path("store/packing").glob("*/*/*/*")}
    old = of_an_earlier_version(store)
    assert open_rows(old, "train", "chats", LENGTH).count == (old.tokens("train") - 1) // LENGTH
    open_rows(old, "train", "chats", LENGTH, "pad")
    assert not made & {folder.name for folder in Path("store/packing").glob("*/*/*/*")}
    told = SplitRows(old, "train", LENGTH).untrained_notice(LENGTH)
    assert told is not None and told.endswith("left out: none of chats, which an earlier version prepared")


def run_config(validation: float = 0, evaluation: dict[str, int] | None = None, **train: int) -> Config:
    values = {
        "name": "chats",
        "runs": "runs",
        "data": data_config(validation).model_dump(mode="json"),
        "evaluation": evaluation or {},
        "model": {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 32},
        "train": {"steps": 30, "sequence_length": LENGTH, "global_batch": 1, "device": "cpu", **train},
        "health": {"on_nonfinite": "rollback"},
        "checkpoint": {"every": "30 steps"},
        "supervise": {"max_failures": 0},
        "telemetry": {"report": False, "log_every": 1},
    }
    return resolve(Config.model_validate(values))


def test_steps_without_a_target_are_named_and_no_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    """In a row of more than `train.skip_limit`, with a rule that rolls back: neither takes them for trouble."""
    of_an_earlier_version(made_store())
    train(run_config(skip_limit=2))
    metrics, said = read_metrics(Path("runs/chats")), capsys.readouterr().err
    without, _ = metrics.series(WITHOUT_TARGET)
    trained, losses = metrics.series("train/loss")
    assert sorted([*without.tolist(), *trained.tolist()]) == [*range(1, 31)] and len(without) > 20
    assert np.isfinite(losses).all() and (np.diff(without) == 1).sum() > 2
    cursor = {"step": 30, "skipped_steps": 0, "skipped_in_row": 0, "steps_without_target": len(without)}
    assert manifest(Path("runs/chats"))["cursor"] == cursor
    assert prove(Path("runs/chats")).not_updated == len(without), "their rows changed no weight"
    assert said.count(" · no target · ") == len(without) and "nan" not in said and "going back" not in said


def test_an_evaluation_without_a_target_is_no_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    store = of_an_earlier_version(made_store(0.3))
    assert set(rows_of(open_rows(store, "validation", "chats", LENGTH))[0][1]) == {IGNORE_TARGET}
    train(run_config(0.3, {"rows": 1}, steps=2))
    assert not len(read_metrics(Path("runs/chats")).series("evaluation/loss")[0])
    assert "no token of the rows for validation is trained" in capsys.readouterr().err


def test_the_start_and_the_preparation_name_the_share(capsys: pytest.CaptureFixture[str]) -> None:
    made_store()
    train(run_config(steps=4))
    expected = "rows of 24 tokens without a trained one, left out: chats 92.0 %"
    said = capsys.readouterr().err
    assert expected in said and "no target" not in said
    assert not prove(Path("runs/chats")).problems
    Path("run.yaml").write_text(json.dumps(run_config().model_dump(mode="json", exclude_defaults=True)))
    assert expected in headway("data", "prepare", "run.yaml").stderr
