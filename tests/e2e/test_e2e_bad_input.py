"""Mistakes as people make them, on the command line: what is said, the exit code, and that nothing is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.api.start.preview import preview
from headway.config import load_config
from headway.core.errors import CheckpointError, ConfigError, DataError, HeadwayError
from headway.run.directory.ownership import OwnerLock
from headway.run.session.attempt import RunOptions
from support.runs import headway, state_hash, write_config, write_corpus

SOUND = "".join(json.dumps({"text": f"{number}: red green blue stone " * 9}) + "\n" for number in range(20))
LINES = SOUND.splitlines(keepends=True)


def with_line(number: int, line: str) -> bytes:
    """A sound file with one line replaced."""
    return "".join([*LINES[: number - 1], line + "\n", *LINES[number:]]).encode(errors="surrogateescape")


def refused(*arguments: Any, code: int, says: str, where: str = "", **options: Any) -> str:
    """Run a command that must fail: with this code, three clear lines, no traceback and nothing on standard output."""
    result = headway(*arguments, **options)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert "error: " in result.stderr and "  fix:   " in result.stderr
    assert says in result.stderr
    assert where in result.stderr.split("  where: ")[1].splitlines()[0]
    assert result.stdout == ""
    return result.stderr


def succeeded(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    result = headway(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a prepared store and a finished run."""
    folder = tmp_path_factory.mktemp("user")
    write_corpus(folder)
    config = write_config(folder)
    succeeded("data", "prepare", config)
    succeeded("train", config)
    return folder


# Text ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "says", "where"),
    [
        ("empty.txt", b"", "no text", "empty.txt"),
        ("latin.txt", "Stra\xdfe".encode("latin-1"), "not valid UTF-8: byte 0xdf at offset 4", "latin.txt"),
        ("broken.jsonl", with_line(7, '{"text": "never ends'), "not valid JSON", "broken.jsonl:7"),
        ("bytes.jsonl", with_line(4, '{"text": "\udcff"}'), "not valid UTF-8: byte 0xff", "bytes.jsonl:4"),
        ("field.jsonl", with_line(5, '{"txt": "x"}'), "no field 'text'; there are: txt", "field.jsonl:5"),
        ("null.jsonl", with_line(2, '{"text": null}'), "holds null, not text", "null.jsonl:2"),
        ("long.jsonl", b'{"text": "LONG\n', "data.max_document_bytes", "long.jsonl:1"),
        ("cut.jsonl.gz", b"\x1f\x8b\x08\x00", "cannot be read", "cut.jsonl.gz"),
        ("other.csv", b"id,url\n1,x\n", "no field 'text'; there are: id, url", "other.csv:1"),
        ("not.parquet", b"PAR1", "not a readable Parquet file", "not.parquet"),
        ("picture.png", b"\x89PNG", "no known format", "picture.png"),
        ("missing.jsonl", None, "no such file", "missing.jsonl"),
    ],
)
def test_text_that_cannot_be_used(place: Path, name: str, content: bytes | None, says: str, where: str) -> None:
    path = place / name
    if content is not None:
        path.write_bytes(content.replace(b"LONG", b"x" * 100_000_000))  # not in the name that pytest makes of it
    before = (place / "store" / "manifest.json").read_bytes()
    # The run could not continue with another vocabulary.
    vocabulary = f"data.tokenizer.path={place}/store/tokenizer"
    prepare = ["data", "prepare", place / "config.yaml", f"data.sources={path}", vocabulary]
    refused(*prepare, code=3, says=says, where=where)
    assert (place / "store" / "manifest.json").read_bytes() == before
    assert not [item for item in place.iterdir() if item.name.startswith(".")]  # nothing half-made is left


def test_malformed_documents_can_be_skipped_and_are_listed(place: Path) -> None:
    path = place / "mixed.jsonl"
    too_large = json.dumps({"text": "short", "page": "x" * 10**8}) + "\n"
    path.write_bytes(with_line(7, '{"text": "never ends') + b'{"txt": 1}\n' + too_large.encode())
    store = place / "skipped"
    settings = [f"data.sources={path}", f"data.store={store}", "data.bad_documents=skip"]
    result = succeeded("data", "prepare", place / "config.yaml", *settings)
    assert "19 documents" in result.stdout
    assert "3 malformed documents skipped (1 of them larger than data.max_document_bytes" in result.stdout
    listed = [json.loads(line) for line in (store / "skipped.jsonl").read_text().splitlines()]
    assert [record["where"] for record in listed] == [f"{path}:7", f"{path}:21", f"{path}:22"]
    assert json.loads(succeeded("data", "inspect", store, "--json").stdout)["sources"][0]["skipped"] == 3


# Config and usage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.stepz=3", "did you mean train.steps?"),
        ("train.steps=many", "'many' is not a quantity"),
        ("model.heads=3", "not divisible by heads"),
        ("train.steps", "key.path=value"),
    ],
)
def test_a_config_that_is_wrong(place: Path, override: str, says: str) -> None:
    refused("train", place / "config.yaml", override, code=2, says=says, where=override)


