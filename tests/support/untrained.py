"""Runs that do all that a run does but train: attempts, checkpoints, ledger, changes, kills, rollbacks.

No token of a store comes twice, so what a row holds tells where it is from. What the steps have used is kept as tokens,
and counted by plain loops over these.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from headway.checkpoint.format.folders import checkpoint_folders
from headway.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, state_hash, step_name
from headway.checkpoint.lineage import PARENT, parent_record
from headway.checkpoint.save.outcomes import Outcome
from headway.checkpoint.skipped_ranges import LEFT_OUT, is_outdated
from headway.checkpoint.store import CheckpointInfo
from headway.config import Config, LaneGrid, load_resolved, resolve
from headway.config.sections.segments import SEGMENTS
from headway.data.feeding.token_feed import TokenFeed
from headway.data.pinned import open_run_store
from headway.data.store import TokenStore
from headway.data.used_by import keep_manifest
from headway.run.directory import ledger_callback
from headway.run.directory.ledger import Ledger, decided, plan_fingerprint
from headway.run.directory.ledger_callback import LedgerKeeper
from headway.run.directory.ledger_proof import LedgerProof, prove
from headway.run.directory.rewind import decided_for
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import RunOptions, newest_manifest, prepare_run_directory, write_config
from headway.run.session.changes import StoreData, settle_segments
from headway.telemetry.record import open_run
from headway.training.health.decisions import Decision
from headway.training.task import language_model_fingerprints

LONGEST, END = 16, 0
Rows = list[tuple[int, ...]]


def feed_of(config: Config) -> TokenFeed:
    """The feed of a run, in one lane."""
    store = open_run_store(config.data, config.run_directory, config.segments)
    return TokenFeed.of(config.row_settings, LaneGrid(1, 1, 1), store)


class Corpus:
    """Sources of documents whose tokens are numbers that come once; each document ends with `END`."""

    def __init__(self, folder: Path, sources: dict[str, int]) -> None:
        self.folder, self._next = folder, 1
        self.source_of: dict[int, str] = {}
        self.files: dict[str, list[list[list[int]]]] = {}
        """By source: files of documents."""
        self.joined: dict[str, list[list[int]]] = {name: [] for name in sources}
        """By source: the tokens that joined together, in the order in which they lie in the store."""
        self._known: set[int] = set()
        self.grow(sources, in_front=False)

    def grow(self, more: dict[str, int], in_front: bool) -> None:
        """Add documents with so many tokens: to the last file of a source, or as a file in front of the others."""
        for name, tokens in more.items():
            documents = []
            while tokens >= 2:
                size = min(tokens, 7 + tokens % 11)
                ids = list(range(self._next, self._next + size - 1))
                self.source_of.update(dict.fromkeys(ids, name))
                self._next += size
                documents.append([*ids, END])
                tokens -= size
            files = self.files.setdefault(name, [])
            if not documents:
                continue
            if in_front or not files:
                files.insert(0, documents)
            else:
                files[-1] = [*files[-1], *documents]
        self._write()

    def join(self) -> None:
        """All that is there is part of the run from now on."""
        for name, files in self.files.items():
            new = [document for file in files for document in file if document[0] not in self._known]
            self._known.update(document[0] for document in new)
            self.joined.setdefault(name, []).append([token for document in new for token in document])

    def _write(self) -> None:
        train: dict[str, Any] = {}
        for name, files in self.files.items():
            place = self.folder / "train" / name
            place.mkdir(parents=True, exist_ok=True)
            shards = []
            for documents in files:
                tokens = np.array([token for document in documents for token in document], dtype="<u4").tobytes()
                starts = np.cumsum([0, *map(len, documents)]).astype("<u8").tobytes()
                digest = hashlib.sha256(tokens).hexdigest()
                (place / f"{digest[:16]}.bin").write_bytes(tokens)
                (place / f"{digest[:16]}.idx").write_bytes(starts)
                counts = {"tokens": len(tokens) // 4, "documents": len(documents)}
                hashes = {"sha256": digest, "index_sha256": hashlib.sha256(starts).hexdigest()}
                shards.append({"file": f"{digest[:16]}.bin", **counts, **hashes})
            totals = {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents")}
            train[name] = {**totals, "shards": shards}
        vocabulary = {"fingerprint": "0" * 64, "vocab_size": 2**20, "end_of_text": "<end>", "end_of_text_id": END}
        manifest = {
            "format": "headway-token-store",
            "version": 2,
            "dtype": "uint32",
            "tokenizer": vocabulary,
            "sources": [
                {"name": name, **{k: part[k] for k in ("tokens", "documents")}} for name, part in train.items()
            ],
            "splits": {"train": train},
            "settings": {},
            "split": {"bound": "0"},
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest))


def _sections_of(made_of: str, folder: Path) -> dict[str, Any]:
    """Write what stands for a model, of which nothing but its hash is needed here, and return the sections with it."""
    if not made_of:
        return {}
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(made_of.encode())
    (folder / "config.json").write_text("{}")
    if made_of == "teacher":
        return {"distill": {"teacher": str(folder)}}
    adapter = {"adapter": {"rank": 2}} if made_of == "adapter" else {}
    return {"model": {"from_pretrained": str(folder), **adapter}}


class Untrained:
    """A run of a config in a folder.

    Args:
        folder: Of the run, its data and its models.
        sources: Tokens of each source.
        made_of: What else its task is made of: `pretrained`, `adapter`, `teacher`, or nothing.
        train: Keys of the section `train`.
    """

    def __init__(self, folder: Path, sources: dict[str, int], *, made_of: str = "", **train: Any) -> None:
        self.folder, self.corpus = folder, Corpus(folder / "store", sources)
        self._sections = _sections_of(made_of, folder / "model")
        self.train = {"steps": 500, "sequence_length": LONGEST, "global_batch": 4, **train}
        self.seed, self.mixed = 0, False
        self.run = RunDirectory(folder / "runs/run")
        self.used: dict[int, Rows] = {}
        """What each step has used that led to where the run is; nothing in steps that are left out."""
        self._planned: dict[int, Rows] = {}
        self._damaged: set[int] = set()
        self._attempt = 0

    @property
    def config(self) -> Config:
        """As a user would write it."""
        sources = [
            {"path": name, "name": name, **({"weight": 1 + number} if self.mixed else {})}
            for number, name in enumerate(self.corpus.files)
        ]
        values = {
            "name": "run",
            "runs": str(self.folder / "runs"),
            "seed": self.seed,
            "train": self.train,
            "model": {"preset": "1m"},
            **self._sections,
            "data": {"sources": sources, "store": str(self.corpus.folder)},
        }
        return resolve(Config.model_validate(values))

    def attempt(self, steps: int, every: int = 3, *, older: bool = False, **options: Any) -> None:
        """Go on for some steps, and die.

        Args:
            every: Steps between checkpoints.
            older: The ledger gets lines as older versions wrote them.
            options: As of `_go_on`.
        """
        with patch.object(ledger_callback, "plan_fingerprint", partial(plan_fingerprint, with_others=older)):
            self._go_on(steps, every, **options)

    def _go_on(
        self,
        steps: int,
        every: int,
        *,
        change: bool = False,
        new_epoch: bool = False,
        rollback: tuple[int, int] | None = None,
        told: bool = True,
    ) -> None:
        """Do what `attempt` says.

        Args:
            change: Accept what has changed.
            new_epoch: Begin an epoch on purpose.
            rollback: After so many steps go back, once, leaving out so many.
            told: The ledger hears of the last checkpoint.
        """
        before = newest_manifest(self.run)
        config = self.config
        store = TokenStore.open(self.corpus.folder)
        options = RunOptions(accept_changes=change, start_epoch=new_epoch)
        config = settle_segments(config, StoreData(config, store), options, store.tokenizer_fingerprint)
        self.run.path.mkdir(parents=True, exist_ok=True)
        prepare_run_directory(config, options)
        if change or not before:
            self.corpus.join()
            self._planned = {step: rows for step, rows in self._planned.items() if before and step < before[0]}
        write_config(config, self.run.path)
        self._attempt += 1
        started = time.time()
        folder = self.run.attempts / f"{self._attempt:04d}"
        folder.mkdir(parents=True)
        (folder / "attempt.json").write_text(json.dumps({"outcome": "died", "started": started}))
        fingerprints = language_model_fingerprints(config, store)
        self.run.record_path.write_text(json.dumps({"fingerprints": fingerprints}))
        keep_manifest(self.run.path, self.corpus.folder, fingerprints["data"])

        ledger = Ledger(self.run.ledger_path)
        self._discard_outdated(decided(ledger))
        start = self._newest_good(10**9)
        skipped_ranges, _ = decided_for(config.segments, ledger, start)
        feed = TokenFeed.of(
            config.row_settings, LaneGrid(1, 1, 1), open_run_store(config.data, config.run_directory, config.segments)
        )
        cursor = SimpleNamespace(step=start.step if start else 0)
        state = SimpleNamespace(cursor=cursor, skipped_ranges=skipped_ranges)
        task = SimpleNamespace(feed=feed, fingerprints=fingerprints)
        job: Any = SimpleNamespace(config=config, task=task, state=state, total_steps=config.train.steps)
        keeper = LedgerKeeper(ledger, self._attempt, self.run.checkpoints)
        keeper.on_start(job)
        parent = start.manifest if start else None
        self.used = {step: rows for step, rows in self.used.items() if step < cursor.step}
        done = 0
        while done < steps:
            step, done = cursor.step, done + 1
            self._do(step, feed, job)
            cursor.step += 1
            if rollback is not None and done == rollback[0]:
                first = max(0, step + 1 - rollback[1])
                target = self._newest_good(first)
                rollback = None
                if target is not None and not _is_left_out(state.skipped_ranges, step):
                    keeper.on_decision(job, Decision(step, "rollback", "a spike", first, target.step))
                    state.skipped_ranges = (*state.skipped_ranges, (first, step + 1))
                    self._discard_outdated(state.skipped_ranges)
                    parent, cursor.step = target.manifest, target.step
                    self.used = {s: rows for s, rows in self.used.items() if s < cursor.step}
                    continue
            if done % every == 0 or done == steps:
                self._save(cursor.step, job, parent)
                if told or done < steps:
                    keeper.on_saved(job, Outcome(cursor.step))

    @property
    def is_behind(self) -> bool:
        """Whether a checkpoint is there, though damaged, of steps that are to be done again."""
        return max(checkpoint_folders(self.run.checkpoints)) > max(self.used) + 1

    def lose(self, newest: int, gone: bool) -> None:
        """Damage the newest checkpoints, or have them go; the oldest stays."""
        folders = checkpoint_folders(self.run.checkpoints)
        for step in sorted(folders)[1:][::-1][:newest]:
            if gone:
                shutil.rmtree(folders[step])
            else:
                self._damaged.add(step)

    def _do(self, step: int, feed: TokenFeed, job: Any) -> None:
        rows = rows_of(feed, step)
        assert self._planned.setdefault(step, rows) == rows, f"step {step} has other rows than it had before"
        out = _is_left_out(job.state.skipped_ranges, step)
        self.used[step] = [] if out else rows
        record = {"train/left_out_steps": 1.0} if out else {"train/loss": 1.0}
        record = {"step": step + 1, "attempt": self._attempt, "time": time.time(), **record}
        with self.run.metrics_path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _save(self, step: int, job: Any, parent: Manifest | None) -> None:
        config, skipped_ranges = job.config, [list(steps) for steps in job.state.skipped_ranges]
        context = {
            "attempt": self._attempt,
            **job.task.fingerprints,
            PARENT: parent_record(parent) if parent else None,
            **({SEGMENTS: [s.model_dump(mode="json") for s in config.segments]} if config.segments else {}),
            **({LEFT_OUT: skipped_ranges} if skipped_ranges else {}),
        }
        cursor = {"step": step}
        name = state_hash({}, cursor)
        manifest = Manifest(step=step, cursor=cursor, context=context, state_sha256=name, files={}, tensors={})
        folder = self.run.checkpoints / step_name(step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).write_bytes(manifest.render())
        self._damaged.discard(step)

    def _newest_good(self, step: int) -> CheckpointInfo | None:
        for number, folder in sorted(checkpoint_folders(self.run.checkpoints).items(), reverse=True):
            if number <= step and number not in self._damaged:
                return CheckpointInfo(folder, read_manifest(folder))
        return None

    def _discard_outdated(self, skipped_ranges: Any) -> None:
        for folder in checkpoint_folders(self.run.checkpoints).values():
            if is_outdated(read_manifest(folder), skipped_ranges):
                shutil.rmtree(folder)

    def proof(self) -> LedgerProof:
        """What `headway ledger --every-row` finds."""
        return prove(self.run.path, every_row=True)

    def check(self) -> None:
        """Recount everything from the tokens that steps have used, and compare."""
        proof, config = self.proof(), load_resolved(self.run.config_path)
        assert proof.problems == [], proof.problems
        feed, last = (
            feed_of(config),
            max(self.used) + 1,
        )
        assert sorted(self.used) == list(range(last)) and proof.steps == last
        out = [step for step in range(last) if _is_left_out(proof.skipped_ranges, step)]
        assert [step for step in range(last) if not self.used[step]] == out
        planned = [rows_of(feed, step) for step in range(last)]  # a fresh process finds what the run had
        assert all(planned[step] == rows for step, rows in self.used.items() if rows)
        # The ledger, commit by commit and in all.
        for commit in proof.commits:
            rows = [row for step in range(commit.first_step, commit.last_step) for row in self.used[step]]
            assert commit.rows == {**dict.fromkeys(commit.rows, 0), **self._by_source(rows)}
        everything = [row for rows in self.used.values() for row in rows]
        assert proof.rows == len(everything)
        # Tokens as a function of the step.
        sizes = [sum(map(len, rows)) for rows in planned]
        batches, recorded = config.train.batches, open_run(self.run.path)
        shown = recorded.batches
        assert shown is not None and recorded.step == last
        for step in range(last + 1):
            assert batches.tokens_before(step) == shown.tokens_before(step) == sum(sizes[:step])
        assert recorded.tokens == sum(map(len, everything))
        if "tokens" in self.train:
            assert config.train.steps is not None
            plan = feed.plan
            rest = [plan.step_rows(s) * plan.sequence_length(s) for s in range(last, config.train.steps)]
            assert sum(sizes + rest) >= self.train["tokens"] > sum((sizes + rest)[:-1])

    def check_epochs(self) -> None:
        """Text of a source that joined together is used as often, to within one; what was left out counts."""
        config = load_resolved(self.run.config_path)
        feed = TokenFeed.of(
            config.row_settings, LaneGrid(1, 1, 1), open_run_store(config.data, config.run_directory, config.segments)
        )
        uses = Counter(token for step in self.used for row in rows_of(feed, step) for token in row)
        for parts in self.corpus.joined.values():
            for tokens in parts:
                whole = max(0, len(tokens) - 1) // LONGEST * LONGEST
                counts = {uses[token] for token in tokens[:whole] if token != END}
                assert not counts or max(counts) - min(counts) <= 1, counts

    def check_table(self) -> None:
        """What the ledger's table says of each source, where rows have one length."""
        proof = self.proof()
        rows = [row for used in self.used.values() for row in used]
        table: Counter[str] = Counter()
        for epoch in proof.epochs:
            table[epoch.source] += (epoch.used + epoch.twice) * (epoch.last_epoch - epoch.first_epoch + 1)
        assert {name: count for name, count in table.items() if count} == self._by_source(rows)

    def _by_source(self, rows: Rows) -> dict[str, int]:
        return dict(Counter(next(self.corpus.source_of[t] for t in row if t != END) for row in rows))


def rows_of(feed: TokenFeed, step: int) -> Rows:
    """What the model would see of a step: the tokens of each row."""
    return [tuple(tokens) for picks in feed.picks(step, 0) for tokens in feed.read(step, picks).tokens[:, :-1].tolist()]


def _is_left_out(ranges: Any, step: int) -> bool:
    return any(first <= step < last for first, last in ranges)
