"""The model of a finished run for a tracker: its card and, in a scratch folder, what `headway export` writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.config.sections.track import ModelUpload
from headway.core.errors import HeadwayError
from headway.core.process.command import module_command
from headway.telemetry.model_card import model_card
from headway.telemetry.record import Run, as_int, dig
from headway.tracking.sink import RunModel

_GIB = 2**30
#: An export has fp32 weights.
_BYTES_PER_PARAMETER = 4
CARD_FILE = "README.md"
#: Trackers have a thread each, and an export takes the memory of the model.
_ONE_BY_ONE = threading.Lock()


@contextmanager
def run_model(path: Path, upload: ModelUpload, scratch: Path) -> Iterator[RunModel]:
    """Export a run's newest checkpoint in a process of its own, unless the card suffices.

    Args:
        path: The run directory.
        upload: What the tracker wants of it.
        scratch: Folder for the export, which is removed before and at the end.

    Raises:
        HeadwayError: it is larger than the limit, or the export fails.
    """
    run = Run(path)
    card = model_card(run, f"/{upload.register or run.name}")
    if upload.only == "card":
        yield RunModel(run.step, card, None)
        return
    _check_size(_BYTES_PER_PARAMETER * (as_int(dig(run.facts, "model", "parameters")) or 0), path, upload)
    folder = scratch / "model"
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # of a follower that was killed
        # It lowers its own priority with this process, and runs on processors: the GPUs may be another run's by now.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        command = module_command("headway", "export", str(path), str(folder))
        with _ONE_BY_ONE:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
            raise _not_logged(f"its export failed: {said[0]}", path, "correct what it names")
        _check_size(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), path, upload)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
        yield RunModel(run.step, card, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_size(size: int, path: Path, upload: ModelUpload) -> None:
    if size > upload.limit_gib * _GIB:
        raise _not_logged(
            f"it has {size / _GIB:.1f} GiB, and limit_gib is {upload.limit_gib:g}", path, "raise it, or give only: card"
        )


def _not_logged(why: str, path: Path, fix: str) -> HeadwayError:
    fix = f"{fix}; then headway track {path} --to TRACKER logs it, where TRACKER is the item of `track` as it shall be"
    return HeadwayError(f"the model is not logged: {why}", where=str(path), fix=fix)