def test_a_config_file_with_several_mistakes_names_each_line(place: Path) -> None:
    path = place / "typos.yaml"
    path.write_text("base: config.yaml\nnmae: x\ntrain:\n  stesp: 3\n")
    result = headway("config", "check", path)
    assert result.returncode == 2
    assert f"{path}:2" in result.stderr and "did you mean name?" in result.stderr
    assert f"{path}:4" in result.stderr and "did you mean train.steps?" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["bogus"], ["train"], ["train", "--bogus", "x"], ["eval", "x", "--rows", "0"], ["eval", "x", "--split", "test"]],
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = headway(*arguments)
    assert result.returncode == 2
    assert "Usage:" in result.stderr and "Traceback" not in result.stderr


def test_a_missing_config_and_a_missing_store(place: Path) -> None:
    refused("train", place / "nothing.yaml", code=2, says="no such config file", where="nothing.yaml")
    words = [place / "config.yaml", "data.store=nowhere", "name=x"]
    previewed = headway("train", "--dry-run", *words)
    assert previewed.returncode == 0 and "there is no token store yet" in previewed.stdout, previewed.stderr
    # Training prepares it, as far as there is any text.
    refused("train", *words, "data.sources=[gone.jsonl]", code=3, says="no such file", where="gone.jsonl")
    assert not (place / "runs" / "x").exists()


@pytest.mark.parametrize("verb", [["runs", "show"], ["report"], ["checkpoints", "list"]])
def test_a_run_that_is_not_there(place: Path, verb: list[str]) -> None:
    refused(*verb, place / "runs" / "nothing", code=4, says="nothing", where="runs/nothing")


# Runs ----------------------------------------------------------------------------------------------------------------


def test_a_full_disk_during_a_checkpoint_loses_nothing(place: Path) -> None:
    train = ["train", place / "config.yaml", "name=full"]
    says = "the checkpoint of step 10 cannot be written: No space left on device"
    stderr = refused(*train, code=4, says=says, where="full/checkpoints", faults="enospc@checkpoint.shard:5")
    assert "the checkpoint of step 8 is untouched" in stderr
    assert "step-00000008" in succeeded(*train).stderr
    assert state_hash(place / "runs" / "full") == state_hash(place / "runs" / "tiny")


