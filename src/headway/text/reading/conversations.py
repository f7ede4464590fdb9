"""Records that say what of them is trained: conversations, and prompts with completions, until they are encoded.

A conversation (`format: chat`) has one of four layouts, found by its fields: `messages` (role and content),
`conversations` (ShareGPT: from and value), `instruction` with `input` and `output` (Alpaca), or `prompt` and
`completion` as lists of messages. All become one JSON text with the messages and tools in the first layout, so that
conversations pass through the pipeline as texts do: counted, split and deduplicated by content. The model's chat
template renders them when they are encoded (`headway.data.tokenizing.chat`).

A record with `prompt` and `completion` as texts (`format: completion`) becomes JSON with these two
(`headway.data.tokenizing.completions`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headway.core.errors import DataError
from headway.text.reading.documents import BadRecordError, MissingFieldError, unicode_text

#: Fields of all layouts.
CHAT_FIELDS = ("messages", "conversations", "instruction", "input", "output", "system", "tools")
#: Fields of `format: completion`, and of a conversation in two parts.
COMPLETION_FIELDS = ("prompt", "completion")

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_LAYOUTS = "messages, conversations, instruction and output, or prompt and completion"


def conversation_text(record: Any, by_orjson: bool = False) -> str:
    """Return the conversation of a record as JSON; an empty text if it has no messages.

    Args:
        record: The record.
        by_orjson: Whether it comes from `orjson`, which rounds integers of more than 64 bits.

    Raises:
        BadRecordError: the record has no layout, or a message that cannot be used.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError(f"holds {type(record).__name__}, not an object with fields")
    messages = _messages(record)
    if not messages:
        return ""
    if all(message["role"] != "assistant" for message in messages):
        raise BadRecordError("the conversation has no turn of the assistant, so nothing of it would be trained")
    found: dict[str, Any] = {"messages": messages}
    tools = record.get("tools")
    if tools:
        found["tools"] = _tools(tools)
    try:
        _check_plain(found, by_orjson)
        return _as_json(found)
    except RecursionError:
        raise BadRecordError("the conversation is nested too deeply") from None


def completion_text(record: Any) -> str:
    """Return a record's prompt and completion as JSON.

    Raises:
        BadRecordError: it lacks one of them, or has no completion.
    """
    if not isinstance(record, Mapping):
        raise BadRecordError(f"holds {type(record).__name__}, not an object with fields")
    for field in COMPLETION_FIELDS:
        if field not in record:
            raise MissingFieldError(f"no field '{field}'; there are: {_listed(record)}")
        if isinstance(record[field], list):
            raise BadRecordError(f"field '{field}' holds a list of messages, which format: chat reads")
    found = {field: _text(record, field) for field in COMPLETION_FIELDS}
    if not found["completion"]:
        raise BadRecordError("field 'completion' is empty, so nothing of the record would be trained")
    return _as_json(found)


def layout_format(fields: Sequence[str]) -> str | None:
    """Return the format that reads records with these fields by their names; None if they have no such layout."""
    present = {*fields}
    if {"messages", "conversations"} & present or {"instruction", "output"} <= present:
        return "chat"
    return "completion" if {*COMPLETION_FIELDS} <= present else None


def chat_fields(present: Sequence[str] | None) -> list[str]:
    """Return the fields of a conversation that are there; all where that is unknown."""
    if present is None:
        return [*CHAT_FIELDS, *COMPLETION_FIELDS]
    # In two parts only if it is not there as a whole: such tables often repeat the first message as their prompt.
    parts = COMPLETION_FIELDS if layout_format(present) == "completion" else ()
    return [name for name in (*CHAT_FIELDS, *parts) if name in present]


