"""Worker process of `headway profile`: `python -m headway.lab.profiling.worker FOLDER`, once per worker."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from headway.config import load_config
from headway.core.errors import Preempted
from headway.core.files.atomic import write_text
from headway.core.process.exit import exit_process
from headway.lab.profiling.plan import Plan
from headway.lab.profiling.profiler import Profiler
from headway.run.session.attempt import RunOptions
from headway.run.session.preflight import RunPlan
from headway.run.session.session import run_in_this_process
from headway.run.supervisor.worker import begin_process, keep_log, reasons_in


def main() -> None:
    """Train some steps as one worker; write `worker-<rank>.json` or `error-<rank>.json`.

    The run directory is the one of FOLDER's config.
    """
    begin_process()
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    os.dup2(2, 1)  # stdout is for the command's result; keep what libraries print out of it
    if rank > 0:
        keep_log(folder / f"worker-{rank}.log")
    with reasons_in(folder, rank):
        _profile(folder, rank)
    exit_process(0)


def _profile(folder: Path, rank: int) -> None:
    profiler = Profiler(Plan(**json.loads((folder / "plan.json").read_bytes())), folder)
    try:
        plan = RunPlan.of(load_config(folder / "config.yaml"), RunOptions())
        run_in_this_process(plan, plan.make_task, [profiler])
    except Preempted:  # expected: the profiler stops the run after its last step
        if profiler.record is None:
            raise
    assert profiler.record is not None, "the run is long enough for all steps of the plan"
    write_text(folder / f"worker-{rank}.json", profiler.record.model_dump_json())


if __name__ == "__main__":
    main()