def test_a_run_that_is_in_use_is_left_alone(place: Path) -> None:
    run = place / "runs" / "tiny"
    before = state_hash(run)
    lock = OwnerLock.take(run)
    try:
        longer = ["train", place / "config.yaml", "train.steps=12", "--accept-changes"]
        refused(*longer, code=4, says="the run is in use by", where=str(run))
        refused("train", place / "config.yaml", "--restart", code=4, says="the run is in use by", where=str(run))
        with pytest.raises(CheckpointError, match="the run is in use by"):
            preview(load_config(place / "config.yaml"), RunOptions())
    finally:
        lock.release()
    assert state_hash(run) == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.precision=fp8", "name=other"], "'fp8' needs a CUDA GPU"),
        (["checkpoint.sign=true"], "there is no key"),
        (["name=store", "runs={place}"], "not a run directory"),
        (["runs={place}/config.yaml"], "Not a directory"),
        (["name=other", "checkpoint.remote.url=s4://bucket/runs"], "s4"),
        (["name=other", "checkpoint.remote={url: 'file://{place}/remote', encrypt: true}"], "there is no key"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(place: Path, overrides: list[str], says: str) -> None:
    given = [text.replace("{place}", str(place)) for text in overrides]
    with pytest.raises(HeadwayError, match=says):
        preview(load_config(place / "config.yaml", given), RunOptions())


@pytest.mark.parametrize("key", ["sign=true", "remote={url: 'file:///tmp/nowhere', encrypt: true}"])
def test_a_run_is_not_moved_aside_for_one_that_lacks_a_key(place: Path, key: str) -> None:
    before = sorted((place / "runs").iterdir())
    refused("train", place / "config.yaml", "--restart", f"checkpoint.{key}", code=2, says="there is no key")
    assert sorted((place / "runs").iterdir()) == before


def test_a_remote_store_that_does_not_answer_is_told_in_a_dry_run(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "in the way").write_text("a file")
    url = f"file://{place}/in the way/remote"
    assert "new" in preview(
        load_config(place / "config.yaml", ["name=other", f"checkpoint.remote.url={url}"]), RunOptions()
    )
    assert "the remote checkpoints cannot be reached now" in capfd.readouterr().err


def test_a_key_that_would_have_the_runs_own_checkpoints_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SIGNING_KEY", "a secret of some length")
    config = place / "config.yaml"
    refused("train", config, "name=unsigned", code=2, says="HEADWAY_SIGNING_KEY is set", where="checkpoint.sign")
    assert not list((place / "runs" / "unsigned").glob("checkpoints/step-*"))
    with pytest.raises(ConfigError, match="HEADWAY_SIGNING_KEY is set"):
        preview(load_config(config, ["name=other"]), RunOptions())
    preview(load_config(config, ["name=other", "checkpoint.sign=true"]), RunOptions())


def test_a_dry_run_says_what_becomes_of_the_run_that_is_there(place: Path) -> None:
    config = place / "config.yaml"
    before = sorted(place.rglob("*"))
    refused(
        "train", config, "--dry-run", "train.global_batch=16", code=2, says="train.global_batch was 8 and is now 16"
    )
    assert "tiny (finished, step 10)" in preview(load_config(config), RunOptions())
    assert "starts over" in preview(load_config(config, ["train.global_batch=16"]), RunOptions(restart=True))
    assert sorted(place.rglob("*")) == before


def test_a_dry_run_refuses_other_data_than_the_run_has(place: Path, tmp_path: Path) -> None:
    other = [f"data.store={tmp_path}", "data.validation=0.2"]
    succeeded("data", "prepare", place / "config.yaml", *other)
    with pytest.raises(DataError, match="the data fingerprint is"):
        preview(load_config(place / "config.yaml", other), RunOptions(accept_changes=True))


def test_a_step_that_was_not_saved_and_a_damaged_checkpoint(place: Path) -> None:
    run = place / "damaged"
    shutil.copytree(place / "runs" / "tiny", run)
    refused("eval", run, "--step", "3", code=4, says="no checkpoint of step 3", where="damaged/checkpoints")
    (run / "checkpoints" / "step-00000010" / "shard-00000.safetensors").write_bytes(b"")
    result = headway("checkpoints", "verify", run)
    assert result.returncode == 4 and "step-00000010: damaged" in result.stdout
    assert "passing over" in succeeded("export", run).stderr


@pytest.mark.parametrize("verb", [["report", "-o"], ["export"]])
def test_a_result_that_cannot_be_written(place: Path, verb: list[str]) -> None:
    options = [verb[0], place / "runs" / "tiny", *verb[1:]]
    taken = place / "store"
    before = sorted(taken.iterdir())
    refused(*options, taken, code=2, says="", where="store")
    assert sorted(taken.iterdir()) == before


@pytest.mark.parametrize(
    "verb", [["report", "runs/tiny"], ["runs", "compare", "runs/tiny"], ["data", "report", "store"]]
)
def test_a_folder_is_no_place_for_one_file(place: Path, verb: list[str]) -> None:
    refused(*verb, "-o", ".", code=2, says="this is a folder", where="--output .", cwd=place)


def test_a_file_is_no_place_for_a_campaign(place: Path) -> None:
    (place / "taken").touch()
    config = place / "config.yaml"
    refused("chaos", config, "--output", place / "taken", code=2, says="File exists", where="taken")
    refused("chaos", config, "--output", place / "taken" / "below", code=2, says="Not a directory", where="taken/below")


def test_a_training_that_fails_passes_its_exit_code_on(place: Path) -> None:
    result = headway(
        "verify", place / "config.yaml", "data.store=nowhere", "data.sources=[gone.jsonl]", "--steps", "4", cwd=place
    )
    assert result.returncode == 3 and "the training 'reference' ended with exit code 3" in result.stderr


def test_a_dry_run_of_a_profile_is_not_told_in_json(place: Path) -> None:
    refused("profile", place / "config.yaml", "--dry-run", "--json", code=2, says="no result in JSON", where="--json")


def test_prompts_that_cannot_be_used(place: Path) -> None:
    run = place / "runs" / "tiny"
    refused("generate", run, "--prompt", "\udcff", code=2, says="not valid UTF-8", where="--prompt")
    refused("generate", run, "--prompt", "red " * 3000, code=2, says="more than the model's 2,048 positions")
    refused("generate", run, "--seed", "99999999999999999999", code=2, says="64 bits", where="seed=9999")
    assert succeeded("generate", run, "--temperature", "1e-320", "-n", "3", "-p", "red").stdout.startswith("red")


def test_a_tokenizer_by_itself_takes_nothing_but_a_pattern(place: Path) -> None:
    store = place / "store"
    refused("tokenizer", "inspect", store, "train.steps=3", code=2, says="does not apply to a tokenizer", where="train")
    succeeded("tokenizer", "inspect", store, "data.tokenizer.pattern=gpt2")


def test_a_reader_that_has_enough(place: Path) -> None:
    command = [sys.executable, "-m", "headway", "generate", str(place / "runs" / "tiny"), "-n", "400", "-p", "red"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(3) == b"red"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "check", "config.yaml"],
        ["tokenizer", "inspect", "store"],
        ["runs", "list", "runs"],
        ["runs", "show", "runs/tiny"],
        ["eval", "runs/tiny"],
    ],
)
def test_json_stands_alone_on_standard_output(place: Path, arguments: list[str]) -> None:
    assert json.loads(succeeded(*arguments, "--json", cwd=place).stdout)


@pytest.mark.parametrize("verb", [("train",), ("data", "prepare")])
def test_a_config_that_is_nested_very_deeply(tmp_path: Path, verb: tuple[str, ...]) -> None:
    """PyYAML's part in C would end the program with a segmentation fault."""
    path = tmp_path / "deep.yaml"
    path.write_text("data: " + "[" * 100_000 + "]" * 100_000)
    refused(*verb, path, code=2, says="nested too deeply", where=str(path))
