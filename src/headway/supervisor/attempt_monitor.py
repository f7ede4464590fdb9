"""One attempt from the supervisor's side: begun, watched, ended, written down."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.checkpoint.save.writer_locks import wait_for_writers
from headway.config import Config
from headway.config.segments import Segment
from headway.core.console import alert, clear_line, notice, warning
from headway.core.errors import INTERRUPTED, CheckpointError, fix_for
from headway.core.faults import RESTARTS_VARIABLE
from headway.core.format import format_seconds
from headway.core.heartbeat import Phase
from headway.core.preemption_board import SIGNAL_KEY, posted
from headway.core.process_table import STOPPED
from headway.core.secrets import redact
from headway.runs.ownership import OwnerLock
from headway.runs.run_directory import Attempt, RunDirectory, command_line
from headway.session.attempt import PRICE_KEY, RunOptions, note_restart, prepare_run_directory, write_config
from headway.supervisor.attempt_client import Leader
from headway.supervisor.diagnose import blame, exchanges, last_exchange
from headway.supervisor.log import SupervisorLog
from headway.supervisor.processes import GRACE_SECONDS, ask_for_stacks, end_all, reap_orphans
from headway.supervisor.restart_policy import Decision, Ending
from headway.supervisor.watchdog import Finding, Watchdog, in_words
from headway.supervisor.worker_pool import WorkerPool
from headway.supervisor.worker_status import AGAIN, WorkersSeen

_POLL_SECONDS, _LOOK_SECONDS = 0.1, 0.2
#: A look while workers begin: of one that dies at once nothing is known that was not seen before.
_BEGIN_SECONDS = 0.02
_MAKE_ROOM = signal.SIGUSR1
#: For the agent to tell of a worker that is dead, for stacks to be written, for workers that Ctrl-C has come to twice.
_TELL_SECONDS, _STACK_SECONDS, _GIVE_UP_SECONDS = 4.0, 2.0, 5.0
#: After the death of a worker, for the agent to hear of it before the others are killed: what they say then is noise.
_HURRY_SECONDS = 0.4


class AttemptMonitor:
    """One attempt, from the supervisor's side.

    Args:
        has_begun: Called when its folder is there.
    """

    def __init__(
        self,
        config: Config,
        options: RunOptions,
        crew: WorkerPool,
        signals: list[int],
        own_process: bool,
        has_begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self._wishes, self._own_process = config, options, own_process
        self._signals, self._passed_on, self._has_begun = signals, 0, has_begun
        self._crew, compiles = crew, config.train.compile is not False
        self._watchdog = Watchdog(config.supervise, compiles, config.parallel.timeout_seconds)
        self.grows = False
        """Workers were asked to make room for an attempt with more of them."""
        self.record: Attempt | None = None
        self._log: SupervisorLog | None = None
        self.lock: OwnerLock | None = None
        self._restarts = 0
        self._told: dict[str, Any] | None = None
        self._done = False
        self._workers = WorkersSeen(config.parallel.workers)
        self._late_at = math.inf
        self._facts: dict[str, Any] = {}
        self._saving_since, self._told_to_wait, self._gone = math.inf, False, "workers are gone"

    def begin(self, lock: OwnerLock | None, started: float | None = None, restarts: int = 0) -> Attempt:
        """Take the run directory: from here on, what is left of earlier attempts cannot publish anything."""
        run = prepare_run_directory(self.config, self._wishes) if not lock else RunDirectory(self.config.run_directory)
        self.lock = lock or run.claim()
        price = {PRICE_KEY: self.config.telemetry.usd_per_hour}
        facts = {"workers": self.config.parallel.workers, "restarts": restarts, **price}
        self.record = run.begin_attempt(command_line(), self.lock, started, **facts)
        self._log = SupervisorLog(self.record.directory / "supervisor.log")
        self._has_begun()
        note_restart(run.path, self.config, self._wishes)
        return self.record

    @property
    def has_made_room(self) -> bool:
        """Whether workers were asked to stop for an attempt with more of them, and nobody else has asked them to."""
        if not self.grows or self.record is None:
            return False
        stops = (told for told in posted(self.record.directory) if told["wish"] == "stop")
        return all((told["key"], told["what"]) == (SIGNAL_KEY, _MAKE_ROOM.name) for told in stops)

    def begin_again(self, lock: OwnerLock | None, restarts: int) -> None:
        """The same for a further attempt, of which all is known that would be written down."""
        attempt = self.begin(lock, restarts=restarts)
        has_config = (attempt.run / "config.yaml").exists()
        try:
            write_config(self.config, attempt.directory, *(() if has_config else (attempt.run,)))
        except OSError as error:
            why = f"the config cannot be written: {error.strerror or error}"
            attempt.finish(f"failed to start: {why}", CheckpointError.exit_code)
            where = str(error.filename or attempt.directory)
            fix = fix_for(error, "make room there; then run the same command again")
            raise CheckpointError(why, where=where, fix=fix) from error
        with suppress(OSError):  # not there when the attempt before ended while it began, and for reading only
            shutil.copy(attempt.run / "run.json", attempt.directory)

    def make(self, restarts: int, lock: OwnerLock | None) -> Ending:
        """Start the workers and wait for their end; when it is here, no process of the attempt is left."""
        self._restarts = restarts
        number = self.record.number if self.record is not None else None
        environment = {RESTARTS_VARIABLE: str(restarts)}
        if self._crew.devices is not None and self.config.train.device in ("auto", "cuda"):
            environment["CUDA_VISIBLE_DEVICES"] = self._crew.devices
        leader = Leader(self.config, self._wishes, environment, self._own_process, number)
        try:
            ending = self._watch(leader, lock)
            self._gone = ending.what
            return ending
        finally:
            self._look()
            leaders = {leader.pid, *(reading.pid for reading in self._workers.readings.values())}
            left = end_all(leaders, os.getpid() if self._own_process else None, self._still_saving)
            leader.wait(_GIVE_UP_SECONDS)
            leader.channel.end.close()
            self._workers.close()
            if left:
                warning(f"processes {left} of this attempt do not go; they can no longer publish anything")

    def _still_saving(self) -> bool:
        """Whether a checkpoint is being written that the next attempt can begin from; says so, once, where that takes
        seconds."""
        if self.record is None or wait_for_writers(self.config.run_directory, 0.0):
            return False
        now = time.monotonic()
        self._saving_since = min(self._saving_since, now)
        if now - self._saving_since < GRACE_SECONDS:
            return True
        if self._interrupted:
            return False
        if not self._told_to_wait:
            self._told_to_wait = True
            self._say(f"{self._gone}; waiting for the checkpoint that is still being written")
        return True

    def conclude(self, ending: Ending, decision: Decision) -> None:
        """Write down why it ended, and say so when the run goes on."""
        if self.record is None:
            return
        outcome = ending.kind if ending.kind in ("finished", "preempted") else ending.what
        facts = {**ending.record(), **self._facts, "decision": decision.why}
        if self._signals:
            facts["stopped_by"] = signal.Signals(self._signals[0]).name
        if decision.goes_on:
            after = f" in {decision.delay_seconds:.0f} s" if decision.delay_seconds else ""
            self._say(
                f"attempt {self.record.number} ended: {ending.what} ({decision.why});"
                f" the next one begins{after}, from the newest checkpoint"
            )
        if ending.kind not in ("finished", "preempted") and ending.exit_code != INTERRUPTED:
            alert(f"attempt {self.record.number} ended: {ending.what} ({decision.why})")
        with suppress(OSError):  # on a broken disk they stay
            self._clear_away(self.record.directory)
        self.record.finish(outcome, ending.exit_code, **facts)

    def _clear_away(self, folder: Path) -> None:
        """What says nothing any more: links to pages of workers that are gone, stacks that nobody has asked for."""
        for path in folder.glob("heartbeat-*"):
            path.unlink()
        for path in folder.glob("stack-*.txt"):
            if not path.stat().st_size:
                path.unlink()

    def _watch(self, leader: Leader, lock: OwnerLock | None) -> Ending:
        look_at, found, found_at = 0.0, None, 0.0
        start_by = time.monotonic() + self.config.supervise.start_seconds
        self._late_at = time.monotonic() + self._watchdog.start_patience_seconds
        while True:
            begins = self.record is not None and bool(self._workers.missing)
            for message in leader.listen(_BEGIN_SECONDS if begins else _POLL_SECONDS):
                self._take(message, leader, lock)
            if begins:
                self._look()
            if leader.poll() is not None:
                for message in leader.listen(0.0):
                    self._take(message, leader, lock)
                self._look()
                return self._ended(leader, found)
            self._pass_on(leader)
            now = time.monotonic()
            if now < look_at:
                continue
            look_at = now + _LOOK_SECONDS
            self._look()
            if self._own_process:
                reap_orphans(leader.pid)
            self._make_room()
            if now > self._late_at and self._workers.missing:
                self._tell_of_late_start(leader)
            if now > start_by and self._workers.missing:
                folder = self.record.directory if self.record is not None else None
                return self._workers.not_begun(self.config.supervise.start_seconds, folder)
            if found is None:
                found = self._judge(now)
                found_at = now
                if found is not None and found.kind == "died":
                    others = "; the others are ended" if self.config.parallel.workers > 1 else ""
                    self._say(f"worker {found.rank} {found.what}{others}")
                    # Nobody waits for these: who still runs will have written long before `_hurry`.
                    self._write_stacks([rank for rank in self._workers.readings if rank != found.rank], seconds=0.0)
            if found is not None and (found.kind != "died" or now > found_at + _TELL_SECONDS):
                return self._blamed(found)
            if found is not None and now > found_at + _HURRY_SECONDS:
                self._hurry()

    def _take(self, message: Mapping[str, Any], leader: Leader, lock: OwnerLock | None) -> None:
        if message["kind"] == "done":
            self._done = True
        elif message["kind"] == "error":
            self._told = dict(message)
        elif message["kind"] == "ready":
            model = type(self.config.model).model_validate(message["model"])
            segments = [Segment.model_validate(segment) for segment in message["segments"]]
            self.config = self.config.model_copy(update={"model": model}).with_segments(segments)
            leader.channel.say("begin", attempt=self.begin(lock, leader.started).number)

    def _look(self) -> None:
        if self.record is not None:
            self._workers.look(self.record.directory)

    def _tell_of_late_start(self, leader: Leader) -> None:
        """Once: a worker may take long to begin, and of one that hangs nobody else would tell for as long."""
        self._late_at = math.inf
        seconds = self._watchdog.start_patience_seconds
        what = self._workers.late(seconds, leader.pid, self.record is not None)
        self._say(f"warning: {what}; that may take {format_seconds(self.config.supervise.start_seconds)}")
        self._facts.setdefault("warnings", []).append({"rank": self._workers.missing[0], "what": what})

    def _judge(self, now: float) -> Finding | None:
        found = self._watchdog.look(now, self._workers.readings, self._workers.states)
        if found is None or found.kind == "died":
            return None if self._signals else found  # told to stop, they may end in any way
        if found.kind == "waits" or (found.kind == "slow" and self.config.supervise.slow_worker == "warn"):
            reading = self._workers.readings[found.rank]
            # Who may wait for a disk that hangs must not wait for it in a signal handler: there it can give nothing up.
            if found.kind == "slow" or reading.phase not in (Phase.CHECKPOINT, Phase.END):
                self._write_stacks([found.rank])
            what = found.what + last_exchange(reading)
            self._say(f"warning: worker {found.rank} {what}")
            self._facts.setdefault("warnings", []).append({"rank": found.rank, "what": what})
            return None
        self._write_stacks(list(self._workers.readings), wake=True)
        return found

    @property
    def _at_steps(self) -> bool:
        """Whether every worker has done a step of this attempt."""
        readings = self._workers.readings.values()
        return bool(readings) and all(reading.has_finished_a_step for reading in readings)

    def _make_room(self) -> None:
        """Have workers save and end at the next step, when it is time to try with all of them again."""
        if self.grows or not self._at_steps or self._signals or not self._crew.may_grow:
            return
        self.grows = True
        self._say("asking workers to save, to go on with all of them again")
        for pid in self._workers.alive:
            with suppress(ProcessLookupError):
                os.kill(pid, _MAKE_ROOM)

    def _hurry(self) -> None:
        """The agent gives workers that have lost another one half a minute to end; without them it tells at once."""
        for pid in self._workers.alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _say(self, text: str) -> None:
        clear_line()
        notice(text)  # first, with the alert
        if self._log is not None:
            self._log.write(text)

    def _write_stacks(self, ranks: list[int], wake: bool = False, seconds: float = _STACK_SECONDS) -> None:
        """Have workers write what they are doing to `stack-<rank>.txt`; a stopped one must be continued for that."""
        assert self.record is not None, "begun"
        workers = [(self._workers.readings[rank].pid, self._workers.states.get(rank), rank) for rank in ranks]
        stopped = [(pid, rank) for pid, state, rank in workers if state is not None and state.state == STOPPED]
        going = [(pid, rank) for pid, state, rank in workers if state is not None and state.state != STOPPED]
        folder = self.record.directory
        ask_for_stacks({pid: folder / f"stack-{rank}.txt" for pid, rank in going}, seconds)
        if wake:
            ask_for_stacks({pid: folder / f"stack-{rank}.txt" for pid, rank in stopped}, _STACK_SECONDS, stopped=True)

    def _pass_on(self, leader: Leader) -> None:
        """Tell workers what this process was told; they save, and end with 75."""
        several = self.config.parallel.workers > 1
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            if several and not self._workers.alive:
                self._look()  # they may have begun since, and be at steps already
            targets = self._workers.alive if several else [leader.pid]
            if not self._workers.readings and not targets and leader.poll() is None:
                # An agent whose workers have not begun has nothing to save; when they are gone, it is to tell why.
                targets, number = [leader.pid], signal.SIGKILL
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        if self._interrupted:
            leader.wait(_GIVE_UP_SECONDS)
            if leader.poll() is None:
                os.kill(leader.pid, signal.SIGKILL)

    @property
    def _interrupted(self) -> bool:
        """Ctrl-C came twice: nothing is to be waited for."""
        return self._signals.count(signal.SIGINT) > 1

    def _blamed(self, found: Finding) -> Ending:
        """The ending that the watchdog has brought about."""
        assert self.record is not None, "begun"
        return blame(found, self._workers.readings, self.record)

    def _ended(self, leader: Leader, found: Finding | None) -> Ending:
        """The ending that the leader's end tells."""
        code, told = leader.code, self._told
        assert code is not None, "it has ended"
        if code == 0 and self._done:
            return Ending("finished", "finished", 0)
        # Without its word 0 is no success: so it looks when whoever has this process has SIGCHLD ignored.
        lost = code == 0
        code = (told["exit_code"] if told is not None else 1) if lost else code
        if self._interrupted and code != 75:
            return Ending("error", "interrupted", INTERRUPTED)
        stopping = signal.Signals(self._signals[0]).name if self._signals else None
        if told is not None and told["exit_code"] != 1:
            return _error("preempted" if told["exit_code"] == 75 else "error", told)
        if stopping is not None and newest_checkpoint(self.config.run_directory) == self.config.train.steps:
            return Ending("finished", "finished", 0)  # it came when all was done
        if stopping is not None and (told is None or told.get("signal")):
            what = f"stopped by {stopping} before a checkpoint could be saved; the newest one is intact"
            return Ending("preempted", what, 75, str(self.config.run_directory), "run the same command again")
        if found is not None and told is None:
            return self._blamed(found)
        if told is not None and told.get("signal") is None:
            self._keep_traceback(told)
            deliberate = told.get("frames") is None  # its words say all that there is to know
            crash = _error("error", told, None if deliberate else f"worker {told['rank']} crashed: {told['what']}")
            return replace(crash, facts={"exchanges": exchanges(self._workers.readings)})
        rank, number = (told or {}).get("rank", 0), (told or {}).get("signal") or (-code if code < 0 else None)
        how = "nobody can say how" if lost and not number else in_words(-number if number else code)
        if self.record is None or rank not in self._workers.readings:
            what = f"worker {rank} died ({how}) before its first step"
            return Ending("died", what, 1, str(self.config.run_directory), AGAIN, rank=rank, signal=number)
        ending = self._blamed(Finding("died", rank, f"died ({how})", signal=number, suspects=(rank,)))
        return replace(ending, exit_code=code if code > 1 else 1)

    def _keep_traceback(self, told: Mapping[str, Any]) -> None:
        if self.record is not None and told.get("traceback"):
            with suppress(OSError):  # a full disk must not hide what went wrong
                (self.record.directory / "traceback.txt").write_text(redact(told["traceback"]), encoding="utf-8")


def _error(kind: Any, told: Mapping[str, Any], what: str | None = None) -> Ending:
    return Ending(
        kind,
        what or told["what"],
        told["exit_code"],
        where=told.get("where"),
        fix=told.get("fix"),
        rank=told.get("rank"),
        step=told.get("step"),
        error=told.get("type"),
        frames=tuple(told.get("frames") or ()),
    )


def newest_checkpoint(run: Path) -> int:
    """The step in the name of the newest checkpoint folder; -1 without one. Whether it verifies is for the next attempt
    to find out."""
    folders = (run / "checkpoints").glob("step-*")
    return max((int(folder.name[5:]) for folder in folders if folder.name[5:].isdecimal()), default=-1)
