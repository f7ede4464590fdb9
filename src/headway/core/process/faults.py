"""Fault injection, so that tests can prove what a run survives.

`HEADWAY_FAULTS` holds comma-separated orders of the form `ACTION@POINT[:COUNT][#START][%RANK]`: at the COUNT-th time
(from 1, default 1) that this process passes the named point, it carries out the action. Points that belong to a step
are passed with the step number and are addressed as `POINT=STEP`. For example
`HEADWAY_FAULTS=kill@step=17,enospc@checkpoint.shard:2`. If a command restarts its workers, it carries out an order only
at the START-th start (from 1, default 1; `*` means every start), on all workers or on one rank. Actions:

- `kill`: SIGKILL to itself, as the kernel's out-of-memory killer does;
- `kill-group`: SIGKILL to all processes of its group, as when a machine fails;
- `stop`: SIGTERM to itself, as a scheduler does;
- `freeze`: SIGSTOP to itself;
- `hang`: sleep without end, holding the interpreter's lock (Linux and macOS);
- `crash`: raise a `RuntimeError`;
- `slow`: sleep for a tenth of a second, now and at each later pass of the point, whatever the step;
- `enospc`, `edquot`, `efbig`, `erofs`, `eio`: raise the error of a disk that is full, out of quota, at its limit for
  one file, read-only, or broken;
- `nan`, `spike`: returned to the caller, which poisons the value or makes it very large;
- `flip`: returned to the caller, which flips a bit.

With `HEADWAY_FAULTS_LOG`, each order is logged in that file as a JSON line before it is carried out.

Without `HEADWAY_FAULTS` a fault point costs one look-up in the environment, about a microsecond.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.files.atomic import append_json_line

_ORDER = re.compile(
    r"(kill|kill-group|stop|freeze|hang|crash|slow|enospc|edquot|efbig|erofs|eio|nan|spike|flip)@([^:@#%]+)"
    r"(?::([1-9][0-9]*))?(?:#([1-9][0-9]*|\*))?(?:%([0-9]+))?"
)

#: Points with a step: the phases of a worker (`heartbeat.Phase`), and parts of a step.
_OF_STEPS = """
    start data compute backward reduce update record evaluation checkpoint end
    step gradient rollback replay weights
"""
#: Points without a step: moments at which a kill leaves something half done.
_OTHERS = """
    checkpoint.stage checkpoint.hold checkpoint.shard checkpoint.manifest checkpoint.rename checkpoint.replace
    checkpoint.prune checkpoint.discard upload.file upload.manifest upload.discard bring.part bring.rename
    data.encode data.piece data.unit data.shard data.publish data.aside data.published dedup.prints packing.block
    import.file remote.block remote.keep remote.rename communication begin.rename
    registry.file registry.version registry.alias reseal.files reseal.manifest
