"""A proxy in front of an S3 server that does what networks and overloaded servers do."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.waits import LONG

_REFUSALS = {
    "403": "RequestTimeTooSkewed",
    "412": "PreconditionFailed",
    "503": "ServiceUnavailable",
}


class S3Proxy:
    """Passes requests on, unless a rule says otherwise.

    Rules are functions of (method, path with query, body) that return None (no say in it) or an action: `"503"`,
    `"403"`, `"412"` (refuse it), `"cut"` (close the connection in the middle of what is sent), `"slow"` (a second
    late), `"lost"` (carried out, but the answer is lost), `"stale"` (the answer to the same request when it was first
    made).
    """

    def __init__(self, target: str) -> None:
        self._host = target.removeprefix("http://")
        self.rules: list[Callable[[str, str, bytes], str | None]] = []
        self.requests: list[tuple[str, str, int]] = []
        """Method, path and size of what was sent, of every request."""
        self.done: Counter[str] = Counter()
        """How often each action was taken."""
        self._first_answers: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize, disable_nagle_algorithm = 65536, True

            def log_message(self, *_: Any) -> None:
                pass

            def handle_expect_100(self) -> bool:
                went = super().handle_expect_100()
                self.wfile.flush()
                return went

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def sent(self, part: str) -> int:
        """How often something was put whose path contains this."""
        return sum(method == "PUT" and part in path for method, path, _ in self.requests)

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        method, path = request.command, request.path
        self.requests.append((method, path, len(body)))
        action = next((found for rule in self.rules if (found := rule(method, path, body))), None)
        if action is not None:
            self.done[action] += 1
        if action in _REFUSALS:
            said = f"<Error><Code>{_REFUSALS[action]}</Code></Error>".encode()
            self._answer(request, int(action), [], b"" if method == "HEAD" else said)
            return
        if action == "slow":
            time.sleep(1.0)
        if action == "cut" and method == "PUT":
            request.close_connection = True
            request.connection.close()
            return
        status, headers, content = self._ask(request, body)
        if action == "stale":
            status, headers, content = self._first_answers.setdefault(path, (status, headers, content))
        if action == "cut":
            content_length = [("Content-Length", str(len(content)))]
            self._answer(request, status, [*_without_length(headers), *content_length], content[: len(content) // 2])
            request.close_connection = True
            request.connection.close()
            return
        if action == "lost":
            request.close_connection = True
            request.connection.close()
            return
        self._answer(request, status, headers, content)

    def _ask(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._host, timeout=LONG)
        # The signature covers the host, so it is passed on as it was asked for.
        connection.request(request.command, request.path, body, dict(request.headers))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), content

    def _answer(
        self, request: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], content: bytes
    ) -> None:
        request.send_response_only(status)
        told = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection"):
                request.send_header(name, value)
        if "content-length" not in told:
            request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        try:
            request.wfile.write(content)
            request.wfile.flush()
        except OSError:
            pass  # whoever asked has gone


def _without_length(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() != "content-length"]
