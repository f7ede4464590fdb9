"""The workers of a cell on this machine: `python -m headway.bench.local SPEC` starts them and waits for them."""

from __future__ import annotations

import sys
from pathlib import Path

from headway.bench.blocks import block
from headway.bench.worker import Spec, run_worker
from headway.core.console import print_lines
from headway.supervisor.watchdog import in_words
from headway.supervisor.worker import begin_process


def main() -> None:
    """Run as the only worker, or start as many as the cell has."""
    begin_process()
    path = Path(sys.argv[1])
    spec = Spec.read(path)
    if spec.result.cell.workers == 1:
        run_worker(path)
        return
    from headway.supervisor.agent import load_training
    from headway.supervisor.local_workers import WorkersFailed, start_workers

    workers = spec.result.cell.workers
    try:
        start_workers(workers, path.parent, {}, "headway.bench.worker", str(path), load=load_training)
    except WorkersFailed as error:
        # Workers whose peer has died end with errors of their own.
        if killed := error.killed:
            reason = f"worker {killed.rank} died ({in_words(killed.code)})"
            print_lines("\n" + block(spec.ended("killed", reason).model_dump(mode="json")))
        sys.exit(1)


if __name__ == "__main__":
    main()
