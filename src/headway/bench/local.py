"""The workers of a cell on this machine: `python -m headway.bench.local SPEC`, which starts and waits for them."""

from __future__ import annotations

import sys
from pathlib import Path

from headway.bench.blocks import block
from headway.bench.worker import Spec, run_worker
from headway.launch.worker import begin_process
from headway.supervise.watchdog import in_words


def main() -> None:
    """Be the only worker, or start as many as the cell has."""
    begin_process()
    path = Path(sys.argv[1])
    spec = Spec.read(path)
    if spec.result.cell.workers == 1:
        run_worker(path)
        return
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from headway.launch.agent import first_killed, start_workers

    cell = spec.result.cell
    try:
        start_workers(cell.workers, f"bench-{cell.name}", {}, "headway.bench.worker", str(path))
    except ChildFailedError as error:
        # Workers whose peer is gone end with errors of their own.
        if killed := first_killed(error):
            rank, failure = killed
            reason = f"worker {rank} died ({in_words(failure.exitcode)})"
            print("\n" + block(spec.ended("killed", reason).model_dump(mode="json")), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
