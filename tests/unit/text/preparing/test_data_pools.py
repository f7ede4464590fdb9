"""Units that other machines process: the store has the bytes of one machine, and nothing finished is done twice."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.data.loss_mask import MASK
from headway.text.preparing import tasks as tasks_module
from headway.text.preparing.pieces import Verdict
from headway.text.preparing.pools import Line, UnitJob
from headway.text.preparing.prepare import prepare
from headway.text.preparing.tasks import Order, UnitTask, error_from_json, error_json, process, result_files
from headway.text.reading import sources as source_module
from support.chat import chat_tokenizer, conversation, write_records
from support.runs import store_contents

Configs = Callable[..., DataConfig]


class Pool:
    """Other machines, in this process: what they get and what they return travels as text and as files.

    Args:
        seed: Of the order in which units are finished.
        dies_after: Number of finished units after which the preparation is killed.
        twice: Every unit is processed twice, as when a machine that was thought dead lives on.
        before: Called before each task.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        dies_after: int | None = None,
        twice: bool = False,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._draw, self._left, self._twice, self._before = random.Random(seed), dies_after, twice, before
        self.checked = 0
        self.done: Counter[str] = Counter()

    def check(self) -> None:
        self.checked += 1

    @contextmanager
    def open(self, order: Order) -> Iterator[Line]:
        self._order = Order.from_json(json.loads(json.dumps(order.to_json())))
        assert self._order == order
        self._jobs: list[UnitJob] = []
        yield self

    def submit(self, job: UnitJob) -> None:
        self._jobs.append(job)

    def drain(self) -> None:
        self._draw.shuffle(self._jobs)
        for job in self._jobs:
            for _ in range(1 + self._twice):
                self._run(json.dumps(job.task().to_json()))
            assert job.accept_recorded()
            if self._left is not None:
                self._left -= 1
                if not self._left:
                    raise KeyboardInterrupt
        self._jobs.clear()

    def _run(self, text: str) -> None:
        self._before()
        task = UnitTask.from_json(json.loads(text))
        with tempfile.TemporaryDirectory() as scratch:
            process(self._order, [task], Path(scratch), self._deliver)
        self.done[task.record] += 1

    def _deliver(self, results: Path) -> None:
        names = result_files(results)
        assert names[-1].endswith((".shards.json", ".survey.json"))
        for name in names:
            (self._order.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(results / name, self._order.folder / name)


@pytest.fixture
def data(tmp_path: Path, config: Configs, documents: Any, jsonl: Any, monkeypatch: pytest.MonkeyPatch) -> Configs:
    """A config of two sources in several units, with duplicates of documents and paragraphs across them."""
    monkeypatch.setattr(source_module, "PIECE_BYTES", 1500)
    texts = [f"{text}\n\nThe footer that is on every page of this corpus." for text in documents(60, words=80)]
    jsonl(tmp_path / "a.jsonl", texts)
    jsonl(tmp_path / "b.jsonl", [*texts[10:30], *(f"{text} changed" for text in texts[:5]), "", *documents(9, seed=3)])

    def make(store: str, **values: Any) -> DataConfig:
        dedup = {"documents": True, "near": True, "paragraphs": True, "max_removed": 0.9, "max_removed_per_source": 1.0}
        steps = [{"step": "unicode"}, {"step": "length", "min_words": 5}]
        values = {"dedup": dedup, "clean": steps, "shard_bytes": 3000, "validation": 0.1, **values}
        return config(["a.jsonl", "b.jsonl"], store=tmp_path / store, **values)

    return make


@pytest.mark.parametrize("dedup", [True, False])
def test_bytes_do_not_depend_on_machines_or_their_order(data: Configs, dedup: bool) -> None:
    values: dict[str, Any] = {} if dedup else {"dedup": {}}
    prepare(data("one", **values), workers=1)
    wanted = store_contents(data("one").store)
    for seed in range(1 + dedup):
        pool = Pool(seed)
        report = prepare(data(f"many{seed}", **values), workers=1, pool=pool)
        assert store_contents(data(f"many{seed}").store) == wanted
        assert pool.checked == 1 and len(pool.done) >= (16 if dedup else 8) and set(pool.done.values()) == {1}
        assert (report.removed > 20) is dedup
    assert prepare(data("many0", **values), workers=1, pool=(again := Pool())).up_to_date and not again.done


@pytest.mark.parametrize("dies_after", [5, 14])
def test_after_a_kill_nothing_finished_is_done_twice(data: Configs, dies_after: int) -> None:
    prepare(data("one"), workers=1)
    first, second = Pool(1, dies_after=dies_after), Pool(2)
    with pytest.raises(KeyboardInterrupt):
        prepare(data("many"), workers=1, pool=first)
    assert sum(first.done.values()) == dies_after
    prepare(data("many"), workers=1, pool=second)
    assert not first.done.keys() & second.done.keys() and set(second.done.values()) == {1}
    assert store_contents(data("many").store) == store_contents(data("one").store)


def test_work_of_one_machine_is_continued_by_others_and_the_other_way_round(data: Configs) -> None:
    prepare(data("one"), workers=1)
    with pytest.raises(KeyboardInterrupt):
        prepare(data("many"), workers=1, pool=Pool(dies_after=3))
    prepare(data("many"), workers=1)
    assert store_contents(data("many").store) == store_contents(data("one").store)


def test_a_unit_that_two_machines_process_leaves_the_same_bytes(data: Configs) -> None:
    prepare(data("one"), workers=1)
    prepare(data("many"), workers=1, pool=Pool(twice=True))
    assert store_contents(data("many").store) == store_contents(data("one").store)


def test_streams_and_limits_stay_on_this_machine(tmp_path: Path, config: Configs, documents: Any, jsonl: Any) -> None:
    jsonl(tmp_path / "a.jsonl", documents(40))
    jsonl(tmp_path / "b.jsonl", documents(40, seed=2))
    sources: list[Any] = ["a.jsonl", {"path": "b.jsonl", "limit": "25 documents"}, {"path": "python:", "name": "live"}]
    pool, stores = Pool(), []
    for place in ("one", "many"):
        values = {"dedup": {"documents": True, "max_removed": 0.9, "max_removed_per_source": 1.0}}
        settings = config(sources, store=tmp_path / place, **values)
        texts = {"live": documents(30, seed=5) + documents(5)}
        prepare(settings, workers=1, iterables=texts, pool=pool if place == "many" else None)
        stores.append(store_contents(settings.store))
    assert stores[0] == stores[1]
    # The survey and the shards of the first source; of the second the shards too, once the limit is known.
    assert len(pool.done) == 3


def test_the_loss_mask_of_conversations_is_that_of_one_machine(tmp_path: Path, config: Configs) -> None:
    pytest.importorskip("transformers")
    write_records(tmp_path / "chats.jsonl", [{"messages": conversation(n, turns=1 + n % 3)} for n in range(12)])
    tokenizer = {"path": str(chat_tokenizer(tmp_path / "tokenizer"))}
    pool = Pool()
    for store, machines in (("one", None), ("many", pool)):
        source = {"path": "chats.jsonl", "format": "chat"}
        data = config([source], store=tmp_path / store, tokenizer=tokenizer, shard_bytes=600, validation=0.3)
        report = prepare(data, workers=1, pool=machines)
        assert report.describe().count("of them trained") == 1
    assert store_contents(tmp_path / "many") == store_contents(tmp_path / "one") and pool.done
    assert [name for name in store_contents(tmp_path / "many") if name.endswith(MASK)]


def test_an_error_there_is_the_error_here_and_finished_work_stays(data: Configs, tmp_path: Path) -> None:
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError) as wanted:
        prepare(data("one", dedup={}), workers=1)
    with pytest.raises(DataError) as caught:
        prepare(data("many", dedup={}), workers=1, pool=Pool())
    assert caught.value.render() == wanted.value.render()
    skipping = {"dedup": {}, "bad_documents": "skip"}
    prepare(data("one", **skipping), workers=1)
    prepare(data("many", **skipping), workers=1, pool=Pool())
    assert store_contents(data("many").store) == store_contents(data("one").store)


