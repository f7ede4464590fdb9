"""Google Compute Engine: preemption of spot machines, and host maintenance, from the metadata server.

Sources: "Spot VMs" and "Monitor and plan for a host maintenance event" in the Compute Engine documentation. A query
waits for a change (`wait_for_change`), so a notice arrives at once with one query a minute.
"""

from __future__ import annotations

import time
from typing import Literal
from urllib.parse import urlencode

from headway.core.coordination.preemption_board import Notice
from headway.run.notices.metadata import TIMEOUT_SECONDS, Unavailable, ask

GCP = "http://metadata.google.internal"
"""Address of Google's metadata server."""

Value = Literal["preempted", "maintenance-event"]
VALUES: tuple[Value, ...] = ("preempted", "maintenance-event")

#: How long the server delays an answer while nothing changes.
_WAIT_SECONDS = 60

#: Time from a preemption notice to the end of the machine.
_PREEMPTION_SECONDS = 30.0

#: Machines without GPUs get a minute of notice before maintenance, those with GPUs an hour; the value does not show it.
_MAINTENANCE_SECONDS = 60.0


class Gcp:
    """One metadata value of this instance.

    Args:
        value: `preempted` or `maintenance-event`.
        endpoint: Address of the metadata server.
        wait_seconds: How long the server may delay an answer.
    """

    pause_seconds = 1.0

    def __init__(
        self,
        value: Value,
        endpoint: str = GCP,
        wait_seconds: int = _WAIT_SECONDS,
    ) -> None:
        self.name = f"gcp ({value})"
        self._value, self._endpoint, self._wait = value, endpoint.rstrip("/"), wait_seconds
        self._etag = ""
        self._seen: Notice | None = None

    def check(self) -> Notice | None:
        """Wait for a change of the value, at most for `wait_seconds`, and return its notice or None.

        The first query does not wait. Nor do queries while a notice is pending: the caller may have deferred it, and a
        wait could last beyond its deadline.
        """
        waits = self._etag and self._seen is None
        options = {"wait_for_change": "true", "timeout_sec": self._wait, "last_etag": self._etag} if waits else {}
        url = f"{self._endpoint}/computeMetadata/v1/instance/{self._value}?{urlencode(options)}"
        answer = ask(
            url, {"Metadata-Flavor": "Google"}, timeout_seconds=TIMEOUT_SECONDS + (self._wait if options else 0)
        )
        headers = {name.lower(): value for name, value in answer.headers.items()}
        if answer.status != 200 or headers.get("metadata-flavor") != "Google":
            self._etag = ""
            raise Unavailable(f"status {answer.status} for {self._value}")
        self._etag = headers.get("etag", "")
        self._seen = self._notice(answer.text)
        return self._seen

    def _notice(self, value: str) -> Notice | None:
        """Return the notice for a value; an unchanged value gives the same notice as before."""
        if self._value == "preempted" and value == "TRUE":
            found = Notice("gcp", "preemption", "stop", time.time() + _PREEMPTION_SECONDS, key=value)
        elif self._value == "maintenance-event" and value == "TERMINATE_ON_HOST_MAINTENANCE":
            found = Notice("gcp", "host maintenance", "stop", time.time() + _MAINTENANCE_SECONDS, key=value)
        else:  # a migration takes the running machine along
            return None
        return self._seen if self._seen is not None and self._seen.key == value else found

    def acknowledge(self, notice: Notice) -> None:
        """Do nothing: Compute Engine takes no answer."""
