"""What a worker tells of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import HeadwayError
from headway.launch.worker import first_record, reasons_in, report_to


def test_a_worker_that_cannot_be_watched_says_so_at_once(tmp_path: Path) -> None:
    """It would be ended as one that did not begin, after `supervise.start_seconds`."""
    (tmp_path / "heartbeat-0").mkdir()
    with pytest.raises(HeadwayError, match="worker 0 cannot be watched: Is a directory") as refused:
        report_to(tmp_path, 0)
    assert str(tmp_path / "heartbeat-0") in refused.value.render()
    with pytest.raises(SystemExit), reasons_in(tmp_path, 0):
        report_to(tmp_path, 0)
    left = first_record(tmp_path)
    assert left is not None and "cannot be watched" in left["what"]
