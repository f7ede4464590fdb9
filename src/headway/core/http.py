"""Requests with credentials in their headers."""

from __future__ import annotations

import ssl
import urllib.request
from typing import Any
from urllib.parse import urlsplit


class _SameServer(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
        """Follow a redirect on the same host, and none from HTTPS to HTTP; another one is an `HTTPError`."""
        old, new = urlsplit(req.full_url), urlsplit(answer[-1])
        if new.hostname != old.hostname or (old.scheme == "https" and new.scheme != "https"):
            return None
        return super().redirect_request(req, *answer)


def open_url(request: urllib.request.Request, timeout: float, tls: ssl.SSLContext | None = None) -> Any:
    """Open a URL as `urllib.request.urlopen` does, but keep the headers from other servers.

    The standard library sends them along to wherever a redirect leads.
    """
    handlers: list[Any] = [_SameServer] if tls is None else [_SameServer, urllib.request.HTTPSHandler(context=tls)]
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout)
