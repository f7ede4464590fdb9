"""A recovery drill: copies of a run lose what a run can lose, are restored, and continue to the same bits.

Nothing of the run itself is touched. Every copy begins with its newest checkpoint. One continues undisturbed; every
other one is killed right before a save, the worst moment with a store that keeps up, and then loses something for good.
"""

from __future__ import annotations

import json
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headway.checkpoint.format.manifest import MANIFEST, step_name
from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.open import open_place
from headway.checkpoint.save.writer_locks import wait_for_writers
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.transfer import remote_manifests
from headway.config import Config, load_resolved
from headway.core.console import notice
from headway.core.coordination.train_command import check_not_a_worker, failed, place, running, stoppable, train_command
from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.core.files.foreign import read_json_lines
from headway.core.process.faults import FAULTS_LOG_VARIABLE, FAULTS_VARIABLE
from headway.core.process.waiting import wait_until
from headway.lab.chaos.trial import checkpoint_of, new_folder, recorded_steps
from headway.run.directory.ledger_proof import prove
from headway.telemetry.record import open_run

#: Steps between saves for a run that saves by time.
_EVERY = 10
#: Saves of a copy, and how many checkpoints it keeps.
_SAVES = 3
#: A command that takes longer is stuck.
_COMMAND_SECONDS = 3600.0
_WRITER_SECONDS = 120.0
#: What a copy does not need, or must not have: an owner, and cursors of trackers.
_NOT_COPIED = ("checkpoints", "export", "merged", "set-aside", "launch", "tracking", "remote.json", ".uploads")


@dataclass(frozen=True)
class Loss:
    """Something that a run can lose."""

    name: str
    what: str
    intervals: int
    """Most save intervals whose steps may be lost with it."""
    happen: Callable[[Path, Objects, int], None]
    """Let it happen to a run directory and its generation of the remote tier, whose newest checkpoint has a step."""


@dataclass(frozen=True)
class Recovery:
    """How a copy came back from a loss."""

    loss: str
    what: str
    lost_at_step: int
    """Finished steps when it happened."""
    resumed_step: int | None
    rpo_steps: int | None
    """Steps that were lost: the recovery point."""
    most_steps: int
    """Most that may be."""
    rto_seconds: float | None
    """From the loss to the first new step: the recovery time."""
    caught_up_seconds: float | None
    """From the loss until the lost steps were done again."""
    state_sha256: str | None
    problems: tuple[str, ...] = ()


