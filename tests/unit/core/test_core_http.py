"""Requests with credentials: a redirect is followed on the same server only, and not out of TLS."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler

import pytest

from headway.core.credentials.http import _SameServer, open_url
from support.local_server import LocalServer


class Redirects(BaseHTTPRequestHandler):
    """Redirects what it is asked first to `target`."""

    target: str
    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(302 if self.path == "/" else 200)
        self.send_header("Location", self.target.replace("PORT", self.headers["Host"].partition(":")[2]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("target", ["/there", "http://127.0.0.1:PORT/there", "http://localhost:PORT/there"])
def test_headers_stay_with_the_server(target: str) -> None:
    seen: list[tuple[str, str | None]] = []
    server = LocalServer(Redirects, target=target, seen=seen)
    request = urllib.request.Request(f"{server.endpoint}/", headers={"Authorization": "Bearer mine"})
    try:
        if "localhost" in target:
            with pytest.raises(urllib.error.HTTPError, match="302"):
                open_url(request, 10.0)
        else:
            with open_url(request, 10.0) as answer:
                assert answer.status == 200
    finally:
        server.close()
    expected = [("/", "Bearer mine"), *([] if "localhost" in target else [("/there", "Bearer mine")])]
    assert seen == expected


def test_no_redirect_leads_out_of_tls() -> None:
    request, handler = urllib.request.Request("https://example.org/"), _SameServer()
    given = (request, None, 302, "Found", {})
    assert handler.redirect_request(*given, "http://example.org/there") is None
    followed = handler.redirect_request(*given, "https://example.org/there")
    assert followed is not None and followed.full_url == "https://example.org/there"


@pytest.mark.parametrize(
    ("old", "new", "is_followed"),
    [
        ("http://example.org:4318/", "http://example.org:9999/", False),
        ("https://example.org/", "https://example.org:8443/", False),
        ("https://example.org/", "https://example.org:443/there", True),
        ("http://example.org/", "https://example.org/", True),
        ("http://example.org:4318/", "https://example.org/", False),
        ("http://example.org:4318/", "https://example.org:4318/", True),
    ],
)
def test_another_port_is_another_server(old: str, new: str, is_followed: bool) -> None:
    found = _SameServer().redirect_request(urllib.request.Request(old), None, 302, "Found", {}, new)
    assert (found is not None) == is_followed


def test_content_is_not_lost_over_a_redirect() -> None:
    """The standard library would ask again by GET, and what it answers would look like success."""
    request = urllib.request.Request("http://example.org/", data=b"points")
    given = (request, None, 302, "Found", {}, "http://example.org/there")
    assert urllib.request.HTTPRedirectHandler().redirect_request(*given) is not None  # type: ignore[arg-type]
    assert _SameServer().redirect_request(*given) is None
