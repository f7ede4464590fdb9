"""Words for how two cells differ, and how one ended, shared by findings, tables and comparisons."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from headway.config.strategies import AUTO, STRATEGIES
from headway.core.format import printable
from headway.lab.bench.analysis import MEMORY, SPEED, compare
from headway.lab.bench.results import CellResult

#: Strategies that are second names of another one.
ALIASES = {name: spec.stands_for for name, spec in STRATEGIES.items() if spec.stands_for is not None and name != AUTO}
#: A difference smaller than this share would be shown as 0.0 %.
_SHOWN = 0.0005
#: The words that follow the requested size in PyTorch's out-of-memory messages.
_OUT_OF_MEMORY_REST = re.compile(r"\s(GPU \d+ has|Of the allocated|Error code|See documentation|If reserved)\b.*", re.S)

ONCE = "measured once, so no comparison is possible"
_ALIKE = "that the repeats can tell"
_WITHIN = "larger than that between two names of one strategy"


def speed_in_words(result: CellResult, base: CellResult, doubt: float = 0.0) -> str | None:
    """Describe a speed: "18 % slower than"; None without a significant difference.

    Args:
        doubt: Differences up to this are ignored, as the logarithm of a ratio.
    """
    found = compare(result, base, SPEED)
    if found is None or not found.is_significant or abs(math.log(found.ratio)) <= max(doubt, _SHOWN):
        return None
    if found.ratio >= 2:
        return f"{found.ratio:.1f} times as fast as"
    return f"{percent(abs(found.ratio - 1))} {'slower' if found.ratio < 1 else 'faster'} than"


def memory_in_words(result: CellResult, base: CellResult) -> str | None:
    """Describe memory: "43 % less memory than"; None without a significant difference."""
    found = compare(result, base, MEMORY)
    if found is None or not found.is_significant or abs(found.ratio - 1) < _SHOWN:
        return None
    if found.ratio >= 2:
        return f"{found.ratio:.1f} times as much memory as"
    return f"{percent(abs(found.ratio - 1))} {'less' if found.ratio < 1 else 'more'} memory than"


def is_known(result: CellResult, base: CellResult) -> bool:
    """Return whether both were measured often enough to show a difference."""
    found = compare(result, base, SPEED)
    return found is not None and found.is_known


def is_hidden(result: CellResult, base: CellResult, doubt: float) -> bool:
    """Return whether the speeds differ significantly, but no more than two names of one strategy do."""
    return speed_in_words(result, base) is not None and speed_in_words(result, base, doubt) is None


def sentence(result: CellResult, base: CellResult, doubt: float = 0.0) -> str:
    """Compare a strategy's memory and speed with another's, without the end of the sentence.

    Example: "zero3 needs 43 % less memory than ddp and is 18 % slower here".

    Args:
        doubt: Differences in speed up to this are ignored, as the logarithm of a ratio.
    """
    name = _label(result)
    other = _label(base)
    if not is_known(result, base):
        return f"{name} cannot be compared with {other}: {ONCE}"
    needs = memory_in_words(result, base)
    runs = speed_in_words(result, base, doubt)
    why = _WITHIN if is_hidden(result, base, doubt) else _ALIKE
    if needs and runs:
        return f"{name} needs {needs} {other} and is {runs.removesuffix(' than').removesuffix(' as')} here"
    if runs:
        return f"{name} is {runs} {other} here, with no difference in memory {_ALIKE},"
    if needs:
        return f"{name} needs {needs} {other}, with no difference in speed {why},"
    if why == _WITHIN:
        return f"Between {name} and {other} there is no difference in speed {why}, and none in memory {_ALIKE},"
    return f"Between {name} and {other} there is no difference {_ALIKE}"


def percent(share: float) -> str:
    """Format a share with its significant digits."""
    return f"{share * 100:.0f} %" if share >= 0.095 else f"{share * 100:.1f} %"


def failure_in_words(result: CellResult, characters: int = 1000) -> str:
    """Describe how and why the newest failed repeat ended, in so many characters at most."""
    failure = result.last_failure
    if failure is None:
        return ""
    reason = failure.reason or ""
    if failure.status == "out_of_memory":
        reason = _OUT_OF_MEMORY_REST.sub("", reason)
    reason = one_line(reason)
    short = reason if len(reason) <= characters else f"{reason[: characters - 1]}…"
    return f"{failure.status.replace('_', ' ')}: {short}"


def status_in_words(status: str) -> str:
    """Describe the status of a result."""
    return {"ok": "succeeded", "excluded": "left out"}.get(status, status.replace("_", " "))


def one_line(text: str) -> str:
    """Put foreign text on one line, without control characters that would steer a terminal."""
    return printable(" ".join(text.split()))


def workers_in_words(count: int) -> str:
    """Describe the number of workers, for use within a sentence."""
    return "one worker" if count == 1 else f"{count} workers"


def size_in_words(result: CellResult) -> str:
    """Describe what the suite compares: the number of workers, or that of machines."""
    each = result.workers_per_machine
    if each is None:
        return workers_in_words(result.cell.workers)
    return "one machine" if result.cell.machines == 1 else f"{result.cell.machines} machines"


def listed(names: Sequence[str]) -> str:
    """Join words as "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _label(result: CellResult) -> str:
    name = result.cell.strategy
    return f"{name} (another name of {ALIASES[name]})" if name in ALIASES else name
