"""What every section of the config is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from headway.core.errors import ConfigError
from headway.core.files import expanded


class Section(BaseModel):
    """A part of the config; unknown keys are errors, values do not change once set."""

    # Inputs are not shown by pydantic's own errors, which pass no redaction.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_left_out(cls, values: Any) -> Any:
        """`train:` or `clean:` with nothing under it (or only comments) reads as null in YAML."""
        if not isinstance(values, dict):
            return values
        empty = cls.may_be_empty()
        return {key: value for key, value in values.items() if value is not None or key not in empty}

    @classmethod
    def may_be_empty(cls) -> set[str]:
        """Sections and lists below this one that can be left without anything."""
        return {
            key
            for key, info in cls.model_fields.items()
            if info.default in ([], {}) or isinstance(info.default, Section)
        }

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_no_switches(cls, values: Any) -> Any:
        """To Python `true` is 1: `keep: true` would remove all checkpoints but one."""
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and key in cls.model_fields and _is_number(cls.model_fields[key].annotation):
                raise conflict(f"{key} is a number, not {str(value).lower()}", key)
        return values


def _is_number(annotation: Any) -> bool:
    kinds = list(_kinds(annotation))
    return bool not in kinds and (int in kinds or float in kinds)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a field may have, by itself or as one of several."""
    if arguments := get_args(annotation):
        for argument in arguments:
            yield from _kinds(argument)
    else:
        yield annotation


def _expanded(path: Path) -> Path:
    """A shell expands `~` only at the beginning of a word, and not at all in a file: there would be a folder `~`."""
    try:
        return expanded(path)
    except ConfigError as error:
        raise ValueError(error.what) from None


#: A file or folder of this machine.
LocalPath = Annotated[Path, AfterValidator(_expanded)]


def conflict(text: str, *keys: str) -> PydanticCustomError:
    """A refusal that names the keys of its section that do not go together, so that the loader can tell their lines."""
    return PydanticCustomError("conflict", "{text}", {"text": text, "keys": keys})


Share = Annotated[float, Field(ge=0.0, le=1.0)]