@dataclass
class DrillResult:
    """The result of a drill."""

    run: str
    remote: str
    first_step: int
    last_step: int
    every_steps: int
    step_seconds: float | None
    expected: str
    """State of the copy that continued undisturbed."""
    recoveries: list[Recovery] = field(default_factory=list)
    max_recovery_seconds: float | None = None

    @property
    def problems(self) -> list[str]:
        """All problems, one line each."""
        found = [f"{one.loss}: {problem}" for one in self.recoveries for problem in one.problems]
        limit = self.max_recovery_seconds
        if limit is not None:
            slow = [one for one in self.recoveries if one.rto_seconds is None or one.rto_seconds > limit]
            found += [f"{one.loss}: the recovery took longer than {limit:g} s" for one in slow]
        return found

    def record(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {"passed": not self.problems, "problems": self.problems, **asdict(self)}


def _lose_disk(run: Path, tier: Objects, newest: int) -> None:
    shutil.rmtree(run)


def _lose_remote(run: Path, tier: Objects, newest: int) -> None:
    for name in tier.names():
        if name.startswith("step-"):
            folder = tier.at(name)
            folder.remove(folder.names())
            folder.remove_folder()


def _lose_disk_and_newest(run: Path, tier: Objects, newest: int) -> None:
    shutil.rmtree(run)
    folder = tier.at(step_name(newest))
    folder.remove([name for name in folder.names() if not name.startswith(MANIFEST)])


_LOSSES = (
    Loss("disk", "the run directory is lost; it continues from the remote tier", 1, _lose_disk),
    Loss("remote", "all remote checkpoints are lost; it continues from the disk", 1, _lose_remote),
    Loss("newest", "the run directory and the newest remote checkpoint are lost", 2, _lose_disk_and_newest),
)
LOSSES = {loss.name: loss for loss in _LOSSES}


def drill(
    run: Path,
    folder: Path,
    *,
    remote: str | None = None,
    every: int | None = None,
    losses: Sequence[str] | None = None,
) -> DrillResult:
    """Let copies of a run lose something, restore them, and compare their last state with an undisturbed copy's.

    Args:
        run: The run directory; only read.
        folder: Folder for the copies; not removed.
        remote: URL below which the drill makes a folder for remote checkpoints; a folder on this machine if None.
        every: Steps between saves; those of the config when not given.
        losses: Names of what is lost (`LOSSES`), one copy each; all if None.

    Raises:
        ConfigError: The run promises no equal bits, or there is no such loss.
        CheckpointError: It has no checkpoint that verifies.
        HeadwayError: The undisturbed copy fails.
    """
    check_not_a_worker("chaos")
    losses = losses or tuple(LOSSES)
    unknown = [name for name in losses if name not in LOSSES]
    if unknown:
        raise ConfigError(f"there is no loss '{unknown[0]}'", where="--loss", fix=f"one of {', '.join(LOSSES)}")
    config = load_resolved(open_run(run).path / "config.yaml")
    if config.determinism == "off":
        raise ConfigError("determinism 'off' promises no equal bits", where=str(run), fix="determinism=run")
    if config.parallel.machines > 1:
        raise ConfigError(
            "a drill has one machine",
            where=str(run),
            fix=f"headway chaos {run}/config.yaml --machines {config.parallel.machines}",
        )
    newest = CheckpointStore(run / "checkpoints").newest()
    if newest is None:
        raise CheckpointError("there is no checkpoint", where=str(run), fix=f"headway checkpoints restore {run}")
    new_folder(folder, (run / "config.yaml").read_text(encoding="utf-8"))
    given = config.checkpoint.every
    by_steps = given.amount if not isinstance(given, str) and given.unit == "steps" else _EVERY
    copies = _Copies(_Original(run, config, newest.path, newest.step), folder, remote, every or by_steps)
    with stoppable():
        return copies.drill([LOSSES[name] for name in losses])


@dataclass(frozen=True)
class _Original:
    """The run that is copied."""

    path: Path
    config: Config
    checkpoint: Path
    """Its newest one that verifies."""
    step: int
    """Its step."""


class _Copies:
    """Copies of one run.

    Args:
        original: The run.
        folder: Folder of the copies.
        remote: URL for a folder of remote checkpoints; None for one on this machine.
        every: Steps between saves.
    """

    def __init__(self, original: _Original, folder: Path, remote: str | None, every: int) -> None:
        self._run = original.path
        self._config = original.config
        self._checkpoint = original.checkpoint
        self._folder = folder
        self._every = every
        self._first = original.step
        self._uploaded = (original.step // every + _SAVES - 1) * every
        self._last = self._uploaded + every
        self._remote = self._place(remote)

    def drill(self, losses: Sequence[Loss]) -> DrillResult:
        """Train the undisturbed copy, then the others."""
        notice(f"training {self._last - self._first} steps undisturbed")
        straight = self._copy("undisturbed")
        code = self._train(straight, None)
        expected = self._state(straight)
        if code or expected is None:
            raise failed("the undisturbed copy did not reach its last step", code, self._log(straight))
        url = str(self._remote["url"])
        newest = recorded_steps(straight)[-20:]
        seconds = [one["speed/step_seconds"] for one in newest if "speed/step_seconds" in one]
        pace = statistics.median(seconds) if seconds else None
        result = DrillResult(str(self._run), url, self._first, self._last, self._every, pace, expected)
        for loss in losses:
            notice(f"drill: {loss.what}")
            result.recoveries.append(self._recover(loss, expected))
        return result

    def _recover(self, loss: Loss, expected: str) -> Recovery:
        """Train a copy until right before a save, lose something, and continue."""
        run = self._copy(loss.name)
        lost_at = self._last - 1
        most = loss.intervals * self._every
        remote = f"{self._remote['url']}/{loss.name}"
        before = self._uploaded - self._every
        try:
            if loss.intervals > 1:  # an upload is left out if the next save comes first, but this one is needed
                self._train_until_lost(run, remote, before + 1, before)
            self._train_until_lost(run, remote, lost_at, self._uploaded)
        except HeadwayError as error:
            return Recovery(loss.name, loss.what, lost_at, None, None, most, None, None, None, (error.what,))
        loss.happen(run, self._open(f"{remote}/{run.name}/run-001"), self._uploaded)
        moment = time.time()
        code = self._train(run, remote)
        new = [one for one in recorded_steps(run) if one["time"] > moment]
        resumed = int(new[0]["step"]) - 1 if new else None
        rpo = None if resumed is None else lost_at - resumed
        state = self._state(run)
        problems = [f"the command that restores ended with exit code {code}"] if code else []
        problems += [] if state == expected else [f"its last state is {state}, not {expected}"]
        if rpo is None or rpo > most:
            problems.append(f"{rpo} steps were lost, and at most {most} may be")
        if run.is_dir():
            problems += [f"ledger: {problem}" for problem in prove(run).problems]
        back = next((one["time"] for one in new if one["step"] >= lost_at), None)
        return Recovery(
            loss=loss.name,
            what=loss.what,
            lost_at_step=lost_at,
            resumed_step=resumed,
            rpo_steps=rpo,
            most_steps=most,
            rto_seconds=round(new[0]["time"] - moment, 3) if new else None,
            caught_up_seconds=None if back is None else round(back - moment, 3),
            state_sha256=state,
            problems=tuple(problems),
        )

    def _train_until_lost(self, run: Path, remote: str, step: int, uploaded: int) -> None:
        """Train a copy until it hangs before a step, wait until the save of another one is uploaded, and kill it.

        Raises:
            HeadwayError: It does not come that far.
        """
        faults = self._folder / f"{run.parent.name}-{step}.faults.jsonl"
        variables = {FAULTS_VARIABLE: f"hang@data={step}", FAULTS_LOG_VARIABLE: str(faults)}
        url = f"{remote}/{run.name}"
        options = self._remote.get("options", {})
        with running(self._command(run, remote), self._log(run), variables) as process:

            def is_there() -> bool:
                if process.poll() is not None:
                    return True
                hangs = any(read_json_lines(faults))
                return hangs and any(found.manifest.step == uploaded for found in remote_manifests(url, options))

            came = wait_until(is_there, _COMMAND_SECONDS, 0.2)
            if not came or process.poll() is not None:
                raise failed("the copy did not come to the step of the loss", process.poll() or 1, self._log(run))
        wait_for_writers(run, _WRITER_SECONDS)

    def _train(self, run: Path, remote: str | None) -> int:
        with running(self._command(run, remote), self._log(run), {FAULTS_VARIABLE: ""}) as process:
            return process.wait(_COMMAND_SECONDS)

    def _command(self, run: Path, remote: str | None) -> list[str]:
        """Return the command that trains a copy, which sends nothing to anybody."""
        tier = "null" if remote is None else json.dumps({**self._remote, "url": remote, "keep": _SAVES})
        overrides = [
            f"train.steps={self._last}",
            f"checkpoint.every={self._every} steps",
            f"checkpoint.keep={_SAVES}",
            f"checkpoint.remote={tier}",
            *("track=[]", "telemetry.alert=null", "telemetry.report=false", "budget.usd=null"),
        ]
        config = self._folder / "config.yaml"
        return train_command(config, *place(run.name, run.parent), *overrides, "--accept-changes")

    def _copy(self, name: str) -> Path:
        """Copy the run with its newest checkpoint."""
        copy = self._folder / name / self._run.resolve().name
        shutil.copytree(self._run, copy, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED, "*.sqlite*", ".*"))
        shutil.copytree(self._checkpoint, copy / "checkpoints" / step_name(self._first))
        return copy

    def _place(self, url: str | None) -> dict[str, Any]:
        """Return the remote tier of the copies, by the config's options where the store is of the same kind."""
        own = self._config.checkpoint.remote
        here = self._folder / "store"
        there = here.absolute().as_uri() if url is None else url.rstrip("/")
        tier: dict[str, Any] = {"url": f"{there}/drill-{secrets.token_hex(4)}"}
        if own is not None:
            tier["encrypt"] = own.encrypt
            tier |= {"options": own.options} if urlsplit(own.url).scheme == urlsplit(there).scheme else {}
        for name in LOSSES:
            self._open(f"{tier['url']}/{name}", tier).make_folder()
        return tier

    def _open(self, url: str, tier: Mapping[str, Any] | None = None) -> Objects:
        return open_place(url, (tier or self._remote).get("options"), None)

    def _log(self, run: Path) -> Path:
        return self._folder / f"{run.parent.name}.log"

    def _state(self, run: Path) -> str | None:
        """Return the state of a copy after its last step."""
        found = checkpoint_of(run, self._last)
        return None if found is None else found.state_sha256
