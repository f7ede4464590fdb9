"""The base of every section of the config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from headway.core.errors import ConfigError
from headway.core.files.paths import expanded

#: `package.module:name` of a function, a class or a spec in Python.
FUNCTION_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


class Section(BaseModel):
    """A part of the config; unknown keys are errors, values do not change once set."""

    # pydantic's own errors are not redacted, so they must not show inputs.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_sections(cls, values: Any) -> Any:
        """Drop empty sections: in YAML, `train:` or `clean:` without content (or with comments only) reads as null."""
        if not isinstance(values, dict):
            return values
        empty = cls.may_be_empty()
        return {key: value for key, value in values.items() if value is not None or key not in empty}

    @classmethod
    def may_be_empty(cls) -> set[str]:
        """Return the names of sections and lists of this section that may be empty."""
        return {
            key
            for key, info in cls.model_fields.items()
            if info.default in ([], {}) or isinstance(info.default, Section)
        }

    @model_validator(mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls, values: Any) -> Any:
        """Reject booleans as numbers: `true` would read as 1, so `keep: true` would keep one checkpoint."""
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and key in cls.model_fields and _is_number(cls.model_fields[key].annotation):
                raise conflict(f"{key} is a number, not {str(value).lower()}", key)
        return values


def _is_number(annotation: Any) -> bool:
    kinds = list(_kinds(annotation))
    return bool not in kinds and (int in kinds or float in kinds)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that a field may have, including the members of unions."""
    if arguments := get_args(annotation):
        for argument in arguments:
            yield from _kinds(argument)
    else:
        yield annotation


def _expanded(path: Path) -> Path:
    """Expand `~`: a shell does so only at the beginning of a word, and never in a file."""
    try:
        return expanded(path)
    except ConfigError as error:
        raise ValueError(error.what) from None


#: A file or folder of this machine.
LocalPath = Annotated[Path, AfterValidator(_expanded)]


def conflict(text: str, *keys: str) -> PydanticCustomError:
    """Make an error about keys of a section that contradict each other, so that the loader can report their lines."""
    return PydanticCustomError("conflict", "{text}", {"text": text, "keys": keys})


Share = Annotated[float, Field(ge=0.0, le=1.0)]
