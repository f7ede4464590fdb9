"""Fuzz the parsers of files that others may have written.

python -m fuzz [TARGET ...] [--seconds N], or python -m fuzz TARGET --case FOLDER to read one case again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from fuzz.driver import fuzz
from fuzz.targets import TARGETS, find_target


def main(arguments: list[str] | None = None) -> int:
    """Fuzz targets one after the other; returns 1 if something was found."""
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET",
        help=f"of {', '.join(TARGETS)}; all when none is named. MODULE:NAME is one of your own",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=300.0, help="for each target (default: 300)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="to see the same inputs again")
    parser.add_argument("--folder", type=Path, help="for cases and findings (default: a temporary one)")
    parser.add_argument("--case", type=Path, help="read this case once, in this process, and end")
    options = parser.parse_args(arguments)
    try:
        targets = [find_target(name) for name in options.targets or TARGETS]
    except KeyError as error:
        parser.error(f"there is no target {error}")
    if options.case:
        targets[0].read(options.case)
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="headway-fuzz-"))
    found = False
    for target in targets:
        name = target.name
        summary = fuzz(target, options.seconds, folder / name, options.seed)
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(summary.outcomes.items()))
        print(f"{name}: {summary.inputs:,} inputs ({counts}), seed {options.seed}", flush=True)
        if summary.failure:
            found = True
            print(f"{name}: {summary.failure}\n  again: python -m fuzz {name} --case {summary.case}", flush=True)
    if not found and not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
