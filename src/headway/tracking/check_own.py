"""Makes the sink of a tracker of the user's own, as a process: prints what is wrong, and how to mend it."""

from __future__ import annotations

import sys

from headway.config.sections.track import OwnTrackerConfig, TrackConfig
from headway.core.console import print_line
from headway.core.errors import HeadwayError
from headway.tracking.sinks import make_sink


def main() -> int:
    """Make the sink that the arguments describe; return 1 if that fails."""
    from pathlib import Path

    settings, where = sys.argv[1:]
    try:
        make_sink(TrackConfig(own=OwnTrackerConfig.model_validate_json(settings)), Path(), where)
    except HeadwayError as error:
        print_line(error.what)
        print_line(error.fix or "")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
