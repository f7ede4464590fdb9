"""The one retry policy: which faults are retried, how long, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from headway.core.errors import HeadwayError
from headway.core.storage import Problem, Storage, client
from support.local_server import LocalServer

pytest.importorskip("fsspec", reason="there is no fsspec: pip install '.[remote]'")


class ProblemError(HeadwayError):
    """A problem as the client names it."""


class Plain(Storage):
    purpose = "testing"
    tries = 3

    def explain(self, problem: Problem, url: str, reason: str) -> HeadwayError:
        return ProblemError(f"{problem}: {reason}", where=url)


class Clock(threading.Event):
    """An event whose waiting is noted and takes no time, and the clock that it moves."""

    now = 0.0
    ends = False

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        self.now += timeout or 0.0
        return self.ends


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(client.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(client.random, "uniform", lambda low, high: high)
    return clock


def failing(monkeypatch: pytest.MonkeyPatch, storage: Storage, error: Exception, times: int = 10**6) -> list[str]:
    """Let the next requests for metadata fail; the list has a mark for each."""
    asked: list[str] = []
    real = type(storage._files).info

    def info(*arguments: Any, **options: Any) -> Any:
        asked.append("")
        if len(asked) <= times:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(type(storage._files), "info", info)
    return asked


def test_pauses_grow_up_to_a_limit_and_end_with_patience(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Plain("memory://retries/a", patience_seconds=100.0, stopping=clock)
    failing(monkeypatch, storage, ConnectionError("refused"))
    with pytest.raises(ProblemError, match="unreachable: refused") as caught:
        storage.stat("b")
    assert caught.value.where == "memory://retries/a/b"
    assert clock.waits == pytest.approx([1.3 * wait for wait in (0.5, 1, 2, 4, 8, 16, 30)])
    assert sum(clock.waits) <= 100


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ConnectionError("refused"), 3),
        (PermissionError("no"), 1),
        (ValueError("odd"), 1),
        # The library has tried by itself.
        (type("EndpointConnectionError", (ConnectionError,), {})("nobody"), 1),
    ],
)
def test_without_patience_the_number_of_tries_counts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, error: Exception, tries: int
) -> None:
    storage = Plain("memory://retries/a", patience_seconds=0.0, stopping=clock)
    asked = failing(monkeypatch, storage, error)
    with pytest.raises(ProblemError):
        storage.stat("b")
    assert len(asked) == tries == len(clock.waits) + 1


def test_a_fault_that_passes_is_told_when_it_lasts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = Plain("memory://retries/a", patience_seconds=60.0, stopping=clock)
    for times, told in ((2, 0), (6, 1)):
        with monkeypatch.context() as patch:
            failing(patch, storage, ConnectionError("refused"), times)
            assert storage.stat("b") is None
        said = capsys.readouterr().err
        assert said.count("trying again") == said.count("answers again") == told


def test_the_end_of_the_program_ends_retries(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.ends = True
    storage = Plain("memory://retries/a", stopping=clock)
    asked = failing(monkeypatch, storage, ConnectionError("refused"))
    with pytest.raises(ProblemError, match="stopped"):
        storage.stat("b")
    assert len(asked) == 1


CONTENT = bytes(number % 251 for number in range(1000))


class _Cut(BaseHTTPRequestHandler):
    """Sends half of its content in the first answers, and all of it in later ones."""

    protocol_version = "HTTP/1.1"
    cuts: list[str]

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(CONTENT[:500] if self.cuts else CONTENT)
        if self.cuts:
            self.cuts.pop()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[tuple[str, list[str]]]:
    """The URL of a server, and a mark for each answer that it will cut."""
    pytest.importorskip("aiohttp", reason="fsspec needs it for the web")
    cuts: list[str] = []
    server = LocalServer(_Cut, cuts=cuts)
    yield server.endpoint, cuts
    server.close()


def test_an_answer_of_a_web_server_that_is_cut_is_read_again(clock: Clock, web: tuple[str, list[str]]) -> None:
    content, (url, cuts) = bytearray(), web
    cuts += ["first", "second"]
    storage = Plain(url, patience_seconds=0.0, stopping=clock)
    storage.stream_to("a", 1000, content.extend)
    assert bytes(content) == CONTENT and len(clock.waits) == 2


def test_an_error_of_who_takes_the_content_is_no_fault_of_the_store(clock: Clock, web: tuple[str, list[str]]) -> None:
    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Plain(web[0], patience_seconds=60.0, stopping=clock).stream_to("a", 1000, full)
    assert clock.waits == []


@pytest.mark.parametrize("url", ["memory://bucket/a/", "memory://bucket/a", "https://h.example/a/?key=1"])
def test_names_are_joined_to_a_url(url: str) -> None:
    if url.startswith("https"):
        pytest.importorskip("aiohttp")
        assert Plain(url).url_of("b") == "https://h.example/a/b?key=1"
    else:
        assert Plain(url).at("b").url_of("c") == "memory://bucket/a/b/c" and Plain(url).url_of("") == Plain(url).url
