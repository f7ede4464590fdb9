"""Worker process of the communication benchmark: `python -m headway.lab.doctor.communication_worker FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from headway.core.errors import HeadwayError
from headway.core.files.atomic import write_json
from headway.core.process.exit import exit_process
from headway.run.supervisor.worker import begin_process, keep_log


def main() -> None:
    """Measure as one worker; the first one writes `result.json`, a failing one `error-<rank>.json`."""
    begin_process()
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    os.dup2(2, 1)  # stdout is for the command's result; keep what libraries print out of it
    if rank > 0:
        keep_log(folder / f"worker-{rank}.log")
    try:
        from headway.lab.doctor.communication import Plan, measure_communication

        result = measure_communication(TypeAdapter(Plan).validate_json((folder / "plan.json").read_bytes()))
        if rank == 0:
            write_json(folder / "result.json", asdict(result))
    except HeadwayError as error:
        # Losing the other workers is often a consequence of another error; let that worker write first.
        if "lost the others" in error.what:
            time.sleep(1.0)
        record = {"rank": rank, "exit_code": error.exit_code, "what": error.what, "where": error.where}
        write_json(folder / f"error-{rank}.json", {**record, "fix": error.fix})
        exit_process(error.exit_code)
    exit_process(0)


if __name__ == "__main__":
    main()
