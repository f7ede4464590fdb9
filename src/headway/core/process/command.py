"""Command lines that run a module of Headway in a new process with the `sys.path` of this one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

#: Unlike the console script, `python -m` searches the working folder first: a `queue.py` there would shadow the module
#: of the standard library. So the new process starts without that folder (`-P`) and gets this process's `sys.path`.
_START = (
    "import json, runpy, sys; "
    "module = sys.argv.pop(1); sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)

#: Python that runs the rest of its command line, which gets SIGTERM when its parent, whose number comes first, dies
#: (Linux: PR_SET_PDEATHSIG).
DIES_WITH_PARENT = (
    "import ctypes, os, sys; parent = int(sys.argv[1]); getattr(ctypes.CDLL(None), 'prctl', int)(1, 15);"
    " sys.exit(75) if os.getppid() != parent else os.execv(sys.argv[2], sys.argv[2:])"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m` does, with this process's `sys.path`.

    Args:
        module: Full name of the module; it appears in the command line of the new process.
        arguments: Arguments of the module.
    """
    places = [place for place in sys.path if isinstance(place, str)]
    return [sys.executable, "-P", "-c", _START, module, json.dumps(places), *arguments]


def tied_command(command: Sequence[str]) -> list[str]:
    """Return what runs a command that is asked to end when this process dies."""
    return [sys.executable, "-P", "-c", DIES_WITH_PARENT, str(os.getpid()), *command]
