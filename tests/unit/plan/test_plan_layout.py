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
        ({"train": {"precision": "fp8"}}, "train.precision"),
        (
            {"train": {"activation_checkpointing": "selective"}, "model": {"preset": "16m-moe"}},
            "train.activation_checkpointing",
        ),
        ({"parallel": {"strategy": "deepspeed_zero2"}}, "parallel.strategy"),
    ],
)
def test_what_is_not_counted_is_refused(sections: dict[str, Any], key: str) -> None:
    train = {"steps": 1, **sections.pop("train", {})}
    with pytest.raises(ConfigError, match="does not count") as error:
        Layout.of(Config.model_validate({"train": train, **sections}), 2)
    assert error.value.where == key
    Layout.of(Config.model_validate({"train": {"steps": 1}}), 2)
