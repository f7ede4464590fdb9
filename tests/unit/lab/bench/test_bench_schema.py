"""The JSON Schema of a result, against what is written and what is refused when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import DataError
from headway.lab.bench.results import CellResult, parse_result, schema, write_result
from support.bench import result

COMMUNICATION = {"steps": 2, "total_share": 0.5, "exposed_share": 0.3, "overlapped_share": 0.2}
ENERGY = {"joules": 500.0, "source": "a meter"}


@pytest.fixture
def is_valid() -> Callable[[Any], bool]:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema()).is_valid  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "written",
    [
        result("ddp", 2, [100.0, 101.0], communication=COMMUNICATION, energy=ENERGY),
        result("ddp", 2, [100.0], mean_loss=None, peak_memory_bytes=None),
        result("ddp", 2, [100.0], failure=("killed", "worker 1 died (signal 9)")),
        result("ddp", 2, failure=("failed", "worker 0: RuntimeError: why")),
        result("ddp", 2, failure=("out_of_memory", "worker 0: too large")),
    ],
    ids=["ok", "ok, of which little is known", "killed", "failed", "out of memory"],
)
def test_what_is_written_is_as_the_schema_says(
    written: CellResult, tmp_path: Path, is_valid: Callable[[Any], bool]
) -> None:
    value = json.loads(write_result(tmp_path, written).read_bytes())
    assert is_valid(value) and parse_result(value, "a file") == written


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (["schema_version"], 2),
        (["speed"], 3),
        (["key"], "../x"),
        (["repeats"], []),
        (["cell", "workers"], 0),
        (["cell", "scaling"], "both"),
        (["repeats", 0, "status"], "fine"),
        (["repeats", 0, "started"], -1),
        (["repeats", 0, "measured", "tokens_per_second"], 0),
        (["repeats", 0, "measured", "step_seconds"], []),
        (["repeats", 0, "measured", "energy"], {"joules": 1.0}),
    ],
)
def test_what_is_refused_when_it_is_read_is_not(
    path: list[str | int], wrong: Any, is_valid: Callable[[Any], bool]
) -> None:
    value = result("ddp", 2, [100.0]).model_dump(mode="json")
    place: Any = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = wrong
    assert not is_valid(value)
    with pytest.raises(DataError):
        parse_result(value, "a log")
