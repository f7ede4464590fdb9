"""What a plan refuses to count."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import Config
from headway.core.errors import ConfigError
from headway.plan.layout import Layout


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"train": {"activation_checkpointing": "selective"}}, "train.activation_checkpointing"),
        ({"train": {"precision": "tf32"}}, "train.precision"),
        ({"train": {"precision": "fp8"}}, "train.precision"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name"),
        ({"optimizer": {"offload": True}}, "optimizer.offload"),
        ({"parallel": {"strategy": "deepspeed_zero2"}}, "parallel.strategy"),
        ({"model": {"preset": "16m-moe"}}, "model.experts"),
    ],
)
def test_what_is_not_counted_is_refused(sections: dict[str, Any], key: str) -> None:
    train = {"steps": 1, **sections.pop("train", {})}
    with pytest.raises(ConfigError, match="does not count") as error:
        Layout.of(Config.model_validate({"train": train, **sections}), 2)
    assert error.value.where == key
    Layout.of(Config.model_validate({"train": {"steps": 1}}), 2)
