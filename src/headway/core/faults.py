"""Faults on request, so that tests can prove what survives them.

`HEADWAY_FAULTS` holds comma-separated orders of the form `ACTION@POINT[:COUNT]`: at the COUNT-th time (from 1, default
1) that this process passes the named point, do the action. Points that belong to a step are passed with the step number
and are addressed as `POINT=STEP`. For example `HEADWAY_FAULTS=kill@step=17,enospc@checkpoint.shard:2`. Actions:

- `kill`: SIGKILL to itself, as the kernel's out-of-memory killer does;
- `kill-group`: SIGKILL to all processes of its group, as when a machine goes;
- `stop`: SIGTERM to itself, as a scheduler does;
- `enospc`: a full disk;
- `nan`, `spike`: reported to the caller, who poisons the value or makes it very large;
- `flip`: reported to the caller, who flips a bit.

Without the variable a fault point costs one dictionary look-up.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections import Counter
from functools import cache

from headway.core.errors import ConfigError

_ORDER = re.compile(r"(kill|kill-group|stop|enospc|nan|spike|flip)@([^:@]+)(?::([1-9][0-9]*))?")
_passed: Counter[str] = Counter()


def fault_point(point: str, step: int | None = None) -> str | None:
    """Carry out the fault ordered for this point, if any; returns the action's name when the caller has to act.

    Raises:
        OSError: (ENOSPC) when a full disk was ordered.
        ConfigError: `HEADWAY_FAULTS` holds something that is no order.
    """
    orders = os.environ.get("HEADWAY_FAULTS")
    if not orders:
        return None
    name = point if step is None else f"{point}={step}"
    _passed[name] += 1
    for action, target, count in _parsed(orders):
        if target != name or _passed[name] != count:
            continue
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "kill-group":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if action == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        if action == "enospc":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (ordered by HEADWAY_FAULTS at {name})")
        return action
    return None


@cache
def _parsed(orders: str) -> list[tuple[str, str, int]]:
    """Action, point and count of each order; a mistyped one must not pass for a fault that was survived."""
    parsed = []
    for order in orders.split(","):
        match = _ORDER.fullmatch(order.strip())
        if match is None:
            raise ConfigError(
                f"there is no such fault: '{order.strip()}'",
                where="HEADWAY_FAULTS",
                fix="kill, kill-group, stop, enospc, nan, spike or flip, as in kill@step=17 or"
                " enospc@checkpoint.shard:2",
            )
        parsed.append((match[1], match[2], int(match[3] or 1)))
    return parsed