def test_a_machine_with_another_input_or_version_is_refused(
    data: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (tmp_path / "a.jsonl").read_text()

    def change() -> None:
        (tmp_path / "a.jsonl").write_text(text.replace("quick", "quack"))

    with pytest.raises(DataError, match=r"differs|changed"):
        prepare(data("many"), workers=1, pool=Pool(before=change))
    (tmp_path / "a.jsonl").write_text(text)

    def remove() -> None:
        (tmp_path / "a.jsonl").rename(tmp_path / "elsewhere.jsonl")

    with pytest.raises(DataError, match="cannot be read") as caught:
        prepare(data("many"), workers=1, pool=Pool(before=remove))
    assert " on " in str(caught.value.where) and "shared folder" in str(caught.value.fix)
    (tmp_path / "elsewhere.jsonl").rename(tmp_path / "a.jsonl")

    def upgrade() -> None:
        monkeypatch.setattr(tasks_module, "__version__", "99")

    with pytest.raises(DataError, match=r"this machine has Headway 99 .*, the one that prepares"):
        prepare(data("many"), workers=1, pool=Pool(before=upgrade))


def test_verdicts_and_errors_survive_as_text() -> None:
    draw = np.random.default_rng(0)
    for count in (0, 1, 8, 77):
        keep, paragraphs = draw.random(count) < 0.5, draw.random(3 * count) < 0.5
        verdict = Verdict(keep, paragraphs, np.full(int(keep.sum()), 3, dtype=np.int64))
        task = UnitTask("a", None, "s", (), [], (verdict, Verdict(keep)))
        found = UnitTask.from_json(json.loads(json.dumps(task.to_json())))
        assert found.record == ".work/s.shards.json"
        assert np.array_equal(found.verdicts[0].keep, keep) and np.array_equal(found.verdicts[1].keep, keep)
        assert np.array_equal(found.verdicts[0].paragraphs, paragraphs)  # type: ignore[arg-type]
        assert np.array_equal(found.verdicts[0].paragraph_counts, verdict.paragraph_counts)  # type: ignore[arg-type]
        assert found.verdicts[1].paragraphs is None
    error = DataError("no", where="there", fix="this")
    assert type(error_from_json(error_json(error))) is DataError
    assert error_from_json(error_json(error)).render() == error.render()