def check_layout(columns: Sequence[str], present: Sequence[str], where: str) -> None:
    """Check that a table's columns have one of the layouts.

    Raises:
        DataError: they have none.
    """
    if layout_format(columns) is None:
        what = f"no conversations: none of the columns {_LAYOUTS}; there are: {_listed(present)}"
        raise DataError(what, where=where, fix="rename the columns, or set the source's format to the file's")


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if record.get("messages") is not None:
        return [_message(turn, number) for number, turn in enumerate(_turns(record, "messages"))]
    if record.get("conversations") is not None:
        before = _system(record)
        return before + [_sharegpt(turn, number) for number, turn in enumerate(_turns(record, "conversations"))]
    if "instruction" in record and "output" in record:
        asked, more, answer = (_text(record, field) for field in ("instruction", "input", "output"))
        if not asked and not more:
            raise BadRecordError("field 'instruction' is empty")
        question = f"{asked}\n\n{more}" if asked and more else asked or more
        user = {"role": "user", "content": question}
        assistant = {"role": "assistant", "content": answer}
        return [*_system(record), user, assistant]
    if layout_format([*record]) == "completion":
        return _messages_in_parts(record)
    raise MissingFieldError(f"no conversation: none of the fields {_LAYOUTS}; there are: {_listed(record)}")


def _messages_in_parts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a prompt and of its completion."""
    if any(isinstance(record[field], str) for field in COMPLETION_FIELDS):
        raise BadRecordError("fields 'prompt' and 'completion' hold text, not messages: format: completion reads them")
    prompt, completion = (
        [_message(turn, number) for number, turn in enumerate(_turns(record, field))] for field in COMPLETION_FIELDS
    )
    if any(message["role"] == "assistant" for message in prompt):
        # Every turn of the assistant is trained.
        raise BadRecordError("the prompt has turns of the assistant, which would be trained like the completion")
    return prompt + completion


def _listed(names: Iterable[Any]) -> str:
    """Name the fields that are there, up to twenty."""
    return ", ".join(sorted(map(str, names))[:20]) or "none"


def _as_json(found: dict[str, Any]) -> str:
    return unicode_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")))


def _turns(record: Mapping[str, Any], field: str) -> list[Any]:
    turns = record[field]
    if not isinstance(turns, list):
        raise BadRecordError(f"field '{field}' holds {type(turns).__name__}, not a list of messages")
    return turns


def _system(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = _text(record, "system")
    return [{"role": "system", "content": content}] if content else []


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        raise BadRecordError(f"field '{field}' holds {type(value).__name__}, not text")
    return value or ""


def _sharegpt(turn: Any, number: int) -> dict[str, Any]:
    if isinstance(turn, Mapping) and "from" in turn and "value" in turn:
        more = {key: value for key, value in turn.items() if key not in ("from", "value")}
        role = turn["from"]
        turn = {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": turn["value"]}
        turn |= more
    return _message(turn, number)


def _message(turn: Any, number: int) -> dict[str, Any]:
    """Return a message with text as its content. Fields without a value are absent, as templates expect."""
    if not isinstance(turn, Mapping):
        raise BadRecordError(f"message {number + 1} holds {type(turn).__name__}, not an object with a role")
    message = {key: value for key, value in turn.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise BadRecordError(f"message {number + 1} has the role {_shown(role)}; there are: {known}")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_part(part, number) for part in content)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        what = "no content" if content is None else f"{type(content).__name__} as its content, not text"
        raise BadRecordError(f"message {number + 1} has {what}")
    return message


def _part(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise BadRecordError(f"message {number + 1} has a part that is no text: {_shown(kind)}")


def _shown(value: Any) -> str:
    """Describe a foreign value in a message of bounded length."""
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}..."


def _tools(tools: Any) -> list[Any]:
    if isinstance(tools, str):  # as in many tables, which cannot hold schemas of different forms in one column
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadRecordError(f"field 'tools' is not valid JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecordError("field 'tools' is not a list of objects")
    return tools


def _check_plain(value: Any, by_orjson: bool) -> None:
    """Check that a value is plain JSON, and that no number in it may have been rounded."""
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise BadRecordError(f"a field has the name {_shown(key)}, which is not text")
            _check_plain(item, by_orjson)
    elif kind is list:
        for item in value:
            _check_plain(item, by_orjson)
    elif kind is float and by_orjson and abs(value) >= 2**63:
        raise BadRecordError("a number may have been rounded")
    elif kind not in (str, int, float, bool, type(None)):
        raise BadRecordError(f"a message holds {kind.__name__}, which JSON does not have")
