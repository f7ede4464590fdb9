"""A process that reads what it is told to, and says what came of it; its death is an answer too.

It takes the folder of a case per line of standard input and answers with a line of JSON. What the readers print is
looked through for tracebacks: of threads, and of processes that they start. Address space is limited to what it takes
after every sound case has been read, and 3 GB more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys
import tempfile
import traceback
from pathlib import Path

from fuzz.targets import CODES, find_target

_ROOM = 3 * 2**30
_TRACEBACK = b"Traceback (most recent call last)"


def main() -> None:
    """Read cases until there are none."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    printed = tempfile.TemporaryFile()  # noqa: SIM115
    os.dup2(printed.fileno(), 1)
    os.dup2(printed.fileno(), 2)
    target = find_target(sys.argv[1])
    for case in sorted(Path(sys.argv[2]).iterdir()):
        try:
            target.read(case)
        except BaseException as error:
            answers.write(json.dumps({"ready": False, **_said(error)}) + "\n")
            return
    _limit_memory()
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        before = _start_of_peak()
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)
        CODES.clear()
        answer: dict[str, object] = {"outcome": "read", "text": ""}
        try:
            target.read(Path(line.rstrip("\n")))
            if any(CODES):
                answer["outcome"] = "refused"
        except BaseException as error:
            answer = _said(error)
        answer["growth"] = _kilobytes("VmHWM") * 1024 - before
        sys.stdout.flush()
        sys.stderr.flush()
        text = os.pread(1, 2**20, 0)
        if _TRACEBACK in text:
            answer |= {"outcome": "traceback", "text": text[text.index(_TRACEBACK) :][:4000].decode(errors="replace")}
        answers.write(json.dumps(answer) + "\n")


def _said(error: BaseException) -> dict[str, object]:
    from headway.core.errors import HeadwayError

    if isinstance(error, HeadwayError):
        return {"outcome": "refused", "text": error.what}
    return {"outcome": "traceback", "text": "".join(traceback.format_exception(error))[-4000:]}


def _limit_memory() -> None:
    size = _kilobytes("VmSize") * 1024 + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _start_of_peak() -> int:
    """Begin to measure the peak anew; returns what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _kilobytes("VmRSS") * 1024


def _kilobytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
