"""Replies: text ends before the first stop string, however tokens cut it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.serve.engine import Drawn, Ended
from headway.serve.replying import Form, Reply


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def reply_to(content: bytes, stops: tuple[str, ...], end: str = "length") -> tuple[str, str | None, int]:
    """The text as it is streamed, why it ends, and how many tokens it took."""
    reply = Reply(Bytes(), [], stops)
    said = ""
    for number in content:
        said += reply.take(Drawn(number)).text
        if reply.finish is not None:
            return said, reply.finish, reply.count
    return said + reply.take(Ended(end)).text, reply.finish, reply.count


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    assert reply_to(b"one END two", ("END",)) == ("one ", "stop", 7)
    assert reply_to(b"one EN", ("END",)) == ("one EN", "length", 6)
    assert reply_to(b"one", (), "stop") == ("one", "stop", 3)


@given(
    st.text(alphabet="ab\u00e4\U0001f600 ", max_size=20),
    st.lists(st.text("ab\u00e4", min_size=1, max_size=3), max_size=3),
)
def test_streamed_text_is_the_whole_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    said, finish, _ = reply_to(text.encode(), tuple(stops))
    ends = [place for length in range(len(text) + 1) for stop in stops if (place := text[:length].find(stop)) >= 0]
    if ends:
        # The stop string that is complete first ends it.
        first = next(length for length in range(len(text) + 1) if any(stop in text[:length] for stop in stops))
        assert said == text[: min(text[:first].find(stop) for stop in stops if stop in text[:first])]
        assert finish == "stop"
    else:
        assert (said, finish) == (text, "length")


def test_tokens_with_logprobs_end_with_the_text() -> None:
    reply = Reply(Bytes(), [], ("END",))
    pieces = [reply.take(Drawn(number, -0.5, ((number, -0.5),))) for number in b"one END"]
    tokens = [token for piece in pieces for token in piece.tokens]
    assert "".join(token.text for token in tokens) == "one "
    assert [token.offset for token in tokens] == [0, 1, 2, 3]
    form = Form(False, "id", "m", 0, True)
    whole = form.whole([pieces], 3, 7)
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}


def test_a_token_inside_a_character_has_no_bytes_of_its_own() -> None:
    reply = Reply(Bytes(), [], ())
    pieces = [reply.take(Drawn(number, -1.0)) for number in "ä".encode()] + [reply.take(Ended("length"))]
    entries = Form(True, "id", "m", 0, True).whole([pieces], 1, 2)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [None, None]
    assert "".join(piece.text for piece in pieces) == "ä"
