"""Run under torchrun, or alone: trains one run after the other in the same processes.

Reads a JSON list of `{"config": path, "overrides": [...], "copy_of": run directory or null}` from the file given. A
copy begins where the other run had its first checkpoint.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from headway.api import train
from headway.config import load_config


def copy_run(source: Path, target: Path) -> None:
    """A run that stopped at its first checkpoint."""
    partial = target.with_name(f".{target.name}")
    shutil.copytree(source, partial)
    _, *later = sorted((partial / "checkpoints").glob("step-*"))
    for folder in later:
        shutil.rmtree(folder)
    partial.rename(target)


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        config = load_config(Path(job["config"]), job["overrides"])
        if job["copy_of"]:
            if os.environ.get("RANK", "0") == "0":
                copy_run(Path(job["copy_of"]), config.run_directory)
            while not config.run_directory.exists():
                time.sleep(0.01)
        train(config)
