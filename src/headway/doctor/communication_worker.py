"""What the benchmark starts on this machine: `python -m headway.doctor.communication_worker FOLDER`, per worker."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from headway.core.errors import HeadwayError
from headway.core.files import write_json
from headway.core.process_exit import exit_process
from headway.supervisor.worker import begin_process, keep_log


def main() -> None:
    """Measure as one worker; the first one leaves `result.json`, one that fails `error-<rank>.json`."""
    begin_process()
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    os.dup2(2, 1)  # what libraries print there would be taken for the result, which is the command's own to print
    if rank > 0:
        keep_log(folder / f"worker-{rank}.log")
    try:
        from headway.doctor.communication import Plan, measure_communication

        result = measure_communication(Plan.from_json(json.loads((folder / "plan.json").read_bytes())))
        if rank == 0:
            write_json(folder / "result.json", result.to_json())
    except HeadwayError as error:
        # Losing the others is often but the echo of why one of them ended; let that one write first.
        if "lost the others" in error.what:
            time.sleep(1.0)
        record = {"rank": rank, "exit_code": error.exit_code, "what": error.what, "where": error.where}
        write_json(folder / f"error-{rank}.json", {**record, "fix": error.fix})
        exit_process(error.exit_code)
    exit_process(0)


if __name__ == "__main__":
    main()
