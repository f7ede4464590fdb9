"""Readings of machines as points of a run: which step takes them along, and that a new follower finds the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.config.sections.track import TrackConfig
from headway.tracking.follow import follow
from headway.tracking.follower import Waiting
from headway.tracking.history import History
from headway.tracking.readings import LAG_SECONDS, Readings
from support.followers import record, write_run


def write_readings(run: Path, machine: str, *readings: dict[str, Any], attempt: int = 1) -> None:
    with (run / "attempts" / f"{attempt:03d}" / f"system-{machine}.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in readings)


def record_at(step: int, moment: float, attempt: int = 1) -> dict[str, Any]:
    return {**record(step, attempt, train__loss=1.0), "time": moment}


def sent(run: Path, records: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    history = History(lambda *_: False, Readings(run).due)
    points = [point for one in records for point in history.points(one)]
    return [(point.name, point.step, point.value) for point in points if point.name.startswith("system/")]


def test_a_record_takes_along_the_newest_reading_of_each_machine(tmp_path: Path) -> None:
    records = [record_at(step, 1000.0 + 20 * step) for step in range(1, 9)]
    run = write_run(tmp_path, records)
    write_readings(run, "node-a", *({"time": 1000.0 + 30 * n, "system/cpu_share": n / 10} for n in range(4)))
    write_readings(run, "node-b", {"time": 1035.0, "gpu/power_watts/0": 300.0, "system/disk_free_gib": "NaN"})
    found = sent(run, records)
    assert found[:1] == [("system/node-a/cpu_share", 2, 0.0)]  # that of 1000 is due at 1030, and step 2 is at 1040
    assert [one[1:] for one in found if one[0] == "system/node-a/cpu_share"] == [(2, 0.0), (3, 0.1), (5, 0.2), (6, 0.3)]
    assert [one for one in found if "node-b" in one[0]][:1] == [("system/node-b/gpu/power_watts/0", 4, 300.0)]
    assert found[-1][1] <= 8 and LAG_SECONDS == 30.0


def test_several_readings_before_a_record_are_one_point(tmp_path: Path) -> None:
    """An evaluation took minutes: the newest one counts."""
    records = [record_at(1, 1000.0), record_at(2, 2000.0)]
    run = write_run(tmp_path, records)
    write_readings(run, "a", *({"time": 1000.0 + 60 * n, "system/cpu_share": n} for n in range(10)))
    assert sent(run, records) == [("system/a/cpu_share", 2, 9)]


def test_what_a_reading_belongs_to_does_not_depend_on_when_it_is_read(tmp_path: Path) -> None:
    records = [record_at(step, 1000.0 + 5 * step) for step in range(1, 84)]
    run = write_run(tmp_path, records)
    readings = [{"time": 1000.5 + 60 * n, "system/cpu_share": n / 10} for n in range(7)]
    write_readings(run, "a", *readings)
    at_once = sent(run, records)
    (run / "attempts/001/system-a.jsonl").unlink()
    history, live = History(lambda *_: False, Readings(run).due), []
    for one in records:  # the file grows meanwhile, and each reading appears 15 seconds late
        ready = [reading for reading in readings if reading["time"] + 15 <= one["time"]]
        (run / "attempts/001/system-a.jsonl").write_text("".join(json.dumps(reading) + "\n" for reading in ready))
        live += [(p.name, p.step, p.value) for p in history.points(one) if p.name.startswith("system/")]
    assert live == at_once and len(live) == 7


def test_a_long_file_of_readings_is_not_held_in_memory(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    write_readings(run, "a", *({"time": 1000.0 + n, "system/cpu_share": n, "x" * 200: n} for n in range(5000)))
    readings = Readings(run)
    assert dict(readings.due(1, 1100.0))["system/a/cpu_share"] == 70
    (file,) = readings._files.values()
    assert 0 < len(file._waiting) < 2000
    assert dict(readings.due(1, 1e9))["system/a/cpu_share"] == 4999 and not file._waiting


def test_a_time_that_is_none_is_not_sent(tmp_path: Path) -> None:
    """Clients of trackers fail on them, and would be asked again without end."""
    (point,) = History(lambda *_: False).points(record_at(1, 1e300))
    assert point.time == 0.0


def test_readings_of_an_attempt_go_with_its_records(tmp_path: Path) -> None:
    records = [record_at(1, 1100.0), record_at(2, 1200.0), record_at(2, 3000.0, 2), record_at(3, 3100.0, 2)]
    run = write_run(tmp_path, records, outcomes=("died", "finished"))
    write_readings(run, "a", {"time": 1150.0, "system/cpu_share": 0.5}, {"time": 1190.0, "system/cpu_share": 0.6})
    write_readings(run, "a", {"time": 2960.0, "system/cpu_share": 0.7}, attempt=2)
    # The second reading came too late for the first attempt; that of step 2 was sent already.
    assert sent(run, records) == [("system/a/cpu_share", 2, 0.5)]


def test_they_arrive_at_a_tracker(tmp_path: Path) -> None:
    import pytest

    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = [record_at(step, 1000.0 + 20 * step) for step in range(1, 9)]
    run = write_run(tmp_path, records)
    write_readings(run, "node-a", {"time": 1000.0, "system/cpu_share": 0.25})
    over = Waiting(lambda: True, sleep=lambda seconds: None, patience_seconds=0.0)
    follow(run, TrackConfig.model_validate("tensorboard"), "track.0", report=lambda text: None, waiting=over)
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    assert [(one.step, one.value) for one in reader.Scalars("system/node-a/cpu_share")] == [(2, 0.25)]
