"""The front: OpenAI's interface over HTTP. The only file that imports starlette.

What a request costs is bounded before it is looked at: a key, the type and size of its body, the time to send it, and
the number of requests at once. `headway.serve.server` bounds what comes before a request and after it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headway.core.exposure import bears, names_this_machine
from headway.core.files.foreign import parse_json
from headway.core.format import printable
from headway.serve.asking import RefusedRequest, user_of
from headway.serve.backend import Answer, Call
from headway.serve.metrics import Metrics
from headway.serve.options import Limits
from headway.serve.served import Arm

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")
#: Time to send a body.
_BODY_SECONDS = 30.0
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_PAGE = {
    "/": ("chat.html", "text/html; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
}


@dataclass
class Front:
    """What answers requests.

    Args:
        model: The name that clients ask for.
        arms: What answers, by name.
        choose: Gives the name of the arm for a user, and the identifier of the request.
        key: What clients send as `Authorization: Bearer KEY`; None answers everybody on this machine.
        limits: What requests may cost.
        metrics: What is counted.
        routes: More paths that take POST with a key, as for outcomes.
    """

    model: str
    arms: Mapping[str, Arm]
    choose: Callable[[str | None], tuple[str, str]]
    key: str | None
    limits: Limits
    metrics: Metrics
    routes: Mapping[str, Callable[[Any], Awaitable[dict[str, Any]]]] = field(default_factory=dict)
    is_draining: bool = False
    """The server ends soon, and is not ready for more."""
    is_closed: bool = False
    """No further request is let in."""
    running: int = 0
    """Requests being answered."""

    def application(self) -> Callable[..., Awaitable[None]]:
        """Return the ASGI application."""
        self.metrics.watch("requests_running", "Requests being answered", lambda: self.running)
        self.metrics.watch("ready", "Whether the server is ready; 1 or 0", lambda: float(self.is_ready))
        chat = Route("/v1/chat/completions", self._completions, methods=["POST"])
        completions = Route("/v1/completions", self._completions, methods=["POST"])
        reading: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/healthz": self._health,
            "/readyz": self._ready,
            "/metrics": self._exposition,
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._models,
            **dict.fromkeys(_PAGE, self._page),
        }
        routes = [chat, completions, *(Route(path, answer) for path, answer in reading.items())]
        routes += [Route(path, self._posted, methods=["POST"]) for path in self.routes]
        handlers: Any = {RefusedRequest: _refused, 404: _no_path, 405: _no_path, Exception: _failed}
        app = Starlette(routes=routes, exception_handlers=handlers)

        async def closing(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_closing(message: Message) -> None:
                if self.is_draining and message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
                await send(message)

            await app(scope, receive, send_closing)

        return closing

    @property
    def is_alive(self) -> bool:
        """Whether every arm can answer."""
        return all(arm.backend.is_alive() for arm in self.arms.values())

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent here."""
        return not self.is_draining and self.is_alive

    def _check(self, request: Request) -> None:
        """Check that a request is meant for this server and comes with its key.

        Raises:
            RefusedRequest: it is not.
        """
        if self.key is None:
            if not names_this_machine(request.headers.get("host", "")):
                raise RefusedRequest("this server is at localhost; requests to other names are not answered", 403)
            return
        given = request.headers.get("authorization", "")
        if not bears(given, self.key):
            raise RefusedRequest("a key is needed: Authorization: Bearer KEY", 401, code="invalid_api_key")

    async def _health(self, request: Request) -> Response:
        if self.is_alive:
            return JSONResponse({"status": "ok"}, headers=_HEADERS)
        return JSONResponse({"status": "failed"}, 503, _HEADERS)

    async def _ready(self, request: Request) -> Response:
        if self.is_ready:
            return JSONResponse({"status": "ready"}, headers=_HEADERS)
        return JSONResponse({"status": "draining" if self.is_draining else "failed"}, 503, _HEADERS)

    async def _exposition(self, request: Request) -> Response:
        self._check(request)
        content, content_type = self.metrics.exposition(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": content_type, **_HEADERS})

    async def _page(self, request: Request) -> Response:
        name, content_type = _PAGE[request.url.path]
        content = resources.files(__package__).joinpath("static", name).read_bytes()
        return Response(content, headers={"Content-Type": content_type, **_HEADERS})

    async def _models(self, request: Request) -> Response:
        self._check(request)
        name = request.path_params.get("name")
        versions = {arm.name: arm.backend.label for arm in self.arms.values()}
        entry = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "headway",
            "versions": versions,
            "has_chat": all(arm.backend.has_chat() for arm in self.arms.values()),
        }
        if name is None:
            return JSONResponse({"object": "list", "data": [entry]}, headers=_HEADERS)
        self._check_model(name)
        return JSONResponse(entry, headers=_HEADERS)

    def _check_model(self, name: Any) -> None:
        if name != self.model:
            what = f"there is no model '{printable(str(name)):.80}', only '{self.model}'"
            raise RefusedRequest(what, 404, param="model", code="model_not_found")

    async def _posted(self, request: Request) -> Response:
        self._check(request)
        async with self._slot():
            body = await self._body(request)
            found = await self.routes[request.url.path](body)
        return JSONResponse(found, headers=_HEADERS)

    async def _completions(self, request: Request) -> Response:
        """Answer a request for completions, or for chat."""
        began = time.monotonic()
        path = request.url.path
        async with AsyncExitStack() as stack:
            try:
                self._check(request)
                await stack.enter_async_context(self._slot())
                body = await self._body(request)
                self._check_model(body.get("model"))
                arm, name = self.choose(user_of(body))
                backend = await stack.enter_async_context(self.arms[arm].use())
                call = Call(path == "/v1/chat/completions", body, name, self.limits.seconds)
                answer = await _unless_gone(request, backend.answer(call))
            except RefusedRequest as error:
                self.metrics.answered(path, error.status, time.monotonic() - began, None)
                raise
            headers = {"x-request-id": name, "x-accel-buffering": "no", **_HEADERS}
            answered = partial(self.metrics.answered, path)
            return _Sending(answer, headers, stack.pop_all(), began, answered)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Count a request while it is answered.

        Raises:
            RefusedRequest: there are too many, or the server ends.
        """
        if self.is_closed:
            raise RefusedRequest("the server is ending", 503, code="draining", retry_seconds=1)
        if self.running >= self.limits.concurrency:
            raise RefusedRequest(
                f"{self.limits.concurrency} requests are being answered", 429, code="too_many_requests", retry_seconds=1
            )
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def _body(self, request: Request) -> dict[str, Any]:
        """Read the body of a request within the limits.

        Raises:
            RefusedRequest: it is too large, comes too slowly, or is no JSON object.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page of another site can send other types without being asked.
            raise RefusedRequest("the body must be application/json", 415)
        most = self.limits.body_bytes
        too_large = RefusedRequest(f"the body has more than {most:,} bytes", 413, code="body_too_large")
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 18 or int(length) > most:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in request.stream():
                    content += chunk
                    if len(content) > most:
                        raise too_large
        except TimeoutError:
            raise RefusedRequest(f"the body took more than {_BODY_SECONDS:g} seconds", 408) from None
        except ClientDisconnect:
            raise RefusedRequest("the client is gone", 499) from None
        try:
            body = parse_json(bytes(content))
        except ValueError as error:
            raise RefusedRequest(f"the body {error}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise RefusedRequest("the body is no JSON object", code="invalid_json")
        return body


class _Sending(StreamingResponse):
    """Sends an answer, and counts it at its end; whatever happens, its computation ends, and its place becomes free."""

    def __init__(
        self,
        answer: Answer,
        headers: dict[str, str],
        stack: AsyncExitStack,
        began: float,
        answered: Callable[[int, float, float | None], None],
    ) -> None:
        self._answer = answer
        self._stack = stack
        self._began = began
        self._answered = answered
        self._first: float | None = None
        super().__init__(self._measuring(), answer.status, headers, media_type=answer.content_type)

    async def _measuring(self) -> AsyncIterator[bytes]:
        async for chunk in self._answer.chunks:
            if self._first is None:
                self._first = time.monotonic() - self._began
            yield chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # the client went away
        try:
            await super().__call__(scope, receive, send)
            status = self._answer.status
        finally:
            await self._answer.chunks.aclose()
            await self._stack.aclose()
            self._answered(status, time.monotonic() - self._began, self._first)


async def _unless_gone(request: Request, answering: Awaitable[T]) -> T:
    """Wait for an answer, and end its computation if the client goes away before.

    Raises:
        RefusedRequest: the client is gone.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer = asyncio.ensure_future(answering)
    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise RefusedRequest("the client is gone", 499)
    finally:
        for task in (answer, watch):
            task.cancel()
        await asyncio.gather(answer, watch, return_exceptions=True)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedRequest)
    headers = dict(_HEADERS)
    if error.retry_seconds is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_seconds))
    if error.status in (408, 413, 415):
        headers["Connection"] = "close"  # the rest of the body is not read
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


async def _no_path(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    refused = RefusedRequest(f"there is nothing for {request.method} at this path", status, code="unknown_url")
    return JSONResponse(refused.body(), status, _HEADERS)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse(RefusedRequest("the server failed; its log has the reason", 500).body(), 500, _HEADERS)


def request_name() -> str:
    """Return a new identifier of a request."""
    return f"cmpl-{secrets.token_hex(12)}"
