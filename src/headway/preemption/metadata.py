"""Asking a cloud's metadata service: plain HTTP to the machine itself, in a moment or not at all."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: A metadata service answers within milliseconds; what takes longer is not there.
TIMEOUT_SECONDS = 2.0

#: Its answers are a few hundred bytes; more than this is something else.
_MOST_BYTES = 2**20

# It is reached directly and never through a proxy, which would answer for another machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unavailable(Exception):
    """The service is away, slow, or says what it should not."""


@dataclass(frozen=True)
class Answer:
    """What a metadata service has said."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body without the white space around it."""
        return self.body.decode("utf-8", errors="replace").strip()

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            Unavailable: it is none.
        """
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Unavailable(f"an answer that is no JSON object: {self.text[:60]!r}")
        return value


def ask(
    url: str,
    headers: Mapping[str, str],
    method: str = "GET",
    body: bytes | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Answer:
    """One request. Refusals (404 for "nothing is scheduled", 401 for an old token) are answers too.

    Raises:
        Unavailable: there was no answer.
    """
    request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
    try:
        try:
            response = _opener.open(request, timeout=timeout_seconds)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return Answer(int(response.status or 0), dict(response.headers.items()), response.read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(str(reason) or type(error).__name__) from None
