"""Messages between two processes: frozen dataclasses, each sent as one line of JSON.

The two sides share one list of types, so a message that one of them sends is one that the other knows:

    Answer = Saved | Failed
    ANSWERS = Messages[Answer](Answer)

    ANSWERS.encode(Saved(step=7, seconds=1.5))      '{"kind": "saved", "step": 7, "seconds": 1.5}'
    ANSWERS.decode(line)                            Saved(step=7, seconds=1.5)

Fields may be of any type that pydantic validates: numbers, text, paths, enums, further dataclasses, and collections of
these. Values of an `Any` must be JSON values.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from types import GenericAlias
from typing import Any, Generic, TypeVar, get_args

from pydantic import ConfigDict, TypeAdapter

from headway.core.files.foreign import parse_json

Message = TypeVar("Message")


class Messages(Generic[Message]):
    """The types of messages that go from one process to another.

    Args:
        types: A dataclass, or a union of dataclasses.
    """

    def __init__(self, types: Any) -> None:
        self._types = get_args(types) or (types,)

    @cached_property
    def _adapters(self) -> dict[str, TypeAdapter[Any]]:
        """By the names that stand for the types on the line: `tier_lost` for `TierLost`."""
        return {_kind(one): _adapter(one) for one in self._types}

    def encode(self, message: Message) -> str:
        """Return a message as JSON, without the end of a line."""
        kind = _kind(type(message))
        (fields,) = self._adapters[kind].dump_python((message,), mode="json")
        return json.dumps({"kind": kind, **fields})

    def decode(self, line: str | bytes) -> Message:
        """Return the message in a line. Unknown fields are ignored: another version may have sent them.

        Raises:
            ValueError: It is no message of these types.
        """
        fields = parse_json(line)
        adapter = self._adapters.get(str(fields.get("kind"))) if isinstance(fields, dict) else None
        if adapter is None:
            raise ValueError("is no message of these types")
        message: Message
        (message,) = adapter.validate_python((fields,))
        return message


def _kind(one: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", one.__name__).lower()


def _adapter(one: type) -> TypeAdapter[Any]:
    # Infinities and NaN, as in metrics, are kept. A dataclass takes this setting only from what contains it.
    contains: Any = GenericAlias(tuple, (one,))
    return TypeAdapter(contains, config=ConfigDict(ser_json_inf_nan="constants"))
