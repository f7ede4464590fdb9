"""Requests of OpenAI's interface: from a JSON body to what is asked, or to why it is refused."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.files.foreign import as_number
from headway.core.format import printable

#: Fields that would change replies, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
}
#: Fields that change no reply.
_IGNORED = ("metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")
_COMMON = ("model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "user")
_OF_COMPLETIONS = ("prompt", "logprobs")
_OF_CHAT = ("messages", "logprobs", "top_logprobs", "max_completion_tokens")
#: OpenAI's limits.
_STOPS = 4
_STOP_LENGTH = 500
_LOGPROBS = 20
_USER_LENGTH = 512
#: Replies to one request.
CHOICES = 16


class RefusedRequest(Exception):
    """A request that is not answered, as an error in OpenAI's form.

    Args:
        message: What is wrong.
        status: Of HTTP.
        param: The field.
        code: A word for programs.
        retry_seconds: When to try again; None if that changes nothing.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_seconds = retry_seconds

    def body(self) -> dict[str, Any]:
        """Return the body of the reply."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    is_chat: bool
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts or token ids; empty for chat."""
    messages: tuple[dict[str, str], ...]
    draws: Draws
    choices: int
    stops: tuple[str, ...]
    streams: bool
    with_usage: bool
    """Whether a stream ends with the number of tokens."""


@dataclass(frozen=True)
class Draws:
    """How tokens are drawn."""

    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    top_logprobs: int | None


def parse(body: Mapping[str, Any], *, is_chat: bool, default_tokens: int | None) -> Asked:
    """Read a request.

    Args:
        body: The JSON object of the request.
        is_chat: Whether it is one of `/v1/chat/completions`.
        default_tokens: The number of tokens where none is given; None for as many as fit.

    Raises:
        RefusedRequest: a field is unknown, of a wrong kind or out of range, or asks for what this server cannot do.
    """
    _check_fields(body, (*_COMMON, *(_OF_CHAT if is_chat else _OF_COMPLETIONS)))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _wrong("stream_options", "an object")
    seed = _integer(body, "seed", -(2**63), 2**63 - 1)
    draws = Draws(
        _tokens(body, is_chat) or default_tokens,
        _number(body, "temperature", 2.0),
        _number(body, "top_p", 1.0),
        secrets.randbits(62) if seed is None else seed,
        _top_logprobs(body, is_chat),
    )
    return Asked(
        is_chat,
        () if is_chat else _prompts(body.get("prompt")),
        _messages(body.get("messages")) if is_chat else (),
        draws,
        _integer(body, "n", 1, CHOICES) or 1,
        _stops(body.get("stop")),
        _flag(body, "stream"),
        _flag(options, "include_usage"),
    )


def user_of(body: Mapping[str, Any]) -> str | None:
    """Return the user of a request, if it names one.

    Raises:
        RefusedRequest: it is no short text.
    """
    user = body.get("user")
    if user is not None and not (isinstance(user, str) and 0 < len(user) <= _USER_LENGTH):
        raise _wrong("user", f"a text of at most {_USER_LENGTH} characters")
    return user


def _wrong(field: str, wanted: str) -> RefusedRequest:
    return RefusedRequest(f"'{field}' must be {wanted}", param=field, code="invalid_value")


def _check_fields(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for field, value in body.items():
        if field in _NEUTRAL:
            if value not in _NEUTRAL[field]:
                raise RefusedRequest(f"'{field}' is not supported", param=field, code="unsupported_parameter")
        elif field not in known and field not in _IGNORED:
            shown = f"{printable(field):.80}"
            raise RefusedRequest(f"there is no field '{shown}'", param=shown, code="unknown_parameter")


def _tokens(body: Mapping[str, Any], is_chat: bool) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    return next((found for name in names if (found := _integer(body, name, 1, 2**31)) is not None), None)


def _integer(body: Mapping[str, Any], field: str, least: int, most: int) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise _wrong(field, f"an integer between {least} and {most}")
    return value


def _number(body: Mapping[str, Any], field: str, most: float) -> float:
    """Return a number between 0 and `most`; 1 where there is none."""
    value = body.get(field)
    if value is None:
        return 1.0
    number = as_number(value)
    if number is None or not 0 <= number <= most:
        raise _wrong(field, f"a number between 0 and {most:g}")
    return number


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and type(value) is not bool:
        raise _wrong(field, "true or false")
    return bool(value)


def _top_logprobs(body: Mapping[str, Any], is_chat: bool) -> int | None:
    """Return how many likeliest tokens are asked for; None where no log probabilities are."""
    if not is_chat:
        return _integer(body, "logprobs", 0, _LOGPROBS)
    count = _integer(body, "top_logprobs", 0, _LOGPROBS)
    if not _flag(body, "logprobs"):
        if count is not None:
            raise RefusedRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs", code="invalid_value")
        return None
    return count or 0


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    good = isinstance(stops, list) and len(stops) <= _STOPS
    if not good or not all(isinstance(stop, str) and 0 < len(stop) <= _STOP_LENGTH for stop in stops):
        raise _wrong("stop", f"a text, or up to {_STOPS} of them, of at most {_STOP_LENGTH} characters")
    return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    wanted = "a text, token ids, or a list of either"
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", wanted)
    if all(type(one) is int for one in value):
        return (tuple(value),)
    found: list[str | tuple[int, ...]] = []
    for one in value:
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, list) and one and all(type(number) is int for number in one):
            found.append(tuple(one))
        else:
            raise _wrong("prompt", wanted)
    return tuple(found)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "a list of at least one message")
    return tuple(_message(one, index) for index, one in enumerate(value))


def _message(value: Any, index: int) -> dict[str, str]:
    field = f"messages[{index}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _wrong(field, "an object with a role and a content")
    content = value.get("content")
    if isinstance(content, list):
        parts = [one.get("text") for one in content if isinstance(one, dict) and one.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise RefusedRequest("only parts of the type 'text' are supported", param=f"{field}.content")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise _wrong(f"{field}.content", "a text")
    extra = set(value) - {"role", "content", "name", "refusal", "annotations", "audio"}
    if any(value[key] for key in extra):
        raise RefusedRequest(f"'{printable(min(extra)):.80}' of a message is not supported", param=field)
    return {"role": value["role"], "content": content}
