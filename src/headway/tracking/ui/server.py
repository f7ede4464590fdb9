"""The HTTP server of `headway ui`: the page, its files, and what it asks for. It reads, and changes nothing.

On the loopback a page of another site could reach it through a name that it lets point here (DNS rebinding), so only
requests to this machine's own names are answered. Beyond the loopback a client needs the token: in the header, or in
the cookie that the login form gives a browser.
"""

from __future__ import annotations

import hashlib
import hmac
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from headway.core.console import notice
from headway.core.format import counted
from headway.telemetry import html
from headway.tracking.http_server import TEXT, TOKEN_VARIABLE, Address, RunsHandler, RunsServer, check_exposure
from headway.tracking.runs_folder import RunsFolder
from headway.tracking.ui.pages import BadQuery, NotFound, Pages

_COOKIE = "headway"
_HTML = "text/html; charset=utf-8"
_JSON = "application/json"
_SCRIPT = "text/javascript; charset=utf-8"
_STYLE = "text/css; charset=utf-8"
#: Every file that is served, by the path of its request; there is no way to another one.
_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", _HTML),
    "/style.css": ("style.css", _STYLE),
    **{
        f"/{name}.js": (f"{name}.js", _SCRIPT)
        for name in ("app", "charts", "format", "metrics", "run", "runs", "scales", "server", "settings")
    },
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uplot/uPlot.iife.min.js": ("uplot/uPlot.iife.min.js", _SCRIPT),
    "/uplot/uPlot.min.css": ("uplot/uPlot.min.css", _STYLE),
}
#: Of these, what the pages of reports have too.
_SHARED = ("format.js", "scales.js", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css")
#: What is no JSON, by the path of its request.
_KINDS = {
    "/run": _HTML,
    "/report": _HTML,
    "/log": TEXT,
    "/api/table.csv": "text/csv; charset=utf-8",
}
#: A report carries its own script and style; it runs apart from this page, and can ask nothing.
_REPORT_POLICY = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_LOGIN = ("login.html", _HTML)
#: Longest body of a request: the form's.
_BODY_BYTES = 4096
#: Most fields of a query.
_FIELDS = 64
#: Nothing but this server's own files is loaded or run, and no other page can hold this one in a frame.
_HEADERS: Mapping[str, str] = {
    "Content_Security_Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X_Content_Type_Options": "nosniff",
    "Referrer_Policy": "no-referrer",
    "Cross_Origin_Resource_Policy": "same-origin",
    "Cache_Control": "no-store",
}


class _Handler(RunsHandler):
    server: UiServer

    def answer(self) -> None:
        if not self._is_meant():
            return
        url = urlsplit(self.path)
        if not (self.has_token() or self._has_cookie()):
            if url.path == "/" or url.path == "/login":
                self._send_file(*_LOGIN, status=HTTPStatus.UNAUTHORIZED)
            elif url.path in ("/style.css", "/icon.svg"):
                self._send_file(*_FILES[url.path])
            else:
                self._fail(HTTPStatus.UNAUTHORIZED, "a token is needed", WWW_Authenticate="Bearer")
        elif url.path in _FILES:
            self._send_file(*_FILES[url.path])
        elif url.path == "/page.css":
            self._send(HTTPStatus.OK, html.STYLE.encode(), _STYLE)
        elif url.path in self._questions():
            self._send_answer(url.path, url.query)
        else:
            self._fail(HTTPStatus.NOT_FOUND, "there is nothing here")

    def do_POST(self) -> None:
        """Take the token of the login form, and give the cookie for it."""
        if not self._is_meant():
            return
        size = self.headers.get("Content-Length", "")
        if urlsplit(self.path).path != "/login" or not size.isdecimal() or int(size) > _BODY_BYTES:
            self._fail(HTTPStatus.NOT_FOUND, "there is nothing here")
            return
        with suppress(ValueError):
            fields = parse_qs(self.rfile.read(int(size)).decode(errors="replace"), max_num_fields=_FIELDS)
            given = fields.get("token", [""])[0]
            if self.server.token is not None and hmac.compare_digest(given.encode(), self.server.token.encode()):
                secure = "; Secure" if self.server.url.startswith("https:") else ""
                cookie = f"{_COOKIE}={self.server.cookie}; HttpOnly; SameSite=Strict; Path=/{secure}"
                self._send(HTTPStatus.SEE_OTHER, b"", Location="/", Set_Cookie=cookie)
                return
        self._send_file(*_LOGIN, status=HTTPStatus.UNAUTHORIZED)

    def _is_meant(self) -> bool:
        """Check that the request names this machine; else refuse it."""
        if self.names_this_machine():
            return True
        self._fail(HTTPStatus.FORBIDDEN, "the page is at localhost; requests to other names are not answered")
        return False

    def _has_cookie(self) -> bool:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return False
        expected = self.server.cookie
        if found is None or expected is None:
            return False
        return hmac.compare_digest(found.value.encode(), expected.encode())

    def _questions(self) -> Mapping[str, Callable[[Mapping[str, list[str]]], Any]]:
        pages = self.server.pages
        return {
            "/api/runs": pages.runs,
            "/api/catalogue": lambda _: pages.catalogue(),
            "/api/curves": pages.curves,
            "/api/table.csv": pages.table,
            "/run": pages.run,
            "/report": pages.report,
            "/log": pages.log,
        }

    def _send_answer(self, path: str, query: str) -> None:
        from orjson import dumps

        try:
            fields = parse_qs(query, max_num_fields=_FIELDS)
        except ValueError:
            self._fail(HTTPStatus.BAD_REQUEST, "the query is too long")
            return
        try:
            found = self._questions()[path](fields)
        except NotFound as error:
            self._fail(HTTPStatus.NOT_FOUND, str(error))
        except BadQuery as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
        else:
            content = found.encode(errors="replace") if isinstance(found, str) else dumps(found)
            policy = {"Content_Security_Policy": _REPORT_POLICY} if path == "/report" else {}
            self._send(HTTPStatus.OK, content, _KINDS.get(path, _JSON), **policy)

    def _send_file(self, name: str, content_type: str, *, status: HTTPStatus = HTTPStatus.OK) -> None:
        package = html.__package__ if name in _SHARED else __package__
        self._send(status, resources.files(package).joinpath("static", name).read_bytes(), content_type)

    def _fail(self, status: HTTPStatus, why: str, **headers: str) -> None:
        self._send(status, f"{why}\n".encode(), **headers)

    def _send(self, status: HTTPStatus, body: bytes, content_type: str = TEXT, **headers: str) -> None:
        self.send(status, body, content_type, **{**_HEADERS, **headers})


class UiServer(RunsServer):
    """Serves the page until `shutdown`; the rest is as for `RunsServer`.

    Args:
        address: Where to listen.
        folder: The runs.
        token: What clients must give.
        tls: Certificate and key as PEM files.
    """

    def __init__(
        self, address: Address, folder: RunsFolder, *, token: str | None = None, tls: tuple[Path, Path] | None = None
    ) -> None:
        self.pages = Pages(folder)
        # Not the token itself: the cookie lies in a browser's files. The same after a restart of the server.
        self.cookie = None if token is None else hmac.new(token.encode(), b"headway ui", hashlib.sha256).hexdigest()
        super().__init__(address, _Handler, token=token, tls=tls)


def serve(folder: Path, address: Address, tls: tuple[Path, Path] | None) -> None:
    """Serve the page on the runs of a folder until Ctrl-C.

    Raises:
        ConfigError: the token or the certificate is missing, or the port is in use.
        CheckpointError: there is no such folder of runs.
    """
    token = check_exposure(address, tls)
    runs = RunsFolder(folder, newest=True, ended_seconds=float("inf"))
    with UiServer(address, runs, token=token, tls=tls) as server:
        found = counted(len(runs.refresh()), "run")
        login = "" if token is None else f" (it asks for {TOKEN_VARIABLE})"
        notice(f"{found} of {folder}; the page is at {server.url}{login}")
        # As Ctrl-C: service managers and containers stop it so.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
