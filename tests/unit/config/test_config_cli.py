"""`headway config`, and the reference that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from headway.cli.application import application
from headway.config import Config, load_config
from headway.config.loading.complaints import known_keys
from headway.config.loading.load import PRESETS
from headway.config.loading.reference import json_schema
from headway.core.errors import ConfigError

ROOT = Path(__file__).parents[3]


VOCABULARY = ["data.tokenizer.vocab_size=1024"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(application(), ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_prints_a_config_that_loads_back(tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(run("show", "quickstart", "train.steps=7"), encoding="utf-8")
    assert load_config(file) == load_config("quickstart", ["train.steps=7"])


def test_show_as_json() -> None:
    values = json.loads(run("show", "quickstart", "seed=5", "--json"))
    assert Config.model_validate(values) == load_config("quickstart", ["seed=5"])


def test_check_says_what_a_config_comes_to() -> None:
    length = ["train.steps=10", "train.sequence_length=256", "train.global_batch=4", "train.micro_batch=1"]
    text = run("check", str(ROOT / "configs" / "quickstart.yaml"), *length, "model.preset=30m", *VOCABULARY)
    assert "ok" in text
    assert "runs/quickstart" in text
    assert "10 steps of 1,024 tokens" in text
    assert "parameters, 10 layers of width 384" in text


def test_check_as_json() -> None:
    facts = json.loads(
        run(
            "check",
            "quickstart",
            "train.tokens=1M",
            "train.lanes=4",
            "train.micro_batch=1",
            "model.preset=1m",
            *VOCABULARY,
            "--json",
        )
    )
    assert facts["tokens"] == facts["steps"] * facts["tokens_per_step"]
    assert facts["lanes"] == 4
    # By hand: a tied embedding; 4 layers of attention, SwiGLU and two norms; the last norm.
    assert facts["parameters"] == 1024 * 96 + 4 * (2 * 96 * 24 * 6 + 3 * 96 * 256 + 2 * 96) + 96


def test_check_of_a_model_whose_shape_comes_from_files() -> None:
    assert (
        json.loads(run("check", "quickstart", "model.from_pretrained=hf://some/model", "--json"))["parameters"] is None
    )
    assert "n/a parameters" in run("check", "quickstart", "data.tokenizer.path=hf://some/model")


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--train.steps=50", "train.steps=VALUE"),
        ("--steps=50", "train.steps=VALUE"),
        ("--micro-batch=2", "train.micro_batch=VALUE"),
        ("--lr=1", "optimizer.learning_rate=VALUE"),
        ("--name=a", "name=VALUE"),
        (
            "--every=5",
            "checkpoint.every=VALUE or checkpoint.remote.every=VALUE or evaluation.every=VALUE"
            " or evaluation.benchmarks.every=VALUE",
        ),
    ],
)
def test_an_override_with_dashes_is_answered_with_one_without(option: str, meant: str) -> None:
    result = CliRunner().invoke(application(), ["config", "check", "quickstart", option])
    assert result.exit_code == 2
    said = " ".join(re.sub("[│╭╮╰╯─]", "", result.output).split())
    assert f"Overrides have no dashes: {meant} (Possible" in said or said.endswith(f"Overrides have no dashes: {meant}")


@pytest.mark.parametrize("command", [["config", "check", "quickstart", "--other=1"], ["runs", "list", "--steps=1"]])
def test_an_unknown_option_that_means_no_key_is_just_unknown(command: list[str]) -> None:
    assert "Overrides" not in CliRunner().invoke(application(), command).output


def test_check_refuses() -> None:
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        run("check", "quickstart", "train.stepz=1")


def test_the_reference_in_docs_is_current() -> None:
    committed = (ROOT / "docs" / "config-reference.md").read_text(encoding="utf-8")
    assert committed == run("schema", "--markdown"), "run: headway config schema --markdown > docs/config-reference.md"


def test_the_docs_list_the_presets_as_the_command_does() -> None:
    rows = run("presets", "--markdown").splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == sorted(path.stem for path in PRESETS.glob("*.yaml"))
    page = (ROOT / "docs" / "continue-a-model.md").read_text(encoding="utf-8")
    ours = [row for row in rows if row.startswith("| `cpt-")]
    assert len(ours) == 6 and "\n".join(ours) in page, "run: headway config presets --markdown"
    assert (
        json.loads(run("presets", "--json")).items()
        >= {"cpt-4x80gb-deepspeed": "cpt-4x80gb by DeepSpeed ZeRO-3"}.items()
    )


def test_the_reference_explains_every_key() -> None:
    text = run("schema", "--markdown")
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if line.startswith("| `")}
    sections = {key for key in known_keys() if any(other.startswith(f"{key}.") for other in known_keys())}
    assert rows.keys() >= set(known_keys()) - sections
    # A name that speaks for itself needs no sentence, but those are few.
    unexplained = {key.rpartition(".")[2] for key, line in rows.items() if line.rstrip(" |").endswith("`")}
    assert len(unexplained) <= 1, unexplained


def test_the_reference_has_names_and_defaults_that_can_be_typed() -> None:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in run("schema", "--markdown").splitlines()]
    defaults = {row[0].strip("| `"): row[2].strip("`") for row in rows if len(row) > 3 and row[2].startswith("`")}
    kinds = next(row[1] for row in rows if row[0] == "| `data.clean`")
    assert "`gopher_quality`" in kinds
    simple = [key for key in defaults if key.split(".")[0] in ("optimizer", "schedule", "supervise", "health")]
    given = load_config("laptop", [f"{key}={defaults[key]}" for key in simple])
    assert len(simple) > 25
    assert given.optimizer == type(given.optimizer)() and given.supervise == type(given.supervise)()
    assert defaults["supervise.load_ahead"] == "true"


def test_the_json_schema_knows_what_the_loader_knows() -> None:
    schema = json.loads(run("schema"))
    assert schema["properties"].keys() == {"base", *Config.model_fields}
    assert schema["additionalProperties"] is False
    definitions = schema["$defs"]
    assert definitions["CheckpointConfig"]["properties"]["every"]["default"] == "10 min"
    kinds = [option.get("type") for option in definitions["DataConfig"]["properties"]["sources"]["anyOf"]]
    assert kinds == ["array", "string", None]


#: Keys that take more than a plain number or word, and null for a section or list.
UNIONS = {
    "": "train model data",
    "train.": "tokens global_batch batch_ramp lanes",
    "data.": "clean cache_bytes shard_bytes workers",
    "schedule.": "warmup decay",
    "parallel.": "workers threads",
    "checkpoint.": "every keep_every keep_for memory_every",
    "evaluation.": "every rows",
    "supervise.": "grow_after",
    "preemption.": "watch",
}
VALUES: list[Any] = [
    0,
    -1,
    2,
    0.5,
    2.5,
    1e6,
    None,
    "",
    "auto",
    "none",
    "abc",
    "1:8",
    "1:0",
    "64k",
    "2B tokens",
    "2 GB",
    "2 B",
]
VALUES += [
    "2 B",
    "10 min",
    "2 Days",
    "500 STEPS",
    "10M",
    "10m",
    "2 %",
    "150 %",
    "64 rows",
    "0 steps",
    "-5",
    "unicode",
    [],
]


@pytest.mark.parametrize("key", [section + key for section, keys in UNIONS.items() for key in keys.split()])
def test_editors_take_what_the_loader_takes(key: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    editor = jsonschema.Draft202012Validator(json_schema())
    *sections, last = key.split(".")
    for value in VALUES:
        tree: dict[str, Any] = {last: value}
        for section in reversed(sections):
            tree = {section: tree}
        try:
            Config.model_validate(tree)
            taken = True
        except ValidationError:
            taken = False
        assert editor.is_valid(tree) == taken, value
