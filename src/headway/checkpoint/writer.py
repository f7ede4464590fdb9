"""How the training loop hands over its state, so that it waits for a copy in memory and for nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headway.checkpoint.fence import Fence, Fenced, open_writers_lock
from headway.checkpoint.folders import remove
from headway.checkpoint.images import Image, Piece, plan_images
from headway.checkpoint.publish import Publisher
from headway.checkpoint.sharing import share_out
from headway.checkpoint.staging import Slot
from headway.core import console
from headway.core.errors import CheckpointError
from headway.core.faults import fault_point
from headway.core.format import format_seconds

if TYPE_CHECKING:
    from headway.core.types import StateBlocks

_Found = TypeVar("_Found")

#: How often it is looked whether a process that is waited for gets on.
_LOOK_SECONDS = 1.0


class WriterDied(CheckpointError):
    """The process beside this worker ended before a checkpoint was whole."""


@dataclass(frozen=True)
class Outcome:
    """What came of a save."""

    step: int
    seconds: float = 0.0
    """From the order until it was visible; training went on meanwhile."""
    bytes: int = 0
    error: CheckpointError | None = None
    """Why there is no such checkpoint."""


@dataclass(frozen=True)
class Upload:
    """What came of sending a checkpoint to the remote tier."""

    step: int
    seconds: float | None
    """None when it failed; why was said."""


@dataclass(frozen=True)
class WriterSettings:
    """What does not change from save to save."""

    directory: Path
    """The run's `checkpoints` folder."""
    keep: int = 3
    """Newest checkpoints that are kept."""
    fence: Fence | None = None
    rank: int = 0
    workers: int = 1
    patience_seconds: float = 600.0
    """How long the first worker's process waits for the others' parts."""
    stalled_seconds: float = 450.0
    """A process that has not finished a file for so long is given up: the disk hangs."""
    holds: bool = False
    """States will be held in memory too, which takes a third slot."""
    max_shard_bytes: int = 2 * 1024**3
    """Size of a file, roughly; a larger tensor gets one of its own."""
    after_save: Mapping[str, Any] | None = None
    """What `AfterSave` has to know; when not given, the newest `keep` are kept, and that is all."""
    sign: bool = False
    """Sign manifests with the key of the environment."""

    def record(self) -> dict[str, Any]:
        """Its JSON form."""
        return {**vars(self), "directory": str(self.directory), "fence": self.fence and self.fence.record()}


