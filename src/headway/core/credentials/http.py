"""Requests with credentials in their headers."""

from __future__ import annotations

import ssl
import urllib.request
from typing import Any
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


class _SameServer(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
        """Follow a redirect that stays on the same server; another one is an `HTTPError`.

        So is the redirect of a request with content, since the standard library would ask again without the content.
        """
        if req.data is not None or not _is_same_server(req.full_url, answer[-1]):
            return None
        return super().redirect_request(req, *answer)


def _is_same_server(url: str, other: str) -> bool:
    """Return whether another URL has the host and port of the first, or leads from HTTP to HTTPS at their own ports."""
    old = urlsplit(url)
    new = urlsplit(other)
    if new.hostname != old.hostname or new.scheme not in (old.scheme, "https"):
        return False
    ports = tuple(one.port or _PORTS.get(one.scheme) for one in (old, new))
    return ports[0] == ports[1] or ports == (_PORTS["http"], _PORTS["https"])


def open_url(request: urllib.request.Request, timeout: float, tls: ssl.SSLContext | None = None) -> Any:
    """Open a URL as `urllib.request.urlopen` does, but keep the headers from other servers.

    The standard library sends them along to wherever a redirect leads.
    """
    handlers: list[Any] = [_SameServer] if tls is None else [_SameServer, urllib.request.HTTPSHandler(context=tls)]
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout)
