"""`python -m fuzz [TARGET ...] [--seconds N]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from fuzz.driver import fuzz
from fuzz.targets import TARGETS


def main() -> int:
    """Fuzz targets one after the other; 1 when something was found."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all when none is named")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each target (default: 300)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="to see the same inputs again")
    parser.add_argument("--folder", type=Path, help="where cases and findings go; a temporary one otherwise")
    options = parser.parse_args()
    unknown = [name for name in options.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="headway-fuzz-"))
    failed = False
    for name in options.targets or TARGETS:
        summary = fuzz(name, options.seconds, folder / name, options.seed)
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(summary.outcomes.items()))
        print(f"{name}: {summary.inputs:,} inputs ({counts}), seed {options.seed}", flush=True)
        if summary.failure:
            failed = True
            print(f"{name}: {summary.failure}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
