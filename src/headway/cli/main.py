"""The entry point of the `headway` command.

It imports little, since every command waits for that; a verb imports what it needs.
"""

from __future__ import annotations

import atexit
import errno
import sys

from headway.core.console import ResultLost, flush_streams, open_streams, say
from headway.core.errors import INTERRUPTED, HeadwayError, explain_refusal, fix_for, lost_working_folder
from headway.core.process.exit import end, exit_process


def main() -> None:
    """Run the command; deliberate errors become three lines and an exit code, never a traceback."""
    atexit.register(end)
    open_streams()
    code = _run()
    lost = flush_streams()
    code = code if lost is None else code or _report_lost(lost)
    if isinstance(code, int):
        exit_process(code)
    sys.exit(code)


def _run() -> int | str | None:
    """Run the command line and return the exit code."""
    words = sys.argv[1:]
    try:
        lost = lost_working_folder()
        if lost is not None:  # PyTorch's libraries would end the process without a word of the cause
            raise lost
        # Not at the top: Ctrl-C while this loads is answered below, and so is what cannot be imported.
        from headway.cli.application import application, begin_loading, wanted

        begin_loading(words)
        application(wanted(words))()
    except SystemExit as end:  # click ends a command so
        return end.code
    except HeadwayError as error:
        say(error.render())
        return error.exit_code
    except ResultLost as error:
        flush_streams()  # drops the rest of the result
        return _report_lost(error)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except Exception as error:
        explained = explain_refusal(error)
        if explained is None:
            raise
        say(explained.render())
        return explained.exit_code
    return 0


def _report_lost(error: OSError) -> int:
    if error.errno != errno.EPIPE:  # `headway ... | head`: the reader has closed the pipe
        fix = fix_for(error, "free space where the output goes, and run the same command again")
        say(HeadwayError(f"the result cannot be written: {error.strerror}", where="standard output", fix=fix).render())
    return 1
