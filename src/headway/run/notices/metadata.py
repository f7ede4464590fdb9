"""Queries to a cloud's metadata service: plain HTTP, with a short timeout."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: A metadata service answers within milliseconds; without an answer by then, there is none.
TIMEOUT_SECONDS = 2.0

#: Size limit of an answer; real ones have a few hundred bytes.
_MOST_BYTES = 2**20

# Never through a proxy, which would answer for another machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unavailable(Exception):
    """The service does not answer in time, or gives an unexpected answer."""


@dataclass(frozen=True)
class Answer:
    """An answer of a metadata service."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body without the white space around it."""
        return self.body.decode("utf-8", errors="replace").strip()

    def json_object(self) -> dict[str, Any]:
        """Parse the body as a JSON object.

        Raises:
            Unavailable: The body is not a JSON object.
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
    """Send one request and return its answer, of any status (404 for "nothing is scheduled", 401 for an old token).

    Raises:
        Unavailable: There was no answer.
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
