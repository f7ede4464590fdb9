"""Starting a module of Headway in a process of its own, which finds modules where this process finds them."""

from __future__ import annotations

import json
import sys

#: `python -m` looks into the working folder before all others, which the console script does not: a `queue.py` in it
#: would be taken for the standard library's. So the new process is started without it (`-P`) and given this process's
#: places, the working folder among them only if it is one of those.
_START = (
    "import json, runpy, sys; module = sys.argv.pop(1); sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as `python -m` does, with this process's `sys.path`.

    Args:
        module: Its full name, which stands in the process's command line.
        arguments: For the module.
    """
    places = [place for place in sys.path if isinstance(place, str)]
    return [sys.executable, "-P", "-c", _START, module, json.dumps(places), *arguments]
