"""Results inside logs, and back from them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headway.bench.blocks import block, find_blocks
from headway.bench.collect import collect
from headway.bench.results import read_results, write_result
from headway.core.errors import DataError
from support_bench import result

VALUE = {"text": 'a|b  \\ "quoted" é\n', "numbers": list(range(2000))}


def test_values_come_back_from_whatever_a_log_makes_of_their_lines() -> None:
    lines = block(VALUE).splitlines()
    assert len(lines) > 4, "several parts"
    prefixes = ("[rank0]: ", "2026-01-02T03:04:05.678Z stdout F ", "bench-0  | ", "\x1b[36m(pod)\x1b[0m ")
    logs = {
        "prefixed": [f"{prefixes[n % 4]}{line}" for n, line in enumerate(lines)],
        "trailing": [f"{line} \t\r\n" for line in lines],
        "docker": [json.dumps({"log": line + "\n", "stream": "stderr"}) for line in lines],
        "interleaved": [text for line in lines for text in ("step 3 | loss 2.1", line)],
        "out of order and twice": [*reversed(lines), *lines],
        "without its first line": lines[1:],
    }
    for name, log in logs.items():
        found = find_blocks(log)
        assert found.values == [VALUE] and not found.broken, name


def test_two_writers_in_one_log_are_told_apart() -> None:
    first, second = block(VALUE).splitlines(), block({**VALUE, "text": "other"}).splitlines()
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    assert [value["text"] for value in find_blocks(mixed).values] == [VALUE["text"], "other"]


@pytest.mark.parametrize("damage", ["lost", "changed", "cut off"])
def test_a_damaged_value_is_named_and_never_returned(damage: str) -> None:
    lines = block(VALUE).splitlines()
    if damage == "lost":
        del lines[2]
    elif damage == "changed":
        lines[2] = lines[2].replace("100", "101", 1)
    else:
        del lines[3:]
    found = find_blocks(lines)
    assert not found.values and len(found.broken) == 1


def test_collect_brings_repeats_together_from_logs_files_and_folders(tmp_path: Path) -> None:
    one, two = result("ddp", 2, [100.0, None]), result("ddp", 2, [None, 120.0])
    other, text = result("zero3", 2, [80.0]), "\n".join
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text(text(["noise", block(one.model_dump(mode="json")), "noise"]))
    (tmp_path / "logs" / "b.log.gz").write_bytes(gzip.compress(block(two.model_dump(mode="json")).encode()))
    (tmp_path / "other.json").write_text(json.dumps(other.model_dump(mode="json")))
    output = tmp_path / "out"
    found = collect([str(tmp_path / "logs"), str(tmp_path / "other.json")], output)
    assert found.sources == 3 and not found.broken
    by_name = {r.cell.strategy: r for r in read_results(output)}
    assert [m.tokens_per_second for m in by_name["ddp"].measured] == [100.0, 120.0]
    assert by_name["zero3"] == other
    collect([str(tmp_path / "logs" / "a.log")], output)
    assert read_results(output) == list(by_name.values()), "what is known already changes nothing"


def test_a_result_of_another_version_or_with_unknown_keys_is_refused(tmp_path: Path) -> None:
    value = result("ddp", 1, [1.0]).model_dump(mode="json")
    for changed, said in (({"schema_version": 2}, "version 2"), ({"speed": 3}, "speed")):
        (tmp_path / "x.log").write_text(block({**value, **changed}))
        with pytest.raises(DataError, match=said):
            collect([str(tmp_path / "x.log")], tmp_path / "out")
    write_result(tmp_path, result("ddp", 1, [1.0]))
    assert len(read_results(tmp_path)) == 1
