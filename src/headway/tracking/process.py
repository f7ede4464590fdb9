"""The follower's process, which the supervisor of a run starts: one for each run, with a thread for each tracker.

It follows until its standard input ends: then the run is over, or its supervisor was killed. What people must know goes
to standard output, as messages; the supervisor passes it on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from headway.config.sections.track import TrackConfig
from headway.core.console import open_streams
from headway.core.coordination.follower_messages import FOLLOWER, FollowerDone, FollowerMessage, FollowerSaid
from headway.tracking.follow import follow_all
from headway.tracking.follower import Waiting

#: How long to try to reach a tracker after the end. The supervisor waits less; this is for one that was killed.
_PATIENCE_SECONDS = 120.0


def main() -> int:
    """Follow the run that the arguments name."""
    open_streams()
    with suppress(OSError):
        os.nice(10)
    path = Path(sys.argv[1])
    trackers = [TrackConfig.model_validate(item) for item in json.loads(sys.argv[2])]
    over = threading.Event()
    stop = threading.Event()
    lock = threading.Lock()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()

    def send(message: FollowerMessage) -> None:
        with lock, suppress(OSError):  # no process may read it any more
            sys.stdout.write(FOLLOWER.encode(message) + "\n")
            sys.stdout.flush()

    def report(text: str) -> None:
        send(FollowerSaid(text))

    def sleep(seconds: float) -> None:
        """Sleep, but not past the end of the run or the signal to stop."""
        until = time.monotonic() + seconds
        was_over = over.is_set()
        while (left := until - time.monotonic()) > 0 and not stop.is_set() and over.is_set() == was_over:
            stop.wait(min(left, 0.2))

    waiting = Waiting(over.is_set, must_stop=stop.is_set, sleep=sleep, patience_seconds=_PATIENCE_SECONDS)
    errors = follow_all([(path, waiting)], lambda _: trackers, report, waits_for_others=True)
    for error in errors:
        fix = f" ({error.fix})" if error.fix else ""
        report(f"{error.what}{fix}")
    send(FollowerDone())
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(1 if errors else 0)  # a client's threads must not keep the process


def _wait_for_end(over: threading.Event) -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    over.set()


if __name__ == "__main__":
    sys.exit(main())
