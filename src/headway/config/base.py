"""What every section of the config is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A part of the config; unknown keys are errors, values do not change once set."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_left_out(cls, values: Any) -> Any:
        """`train:` with nothing under it (or only comments) reads as null in YAML."""
        if not isinstance(values, dict):
            return values
        sections = {key for key, info in cls.model_fields.items() if isinstance(info.default, Section)}
        return {key: value for key, value in values.items() if value is not None or key not in sections}


def conflict(text: str, *keys: str) -> PydanticCustomError:
    """A refusal that names the keys of its section that do not go together, so that the loader can tell their lines."""
    return PydanticCustomError("conflict", "{text}", {"text": text, "keys": keys})


Share = Annotated[float, Field(ge=0.0, le=1.0)]
