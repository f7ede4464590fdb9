"""The section `checkpoint`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headway.config import Config, dump_config, load_config, load_resolved
from headway.core.errors import ConfigError


def load(tmp_path: Path, checkpoint: object, **sections: object) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"train": {"steps": 10}, "checkpoint": checkpoint, **sections}))
    return load_config(path)


def test_all_keys_survive_a_dump(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        {
            "every": "auto",
            "failures_per_day": 2,
            "keep_every": "1B tokens",
            "keep_for": "2 days",
            "full_every": "1 h",
            "remote": {"url": "s3://bucket/runs/", "every": "10 min", "options": {"endpoint_url": "http://x"}},
        },
    )
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_resolved(tmp_path / "resolved.yaml") == config
    assert config.checkpoint.remote is not None and config.checkpoint.remote.url == "s3://bucket/runs"
    assert str(config.checkpoint.keep_for) == "48 h"


@pytest.mark.parametrize(
    ("checkpoint", "problem"),
    [
        ({"every": "often"}, "'often' is not"),
        ({"keep_for": "100 steps"}, "this is a time"),
        ({"remote": {"url": "/mnt/x"}}, "is not a URL; write s3://bucket/folder, or file:///mnt/shared"),
        ({"remote": {"url": "https://x/y"}}, "a web address cannot be written to"),
        (
            {"remote": {"url": "s3://b", "options": {"secret": "x"}}},
            "checkpoint.remote.options.secret has a credential in it",
        ),
        ({"remote": {"every": "1 h"}}, "checkpoint.remote.url is missing"),
        ({"failures_per_day": 1}, "works only with checkpoint.every=auto"),
        ({"keep_best": 1}, "only the last step is evaluated"),
        ({"keep_best": 1, "keep_mode": "highest"}, "checkpoint.keep_mode"),
        (
            {"keep_best": 1, "keep_metric": "checkpoint/write_seconds"},
            "not known when the checkpoint of a step is made",
        ),
        ({"keep_best": 1, "keep_metric": "goodput/ratio"}, "not known when the checkpoint of a step is made"),
        ({"keep_best": 1, "keep_metric": "evaluation/los"}, "an evaluation gives evaluation/loss and evaluation/perp"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, checkpoint: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, checkpoint)


def test_the_best_need_checkpoints_where_there_are_evaluations(tmp_path: Path) -> None:
    evaluation = {"every": "20 steps"}
    with pytest.raises(ConfigError, match=r"keep_best needs evaluation/loss at checkpoints.*by the clock \(10 min\)"):
        load(tmp_path, {"keep_best": 1}, evaluation=evaluation)
    train = {"steps": 100, "sequence_length": 16, "global_batch": 4}  # 64 tokens a step
    for every in ("20 steps", "10 steps", "60 steps", "30 steps", "8 steps", "640 tokens", "1250 tokens", "500 steps"):
        load(tmp_path, {"keep_best": 1, "every": every}, train=train, evaluation=evaluation)
    remote = {"every": "21 steps", "remote": {"url": "s3://b", "keep_best": 1}}
    for checkpoint in (remote, {**remote, "every": "1344 tokens"}):
        with pytest.raises(ConfigError, match=r"checkpoint\.remote\.keep_best needs.*no step before the last has both"):
            load(tmp_path, checkpoint, train=train, evaluation=evaluation)
    load(tmp_path, remote, train={**train, "steps": 421}, evaluation=evaluation)
    load(tmp_path, remote, train={**train, "steps": None, "tokens": 64 * 421}, evaluation=evaluation)
    # Of the saves after 30, 60 and 90 steps, the first, and those that pass a multiple of the interval, are uploaded.
    for every, is_found in {
        "90 steps": False,
        "5760 tokens": False,
        "60 steps": True,
        "20 steps": True,
        "9 h": True,
    }.items():
        sent = {"every": "30 steps", "remote": {"url": "s3://b", "keep_best": 1, "every": every}}
        if is_found:
            load(tmp_path, sent, train=train, evaluation=evaluation)
            continue
        with pytest.raises(ConfigError, match=r"uploaded every .*no uploaded step before the last has one") as caught:
            load(tmp_path, sent, train=train, evaluation=evaluation)
        assert "checkpoint.remote.every=20 steps" in str(caught.value)
    load(tmp_path, {"keep_best": 1, "keep_metric": "train/loss"})
    load(tmp_path, {"keep_best": 1, "keep_metric": "accuracy", "keep_mode": "max"})  # a callback may add it
    assert Config().checkpoint.keep_mode == "min"