"""
#: Every point, and whether it is passed with the number of a step.
POINTS = {**dict.fromkeys(_OF_STEPS.split(), True), **dict.fromkeys(_OTHERS.split(), False)}

#: Errors of the operating system.
_OF_THE_DISK = ("enospc", "edquot", "efbig", "erofs", "eio")
#: Faults that the caller carries out, and the points whose caller does so. At other points they would have no effect.
_ASKED = {"nan": ("gradient",), "spike": ("gradient",), "flip": ("replay.0", "replay", "weights")}

FAULTS_VARIABLE = "HEADWAY_FAULTS"
FAULTS_LOG_VARIABLE = "HEADWAY_FAULTS_LOG"
#: How often the command of this worker has restarted its workers.
RESTARTS_VARIABLE = "HEADWAY_RESTARTS"
_SLOW_SECONDS = 0.1

#: Suffixes that address one worker, or one tensor, of a point.
_OF_A_WORKER = re.compile(r"(?<=^replay)\.[0-9]+|(?<=^weights)\.[0-9]+|(?<=^communication)\.worker-[0-9]+")

_passed: Counter[str] = Counter()
_slow: set[_Fault] = set()


@dataclass(frozen=True)
class _Fault:
    """One parsed order of `HEADWAY_FAULTS`."""

    action: str
    point: str
    count: int
    start: int | None
    """Number of the start of the workers, from 1; None for every start."""
    rank: int | None


def fault_point(point: str, step: int | None = None) -> str | None:
    """Carry out the fault that is ordered for this point, if any.

    Returns:
        The name of the action when the caller has to carry it out, else None.

    Raises:
        OSError: an error of the disk was ordered (ENOSPC, EDQUOT, EFBIG, EROFS, EIO).
        RuntimeError: a crash was ordered.
        ConfigError: `HEADWAY_FAULTS` holds an invalid order.
    """
    try:
        orders = os.environ[FAULTS_VARIABLE]
    except KeyError:  # `get` would cost a fifth more
        return None
    if not orders:
        return None
    name = point if step is None else f"{point}={step}"
    _passed[name] += 1
    start = int(os.environ.get(RESTARTS_VARIABLE, "0")) + 1
    rank = int(os.environ.get("RANK", "0"))
    for order in parse_orders(orders):
        action = order.action
        if order.start not in (None, start) or order.rank not in (None, rank):
            continue
        if action == "slow" and order.point.split("=")[0] == point and order in _slow:
            time.sleep(_SLOW_SECONDS)
        if order.point != name or _passed[name] != order.count:
            continue
        if log := os.environ.get(FAULTS_LOG_VARIABLE):
            text = f"{action}@{name}:{order.count}"
            append_json_line(Path(log), {"time": time.time(), "order": text, "rank": rank, "start": start})
        if action == "slow":
            _slow.add(order)
        if action == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        while action == "hang":  # a signal, such as the request for a stack, interrupts a sleep
            ctypes.PyDLL(None).sleep(1_000_000)
        if action == "crash":
            raise RuntimeError(f"ordered by HEADWAY_FAULTS at {name}")
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "kill-group":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if action == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        if action in _OF_THE_DISK:
            number = getattr(errno, action.upper())
            raise OSError(number, f"{os.strerror(number)} (ordered by HEADWAY_FAULTS at {name})")
        return action
    return None


@cache
def parse_orders(orders: str) -> list[_Fault]:
    """Parse orders strictly: a test must not pass because its order was mistyped and had no effect.

    Raises:
        ConfigError: one of them is invalid.
    """
    parsed = []
    for order in orders.split(","):
        match = _ORDER.fullmatch(order.strip())
        if match is None:
            raise ConfigError(
                f"there is no such fault: '{order.strip()}'",
                where="HEADWAY_FAULTS",
                fix="kill, kill-group, stop, freeze, hang, crash, slow, enospc, edquot, efbig, erofs, eio, nan, spike"
                " or flip, as in kill@step=17, kill@step=17#2 or enospc@checkpoint.shard:2",
            )
        _check_requirements(order.strip(), match[1], match[2])
        start = None if match[4] == "*" else int(match[4] or 1)
        rank = None if match[5] is None else int(match[5])
        parsed.append(_Fault(match[1], match[2], int(match[3] or 1), start, rank))
    return parsed


def _check_requirements(order: str, action: str, place: str) -> None:
    """Check that an order's point exists and that its action has an effect there.

    Args:
        place: The point, with its step if it has one.
    """
    name, at_step, _ = place.partition("=")
    point = _OF_A_WORKER.sub("", name)
    what = f"there is no such fault: '{order}'"
    fix = ""
    if point not in POINTS:
        near = difflib.get_close_matches(point, sorted(POINTS), n=1)
        what += f", since nothing passes a point '{point}'"
        fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(POINTS))}"
    elif POINTS[point] != bool(at_step):
        what += f"; '{point}' is passed {'at a step' if POINTS[point] else 'without a step'}"
        fix = f"{action}@{point}=5, at step 5" if POINTS[point] else f"{action}@{name}"
    elif action in _ASKED and name.split(".")[0] not in _ASKED[action]:
        asked = _ASKED[action][0]
        what += ", which has no effect there"
        fix = f"{action}@{asked}, for example at step 5: {action}@{asked}=5"
    if fix:
        raise ConfigError(what, where="HEADWAY_FAULTS", fix=fix)