class CheckpointWriter:
    """Makes checkpoints of a state that several workers hold, each writing a part, in a process beside each worker.

    All workers submit together. What came of a save is known to the first worker; the others know of their part.

    Args:
        settings: Where to, and who this worker is.
        gather: Gives what every worker says, by rank.
    """

    def __init__(self, settings: WriterSettings, gather: Callable[[Any], Sequence[Any]] = lambda said: [said]) -> None:
        self._settings, self._gather = settings, gather
        self._slots = tuple(Slot() for _ in range(3 if settings.holds else 2))
        self._holding: list[tuple[Slot, _Process]] = []
        self._mine: list[Piece] | None = None
        self._pieces: list[Piece] = []
        self._images: list[Image] = []
        self._outcomes: deque[Outcome] = deque()
        self._uploads: deque[Upload] = deque()
        self._outstanding: dict[int, _Ordered] = {}
        self._changed = threading.Condition(threading.RLock())
        self._last_error: CheckpointError | None = None
        self._newest: tuple[int, str] | None = None
        self._process: _Process | None = None
        self._ready_process()

    def submit(self, step: int, blocks: StateBlocks, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Copy a state and order it to be written; when this returns, the state may change again.

        Args:
            step: Finished steps.
            blocks: What this worker has of the state.
            cursor: Where the run is.
            context: What the state belongs to, as JSON values; the time is added.

        Returns:
            Seconds that training had to wait.

        Raises:
            CheckpointError: a tensor has no place in the format.
        """
        start = time.monotonic()
        slot = self.get_ready(blocks)
        self._let_go(slot)
        slot.fill(blocks)
        fault_point("checkpoint.stage")
        order = self._order("write", step, slot, cursor, context)
        with self._changed:
            process = self._ready_process()
            if not self._outstanding:
                process.heard_seconds = time.monotonic()
            self._outstanding[step] = _Ordered(order, slot, process)
        process.tell(order)
        self._newest = step, order["tag"]
        return time.monotonic() - start

    def hold(self, step: int, blocks: StateBlocks, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Copy a state, to be written only if this worker dies; arguments and result as `submit`.

        The state held before stays until this one is whole, and all workers have theirs by the time that the one
        after it begins: no step is finished without all of them.
        """
        start = time.monotonic()
        slot = self.get_ready(blocks)
        self._let_go(slot)
        slot.fill(blocks)
        fault_point("checkpoint.hold")
        with self._changed:
            process = self._ready_process()
            self._holding = [(slot, process), *self._holding[:1]]
        process.tell(self._order("hold", step, slot, cursor, context))
        return time.monotonic() - start

    def _order(
        self, kind: str, step: int, slot: Slot, cursor: Mapping[str, int], context: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "kind": kind,
            "step": step,
            "descriptor": slot.descriptor,
            "pieces": [piece.record() for piece in self._pieces],
            "cursor": {**cursor, "step": step},
            "context": {**context, "time": time.time()},
            "tag": f"attempt-{context.get('attempt', os.getpid())}",
        }

    def _let_go(self, slot: Slot) -> None:
        """Say that a slot's content is no state any more, before it is overwritten: lines arrive in their order, so the
        process knows it even if this worker dies in the middle of the copy."""
        for held, process in self._holding:
            if held is slot:
                process.tell({"kind": "let go", "descriptor": slot.descriptor})
        self._holding = [(held, process) for held, process in self._holding if held is not slot]

    def get_ready(self, blocks: StateBlocks) -> Slot:
        """Agree on who writes what of a state, and make room for a copy of it; all workers together.

        The first save is as fast as the others if this was called some time before.
        """
        self._plan(blocks)
        slot = self._free_slot()
        slot.prepare(self._images, any(block.local.is_cuda for block in blocks.values()))
        return slot

    def outcomes(self) -> list[Outcome]:
        """What came of saves since this was last asked, in their order.

        Raises:
            Fenced: the run belongs to somebody else now.
        """
        with self._changed:
            self._give_up_if_stalled()
        found = []
        while self._outcomes:
            found.append(self._outcomes.popleft())
        for outcome in found:
            if isinstance(outcome.error, Fenced):
                raise outcome.error
        return found

    def uploads(self) -> list[Upload]:
        """What came of uploads since this was last asked; the first worker's process has them."""
        return [self._uploads.popleft() for _ in range(len(self._uploads))]

    def wait(self) -> None:
        """Return when all that was handed over is on disk.

        Raises:
            CheckpointError: the newest checkpoint cannot be written.
        """
        with self._changed:
            self._wait_for(lambda: not self._outstanding)
        if self._last_error is not None:
            raise self._last_error

    def wants_another_try(self) -> bool:
        """Wait for all that was handed over; whether some worker's process died over the newest state, so that a new
        process may succeed. All workers together."""
        with self._changed:
            self._wait_for(lambda: not self._outstanding)
        wanted = any(self._gather(isinstance(self._last_error, WriterDied)))
        if wanted:
            if self._settings.rank == 0 and self._newest is not None:  # or others would write into the old folder
                remove(Publisher(self._settings.directory).folder(*self._newest))
            self._gather(None)
        return wanted

    def close(self, write_held: bool = False) -> None:
        """Finish what was handed over and let go of all resources. Safe to call twice.

        Args:
            write_held: Have the newest state written that was held, as if this worker had died.
        """
        finished = None
        while self._process is not finished and self._process is not None:  # it may die and have a successor
            finished = self._process
            finished.finish(tell_end=not write_held)
            while not finished.ended:
                finished.join(_LOOK_SECONDS)
                with self._changed:
                    self._give_up_if_stalled(write_held)
        for slot in self._slots:
            slot.close()

    def _plan(self, blocks: StateBlocks) -> None:
        """Agree on who writes what; again only when somebody's parts have changed."""
        mine = [Piece.of(name, block) for name, block in blocks.items()]
        if not any(self._gather(mine != self._mine)):
            return
        self._mine = mine
        everyone = self._gather([piece.record() for piece in mine])
        shares = share_out([[Piece.parse(record) for record in worker] for worker in everyone])
        self._pieces = shares[self._settings.rank]
        self._images = plan_images(self._pieces, self._settings.rank, self._settings.max_shard_bytes)

    def _free_slot(self) -> Slot:
        """One that nothing is written from, and that does not hold the newest state; further ones only if need be,
        since each costs as much memory again."""

        def free() -> Slot | None:
            used = [ordered.slot for ordered in self._outstanding.values()]
            used += [slot for slot, _ in self._holding[:1]]
            return next((slot for slot in self._slots if slot not in used), None)

        with self._changed:
            return self._wait_for(free)

    def _wait_for(self, condition: Callable[[], _Found | None]) -> _Found:
        """Until something holds; for who has the lock."""
        while not (found := self._changed.wait_for(condition, _LOOK_SECONDS)):
            self._give_up_if_stalled()
        return found

    def _give_up_if_stalled(self, rescues: bool = False) -> None:
        """A write that hangs must not hold up training: it is given up, and the next state is tried by another process.

        Args:
            rescues: The process may be writing what nobody has ordered.
        """
        process = self._process
        if process is None or process.ended or not (self._outstanding or rescues):
            return
        seconds = time.monotonic() - process.heard_seconds
        if seconds > self._settings.stalled_seconds:
            process.kill()
            self._ended(process, f"the disk seems to hang (no progress for {format_seconds(seconds)})", hangs=True)

    def _ready_process(self) -> _Process:
        if self._process is None or self._process.ended:
            environment = dict(os.environ)
            if self._process is not None:  # a fault that was ordered for the first one is not for its successor
                environment.pop("HEADWAY_FAULTS", None)
            descriptors = [slot.descriptor for slot in self._slots]
            self._process = _Process(
                self._settings, descriptors, environment, self._settle, self._uploads.append, self._ended
            )
        return self._process

    def _settle(self, outcome: Outcome) -> None:
        """A save is over."""
        with self._changed:
            self._outstanding.pop(outcome.step, None)  # of a state that was held, there was no order
            self._last_error = outcome.error
            self._outcomes.append(outcome)
            self._changed.notify_all()

    def _ended(self, process: _Process, how: str, hangs: bool = False) -> None:
        """A process is gone, and with it what it was writing; what it had not begun is for its successor.

        Args:
            process: Which.
            how: In words.
            hangs: The disk does, so that training must not touch it.
        """
        with self._changed:
            if process.ended:  # it was given up
                return
            process.ended = True
            lost = sorted(step for step, ordered in self._outstanding.items() if ordered.process is process)
            for step in lost[:1]:
                what = f"{how} before step {step} was saved"
                self._tell_others(step, self._outstanding[step].order["tag"], what, hangs)
                self._settle(Outcome(step, error=WriterDied(what, where=str(self._settings.directory))))
            for step in lost[1:]:
                self._outstanding[step] = again = replace(self._outstanding[step], process=self._ready_process())
                again.process.tell(again.order)

    def _tell_others(self, step: int, tag: str, why: str, hangs: bool) -> None:
        """Their processes wait for what the dead one was to do, each in another way (see `WriteProcess`)."""
        if self._settings.rank:
            self._ready_process().tell({"kind": "fail", "step": step, "tag": tag, "why": why})
        elif self._settings.workers > 1 and not hangs:
            with suppress(OSError):  # it was made already, or nothing can be
                Publisher(self._settings.directory).folder(step, tag).mkdir(parents=True)


@dataclass(frozen=True)
class _Ordered:
    """A save that is under way."""

    order: Mapping[str, Any]
    slot: Slot
    process: _Process


class _Process:
    """The process beside this worker, and the thread that takes its answers."""

    def __init__(
        self,
        settings: WriterSettings,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        settle: Callable[[Outcome], None],
        uploaded: Callable[[Upload], None],
        at_end: Callable[[_Process, str], None],
    ) -> None:
        self.ended = False
        self.heard_seconds = time.monotonic()
        """When it last told that it gets on."""
        self._settle, self._uploaded, self._at_end = settle, uploaded, at_end
        lock = [open_writers_lock(settings.fence.run)] if settings.fence else []
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "headway.checkpoint.write_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                pass_fds=[*descriptors, *lock],
                env=environment,
            )
        finally:
            for descriptor in lock:  # it is the process's from here on, until its end
                os.close(descriptor)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.tell(settings.record())

    def tell(self, record: Mapping[str, Any]) -> None:
        """Send a line."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which the listener notices
            self._popen.stdin.write(json.dumps(record) + "\n")
            self._popen.stdin.flush()

    def finish(self, tell_end: bool) -> None:
        """Let it do what it has been told, and wait for its end."""
        assert self._popen.stdin is not None
        if tell_end and not self._popen.stdin.closed:
            self.tell({"kind": "end"})
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self.heard_seconds = time.monotonic()

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        self._listener.join(seconds)

    def kill(self) -> None:
        """End it, or have it end with the call to the kernel that it is in; nobody waits for that."""
        self._popen.kill()

    def _listen(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.heard_seconds = time.monotonic()
            answer = json.loads(line)
            if answer["kind"] == "said":
                console.say(answer["text"])
            elif answer["kind"] == "uploaded":
                self._uploaded(Upload(answer["step"], answer["seconds"]))
            elif answer["kind"] == "saved":
                self._settle(Outcome(answer["step"], answer["seconds"], answer["bytes"]))
            elif answer["kind"] == "failed":
                kind = Fenced if answer["fatal"] else CheckpointError
                error = kind(answer["what"], where=answer["where"], fix=answer["fix"])
                self._settle(Outcome(answer["step"], error=error))
        code = self._popen.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._at_end(self, f"the process that writes checkpoints died ({how})")
