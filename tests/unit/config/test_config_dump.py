"""What is written down reads back as the same; and which changes change the mathematics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config import Config, DataConfig, changes, dump_config, identity, load_config, override, resolve
from headway.core.files.hashes import fingerprint

#: Text that YAML 1.1 or 1.2 would read as something else, and text that is merely awkward.
AWKWARD = [
    "off",
    "yes",
    "null",
    "~",
    "1e5",
    "08",
    "0x1f",
    "12:30",
    "2024-01-01",
    "<<",
    "=",
    "a: b",
    "# c",
    "é\n",
    "{name}",
    "1_0",
]

texts = st.one_of(
    st.sampled_from(AWKWARD), st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1)
)
#: Somebody's home folder that is not on this machine (`~0`) is refused.
paths = texts.filter(lambda text: text == "~" or not text.startswith("~")).map(Path)
positive = st.floats(min_value=1e-12, max_value=1e12)
lengths = st.one_of(
    st.floats(0, 1), st.integers(1, 10**6), st.builds("{} tokens".format, st.integers(1, 10**12)), st.just("1.5k steps")
)
intervals = st.one_of(
    st.integers(1, 10**9), st.builds("{} {}".format, st.integers(1, 10**6), st.sampled_from(["s", "min", "h"]))
)
sections: dict[str, st.SearchStrategy[Any]] = {
    "name": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z"),
    "runs": paths,
    "seed": st.integers(0, 2**63),
    "determinism": st.sampled_from(["off", "run", "elastic"]),
    "data": st.fixed_dictionaries(
        {"sources": st.lists(texts, min_size=1, max_size=3)},
        optional={"store": paths, "shard_bytes": st.integers(1, 10**12), "workers": st.just("auto")},
    ),
    "model": st.sampled_from([{"preset": "1m"}, {"preset": "8b", "dropout": 0.1}, {"from_pretrained": "off"}]),
    "optimizer": st.fixed_dictionaries({}, optional={"learning_rate": positive, "eps": positive}),
    "schedule": st.fixed_dictionaries({}, optional={"warmup": lengths, "decay": lengths}),
    "checkpoint": st.fixed_dictionaries({"every": intervals}),
    "telemetry": st.fixed_dictionaries({"usd_per_hour": st.one_of(st.none(), positive)}),
}
configs = st.fixed_dictionaries(
    {"train": st.one_of(st.just({"steps": 3}), st.just({"tokens": "2M", "global_batch": "64Ki tokens"}))},
    optional=sections,
).map(Config.model_validate)


def a_config() -> Config:
    train = {"steps": 500, "sequence_length": 256, "global_batch": 8, "precision": "bf16"}
    return resolve(Config.model_validate({"seed": 1, "train": train, "schedule": {"warmup": "20 steps"}}))


@given(config=configs)
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_a_dumped_config_loads_back_equal(tmp_path: Path, config: Config) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file) == resolve(config)
    file.write_text(dump_config(resolve(config)), encoding="utf-8")
    assert load_config(file) == resolve(config)


@given(config=configs)
@settings(max_examples=25, deadline=None)
def test_other_readers_of_yaml_see_the_same_values(config: Config) -> None:
    assert yaml.safe_load(dump_config(config)) == config.model_dump(mode="json")


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_names_survive(tmp_path: Path, name: str) -> None:
    config = a_config()
    source = config.data.sources[0].model_copy(update={"name": name})
    config = config.model_copy(update={"data": config.data.model_copy(update={"sources": [source]})})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file).data.sources[0].name == name


@pytest.mark.parametrize(
    "same",
    [
        "name=other",
        "runs=elsewhere",
        "data.store=elsewhere",
        "data.workers=2",
        "train.device=cpu",
        "train.skip_limit=3",
        "parallel.workers=2",
        "parallel.threads=1",
        "parallel.timeout_seconds=1",
        "checkpoint.every=3",
        "checkpoint.keep=9",
        "evaluation.rows=3",
        "telemetry.log_every=1",
    ],
)
def test_what_may_change_when_a_run_goes_on(same: str) -> None:
    before = a_config()
    after = override(before, [same])
    assert after != before
    assert identity(after) == identity(before)
    assert changes(before, after) == []


@pytest.mark.parametrize(
    ("key", "value", "before"),
    [
        ("seed", "7", "1"),
        ("determinism", "off", "run"),
        ("train.steps", "7", "500"),
        ("train.sequence_length", "128", "256"),
        ("train.global_batch", "16", "8"),
        ("train.micro_batch", "2", "not set"),
        ("train.lanes", "2", "auto"),
        ("train.precision", "fp32", "bf16"),
        ("train.compile", "true", "False"),
        ("train.max_grad_norm", "0.5", "1.0"),
        ("model.dropout", "0.1", "0.0"),
        ("optimizer.learning_rate", "1e-4", "0.0003"),
        ("schedule.warmup", "9 steps", "20 steps"),
        ("data.validation", "0.1", "0.05"),
    ],
)
def test_what_changes_the_mathematics_is_told_in_words(key: str, value: str, before: str) -> None:
    old = a_config()
    new = override(old, [f"{key}={value}"])
    assert fingerprint(identity(new)) != fingerprint(identity(old))
    (words,) = changes(old, new)
    assert words.startswith(f"{key} was {before} and is now ")


def test_a_change_is_told_without_credentials() -> None:
    """A run of an earlier version may have had some in its config."""
    source = {
        "path": "s3://AK:fi/rst@bucket/a.jsonl",
        "storage_options": {"key": "sec0nd", "headers": {"X-A": "third"}},
    }
    old = a_config().model_copy(update={"data": DataConfig.model_validate({"sources": [source]})})
    new = override(a_config(), ["data.sources=s3://bucket/a.jsonl"])
    words = "; ".join(changes(old, new))
    assert (
        "s3://***@bucket/a.jsonl" in words and "storage_options was {'key': '***', 'headers': {'X-A': '***'}}" in words
    )
    assert [secret for secret in ("fi/rst", "sec0nd", "third") if secret in words + dump_config(old)] == []


def test_another_name_for_the_same_shape_and_length_is_no_change() -> None:
    old = a_config()
    shape = [f"model.{key}={getattr(old.model, key)}" for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim")]
    new = override(old, ["train.tokens=1024000", "model.preset=1m", *shape])
    assert changes(old, new) == []
