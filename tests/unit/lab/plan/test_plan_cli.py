from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.core.errors import ConfigError
from headway.cost.offers import Offer
from headway.cost.price_book import save_offers
from support.runs import headway, write_config
from support.waits import LONG


def run(*arguments: str | Path) -> Any:
    words = ["plan", *map(str, arguments)]
    return CliRunner().invoke(application(["plan"]), words, catch_exceptions=False)


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here or not, plans are the same."""
    monkeypatch.setattr("headway.lab.plan.recommend.find_spec", lambda name: None)


def test_a_plan_as_people_read_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, telemetry={"usd_per_hour": 8.0})
    output = run(config, "--gpus", "8xH100", "train.precision=bf16").output
    for words in (
        "8 x NVIDIA H100 80GB HBM3, 80.0 GiB each, 72.0 GiB usable",
        "vocabulary 320, from data.tokenizer.vocab_size, as a multiple of 64",
        "ddp       none",
        "recommended: parallel.strategy=",
        "kWh (boards at their power limit)",
        "products reach 60% of the dense peak",
        "the plan was not compared with a GPU here",
        "left of what is usable",
        "*: recommended; +: runner-up",
        "headway train",
    ):
        assert words in output, words
    assert not (tmp_path / "store").exists()  # nor is one needed


def test_a_plan_says_why_it_has_strategies_of_deepspeed(tmp_path: Path) -> None:
    config = write_config(tmp_path, train={"global_batch": 16})
    output = run(config, "--gpus", "16xA100").output
    assert "strategies of DeepSpeed are left out" in output and "deepspeed_zero1 " not in output
    asked = run(config, "--gpus", "16xA100", "parallel.strategy=deepspeed_zero3").output
    assert "are listed: parallel.strategy asks for one" in asked and "deepspeed_zero1  selective" in asked


def test_the_cost_of_a_plan_says_of_when_a_stale_price_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    old = Offer("aws", "us-east-1", "p5.48xlarge", "H100", 8, True, 25.0, "a test", date(2026, 1, 31))
    save_offers("zz", [old])
    key = "aws/us-east-1/p5.48xlarge/spot"
    monkeypatch.setattr("headway.cost.price_book.snapshot", lambda: ())
    output = run(write_config(tmp_path, cost={"offer": key}), "--gpus", "8xH100", "train.precision=bf16").output
    (line,) = [line for line in output.splitlines() if line.startswith("  cost ")]
    assert f" at $25.00 an hour ({key}, stale, of 2026-01-31, " in line


def test_a_plan_for_programs(tmp_path: Path) -> None:
    found = json.loads(run(write_config(tmp_path), "--gpus", "16xA100", "--json", "train.global_batch=16").output)
    assert found["machines"]["network"] == "InfiniBand HDR, 200 Gb/s per gpu"
    option = found["options"][0]
    assert sum(option["parts_bytes"].values()) == option["peak_bytes"]
    assert found["recommendation"]["overrides"] and found["recommendation"]["cost_usd"] is None


@pytest.mark.slow
def test_where_the_vocabulary_is_from(corpus: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    tokenizer = corpus / "store" / "tokenizer" / "tokenizer.json"
    given = json.loads(run(config, "--gpus", "cpu", "--json", "model.vocab_size=512").output)
    assert (given["vocab_size"], given["vocab_source"]) == (512, "model.vocab_size")
    read = json.loads(run(config, "--gpus", "cpu", "--json", f"data.tokenizer.path={tokenizer}").output)
    assert read["vocab_size"] == 320 and str(tokenizer) in read["vocab_source"]


def test_this_machine_without_accelerators_has_memory_and_no_speed(tmp_path: Path) -> None:
    output = run(write_config(tmp_path), "--gpus", "cpu").output
    assert "single    none" in output and "speed    n/a (--tokens-per-second" in output
    measured = run(write_config(tmp_path), "--gpus", "cpu", "--tokens-per-second", "1280").output
    assert "time     2.0 s" in measured  # 10 steps of 8 rows of 32 tokens


def test_the_machines_that_are_named_are_those_that_are_checked(tmp_path: Path) -> None:
    config = write_config(tmp_path, parallel={"tensor": 2, "context": 4}, model={"vocab_size": 320})
    assert "recommended: parallel.strategy=" in run(config, "--gpus", "8xH100").output
    # The file's micro-batch is one of several that are tried, unless an override asks for it.
    (tmp_path / "rows").mkdir()
    rows = write_config(tmp_path / "rows", train={"global_batch": 8, "micro_batch": 8})
    assert "train.micro_batch=1" in run(rows, "--gpus", "8xH100").output
    with pytest.raises(ConfigError, match="micro"):
        run(rows, "--gpus", "8xH100", "train.micro_batch=8")


def test_options_that_describe_machines_are_honoured_or_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert "40.0 GiB each" in run(config, "--gpus", "8xH100", "--memory-gib", "40").output
    assert "3.0 GiB each" in run(config, "--gpus", "cpu", "--memory-gib", "3").output
    with pytest.raises(ConfigError, match="one machine"):
        run(config, "--gpus", "8xH100", "--interconnect", "ndr")
    with pytest.raises(ConfigError, match="--per-node and --interconnect describe"):
        run(config, "--gpus", "cpu", "--interconnect", "ndr", "--per-node", "2")


def test_problems_are_those_of_train(tmp_path: Path) -> None:
    result = headway("plan", write_config(tmp_path, train={"sequence_length": 4096}), "--gpus", "8xH100")
    assert result.returncode == 2 and "max_sequence_length" in result.stderr
    result = headway("plan", write_config(tmp_path), "--gpus", "8xH1000")
    assert result.returncode == 2 and "did you mean H100?" in result.stderr


def test_no_torch_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing it fails
        "from headway.cli.application import application\n"
        f"application()(['plan', {str(write_config(tmp_path))!r}, '--gpus', '8xH100'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=False)
    assert result.returncode == 0, result.stderr
    assert "recommended:" in result.stdout


def test_device_host_and_disk_are_printed_beside_what_there_is(tmp_path: Path) -> None:
    """A config of some thousand parameters: what the process itself takes is most of the host's."""
    config = write_config(tmp_path, optimizer={"offload": True}, train={"micro_batch": 1})
    given = (config, "--gpus", "1xL4", "--host-memory-gib", "64", "train.precision=bf16")
    lines = {line.split()[0]: line for line in run(*given).output.splitlines() if line.startswith("  ")}
    assert " of 64.0 GiB on every machine: weights " in lines["host"] and "rest 4.0 GiB" in lines["host"]
    assert "in host memory at 100 GB/s (assumed; headway doctor --arithmetic measures it)" in lines["update"]
    assert " for 4 checkpoints of " in lines["disk"]
    found = json.loads(run(*given, "--json").output)
    option = found["recommendation"]
    assert option["fits_host"] is True and sum(option["host_parts_bytes"].values()) == option["host_bytes"]
    assert option["host_update_seconds"] > 0 and found["machines"]["host_gib"] == 64.0
    assert found["disk"]["total_bytes"] == 4 * found["disk"]["checkpoint_bytes"]
    small = json.loads(run(*given[:4], "3", "--json").output)
    assert small["recommendation"] is None and not any(o["fits"] for o in small["options"])
