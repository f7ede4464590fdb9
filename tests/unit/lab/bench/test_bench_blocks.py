"""Results inside logs, and back from them."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from headway.core.errors import DataError
from headway.lab.bench.blocks import MARKER, block, find_blocks
from headway.lab.bench.collect import collect
from headway.lab.bench.results import CellResult, Status, merge_results, read_results, write_result
from support.bench import result
from support.runs import refuse_to_open

VALUE = {"text": 'a|b  \\ "quoted" é\n', "numbers": list(range(2000))}


def test_values_come_back_from_whatever_a_log_makes_of_their_lines() -> None:
    lines = block(VALUE).splitlines()
    assert len(lines) > 4, "several parts"
    prefixes = ("[rank0]: ", "2026-01-02T03:04:05.678Z stdout F ", "bench-0  | ", "\x1b[36m(pod)\x1b[0m ")
    logs = {
        "prefixed": [f"{prefixes[n % 4]}{line}" for n, line in enumerate(lines)],
        "trailing": [f"{line} \t\r\n" for line in lines],
        "docker": [json.dumps({"log": line + "\n", "stream": "stderr"}) for line in lines],
        "of a cloud service": [json.dumps({"labels": {"a": 1}, "jsonPayload": {"line": line}}) for line in lines],
        "wrapped twice": [json.dumps({"log": json.dumps({"message": line}) + "\n"}) for line in lines],
        "interleaved": [text for line in lines for text in ("step 3 | loss 2.1", line)],
        "out of order and twice": [*reversed(lines), *lines],
        "without its first line": lines[1:],
        "text behind": [f"{line} | pod-1" for line in lines],
        "an object behind a time": [f"2026-01-02T03:04Z {{app}}: {json.dumps({'log': line})} | x" for line in lines],
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


def test_half_a_log_of_a_pod_that_vanished_still_has_its_results(tmp_path: Path) -> None:
    texts = [block(result(name, 2, [100.0]).model_dump(mode="json")) for name in ("ddp", "zero1")]
    noise = "\n".join(f"step {n} loss {n * 7919 % 1000}" for n in range(20_000))
    whole = gzip.compress(f"{texts[0]}\n".encode()) + gzip.compress(f"{texts[1]}\n{noise}".encode())
    (tmp_path / "cut.log.gz").write_bytes(whole[:-1000])
    (tmp_path / "plain.log.gz").write_bytes(texts[0].encode())
    (tmp_path / "result.json.gz").write_bytes(gzip.compress(result("zero3", 2, [1.0]).model_dump_json().encode()))
    found = collect([str(tmp_path)], tmp_path / "out")
    assert found.sources == 3 and {r.cell.strategy for r in found.results} == {"ddp", "zero1", "zero3"}


def test_a_log_that_cannot_be_read_is_named_and_not_the_place_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.log").touch()

    refuse_to_open(
        monkeypatch, lambda path: PermissionError(13, "Permission denied") if path.suffix == ".log" else None
    )
    with pytest.raises(DataError) as error:
        collect([str(tmp_path / "x.log")], tmp_path / "out")
    assert error.value.where == str(tmp_path / "x.log") and "Permission denied" in error.value.what


def test_bytes_of_no_encoding_on_standard_input_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = b"caf\xe9 \xff\n" + block(result("ddp", 2, [100.0]).model_dump(mode="json")).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log), encoding="ascii"))
    assert [r.cell.strategy for r in collect(["-"], tmp_path).results] == ["ddp"]


def test_a_result_of_another_version_or_with_unknown_keys_is_refused(tmp_path: Path) -> None:
    value = result("ddp", 1, [1.0]).model_dump(mode="json")
    for changed, said in (({"schema_version": 2}, "version 2"), ({"speed": 3}, "speed")):
        (tmp_path / "x.log").write_text(block({**value, **changed}))
        with pytest.raises(DataError, match=said):
            collect([str(tmp_path / "x.log")], tmp_path / "out")
    write_result(tmp_path, result("ddp", 1, [1.0]))
    assert len(read_results(tmp_path)) == 1


def test_a_log_names_no_file_outside_of_the_results(tmp_path: Path) -> None:
    value = result("ddp", 1, [1.0]).model_dump(mode="json")
    cells = [{**value["cell"], name: "../../x"} for name in ("strategy", "model")]
    for changed in (*({"cell": cell} for cell in cells), {"key": "/../x"}, {"repeats": []}):
        (tmp_path / "x.log").write_text(block({**value, **changed}))
        with pytest.raises(DataError, match="not a benchmark result"):
            collect([str(tmp_path / "x.log")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_result_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cells").mkdir()
    path = tmp_path / "cells" / "a.json"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    with pytest.raises(DataError, match="cannot be read") as error:
        read_results(tmp_path)
    assert error.value.where == str(path)


def test_repeats_come_together_under_what_was_asked_last(tmp_path: Path) -> None:
    few, many = result("ddp", 1, [1.0]), result("ddp", 1, [None, 2.0, 3.0])
    assert (few.settings["repeats"], many.settings["repeats"]) == (1, 3)
    for order in ([few, many], [many, few]):
        (merged,) = merge_results(order)
        assert len(merged.repeats) == merged.settings["repeats"] == 3


def _told(status: Status, reason: str, started: float = 5.0) -> CellResult:
    """As a worker tells that it ends."""
    found = result("ddp", 2, failure=(status, reason))
    repeat = found.repeats[0].model_copy(update={"started": started, "wall_seconds": None})
    return found.model_copy(update={"repeats": [repeat]})


def test_of_several_workers_who_tells_the_cause_is_believed() -> None:
    lost, other = _told("failed", "connection closed"), _told("failed", "lost a peer")
    large, dead = _told("out_of_memory", "too large"), _told("killed", "worker 1 died (signal 9)")
    for told, believed in (
        ([large, lost], large),
        ([lost, large], large),
        ([lost, other], lost),
        ([large, dead, lost], dead),
        ([dead, large], dead),
    ):
        assert merge_results(told) == [believed]
    later = _told("failed", "once more", started=6.0)
    assert merge_results([later, dead]) == [later], "another attempt has the last word"


def test_repeats_that_give_way_to_those_of_an_equal_machine_are_counted(tmp_path: Path) -> None:
    for name, seconds in (("one", 0.0), ("two", 60.0)):
        cell = result("ddp", 2, [100.0 + seconds, 101.0 + seconds], failure=("killed", "x"))
        repeats = [repeat.model_copy(update={"started": repeat.started + seconds}) for repeat in cell.repeats]
        told = cell.model_copy(update={"repeats": repeats})
        (tmp_path / f"{name}.log").write_text(block(told.model_dump(mode="json")))
    logs = [str(tmp_path / f"{name}.log") for name in ("one", "two")]
    assert collect([logs[0], logs[0]], tmp_path / "same").replaced == 0
    found = collect(logs, tmp_path / "both")
    assert found.replaced == 2 and [m.tokens_per_second for m in found.results[0].measured] == [160.0, 161.0]
    assert collect([logs[1]], tmp_path / "same").replaced == 2, "those that were collected before count as well"


def test_lines_that_only_look_like_parts_end_no_collection() -> None:
    name, digits = "0" * 32, "9" * 5000
    text = json.dumps(MARKER)
    nested = ['{"a":' * depth + text + "}" * depth for depth in range(1, sys.getrecursionlimit())]
    lines = [f"{MARKER} {name} {digits}/{digits} x|", f"{MARKER} {name} \u0661/\u0661 x|", *nested]
    assert find_blocks([*lines, *block(VALUE).splitlines()]).values == [VALUE]
