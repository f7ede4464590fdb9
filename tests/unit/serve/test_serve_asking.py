"""Requests: what is asked, and what is refused with the name of the field."""

from __future__ import annotations

from typing import Any

import pytest

from headway.serve.asking import RefusedRequest, parse, user_of


def asked(**fields: Any) -> Any:
    return parse({"model": "m", "prompt": "a", **fields}, is_chat=False, default_tokens=16)


def chat(**fields: Any) -> Any:
    message = {"role": "user", "content": "a"}
    return parse({"model": "m", "messages": [message], **fields}, is_chat=True, default_tokens=None)


def test_defaults_are_those_of_openai() -> None:
    found = asked()
    assert found.prompts == ("a",)
    assert (found.draws.max_tokens, found.draws.temperature, found.draws.top_p, found.choices) == (16, 1.0, 1.0, 1)
    assert not found.streams
    assert found.draws.top_logprobs is None
    assert asked().draws.seed != asked().draws.seed


def test_every_form_of_a_prompt_is_read() -> None:
    assert asked(prompt=["a", "b"]).prompts == ("a", "b")
    assert asked(prompt=[1, 2]).prompts == ((1, 2),)
    assert asked(prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == ({"role": "user", "content": "ab"},)


def test_logprobs_of_chat_and_of_completions_have_different_forms() -> None:
    assert asked(logprobs=3).draws.top_logprobs == 3
    assert chat(logprobs=True, top_logprobs=2).draws.top_logprobs == 2
    assert chat(logprobs=True).draws.top_logprobs == 0
    assert chat(logprobs=False).draws.top_logprobs is None


def test_fields_that_change_nothing_are_taken() -> None:
    asked(presence_penalty=0, logit_bias={}, echo=False, best_of=1, metadata={"a": "b"})
    chat(tools=[], response_format={"type": "text"}, max_completion_tokens=3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 17}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, None),
        ({"stream_options": [1]}, "stream_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    if param is None:
        asked(**fields)
        return
    with pytest.raises(RefusedRequest) as error:
        asked(**fields)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        ["a"],
        [{"role": "user"}],
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
    ],
)
def test_a_wrong_message_is_refused(messages: Any) -> None:
    with pytest.raises(RefusedRequest):
        chat(messages=messages)


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(RefusedRequest, match="needs"):
        chat(top_logprobs=2)


def test_a_user_is_a_short_text() -> None:
    assert user_of({"user": "anna"}) == "anna"
    assert user_of({}) is None
    for wrong in (3, "", "a" * 513):
        with pytest.raises(RefusedRequest):
            user_of({"user": wrong})
