"""One process of a cell: `python -m headway.lab.bench.worker SPEC`; its launcher sets its rank.

It trains with the loop, the step and the strategies of every run, on the cell's model and data, and writes no run
directory and no checkpoint. The first worker prints the result (`blocks`); a worker that ends with an error prints
that.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from headway.core.errors import HeadwayError
from headway.core.process.exit import exit_process
from headway.lab.bench.spec import Spec
from headway.run.supervisor.worker import begin_process


def main() -> None:
    """Measure as one worker."""
    begin_process()
    run_worker(Path(sys.argv[1]))


def run_worker(path: Path) -> None:
    """Measure, and end this process with an exit code."""
    spec = Spec.read(path)
    try:
        from headway.lab.bench.measure import measure  # loads PyTorch

        measure(spec)
    except HeadwayError as error:
        exit_process(error.exit_code)
    except Exception:
        # Often this error only shows that another worker is gone. The launcher reads the report of the first one to
        # end.
        time.sleep(1.0)
        exit_process(1)
    exit_process(0)


if __name__ == "__main__":
    main()
