"""Microsoft Azure: scheduled events of this machine, and the approval that one may begin.

Source: "Azure Metadata Service: Scheduled Events for Linux VMs". A spot machine gets 30 seconds of notice, a reboot 15
minutes. An event names its machines, and the list also holds events of other machines in the same group. The first
query enables the service and may take two minutes; until then the service counts as unavailable.
"""

from __future__ import annotations

import json
import math
import time
from email.utils import parsedate_to_datetime
from typing import Any

from headway.core.coordination.preemption_board import Notice
from headway.run.notices.metadata import Unavailable, ask

AZURE = "http://169.254.169.254"
"""Address of Azure's metadata service."""

_HEADERS = {"Metadata": "true"}

#: Events that end this process; `Freeze` only pauses it for some seconds.
_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")

#: The shortest documented notice, that of a spot machine.
_LEAST_SECONDS = 30.0


class Azure:
    """The scheduled events of this machine.

    Args:
        endpoint: Address of the metadata service.
        answers: Whether to approve events once all is saved.
    """

    name = "azure"
    pause_seconds = 2.0

    def __init__(self, endpoint: str = AZURE, answers: bool = True) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._answers = answers
        self._machine: str | None = None
        self._due: dict[str, float] = {}

    def check(self) -> Notice | None:
        """Return the next event of this machine, or None."""
        if self._machine is None:
            answer = ask(
                f"{self._endpoint}/metadata/instance/compute/name?api-version=2021-02-01&format=text", _HEADERS
            )
            if answer.status != 200 or not answer.text:
                raise Unavailable(f"status {answer.status} for the machine's name")
            self._machine = answer.text
        answer = ask(self._events, _HEADERS)
        if answer.status != 200:
            raise Unavailable(f"status {answer.status} for scheduled events")
        events = answer.json_object().get("Events")
        if not isinstance(events, list):
            raise Unavailable("scheduled events without a list of them")
        mine = [self._notice(event) for event in events if isinstance(event, dict) and self._concerns(event)]
        self._due = {notice.key: notice.deadline for notice in mine if notice.deadline is not None}
        return min(mine, key=lambda notice: notice.deadline or 0.0, default=None)

    def acknowledge(self, notice: Notice) -> None:
        """Approve an event (`StartRequests`), which otherwise begins at its scheduled time."""
        if not self._answers or not notice.key:
            return
        body = json.dumps({"StartRequests": [{"EventId": notice.key}]}).encode()
        answer = ask(self._events, {**_HEADERS, "Content-Type": "application/json"}, method="POST", body=body)
        if answer.status != 200:
            raise Unavailable(f"status {answer.status} for an answer to event {notice.key}")

    @property
    def _events(self) -> str:
        return f"{self._endpoint}/metadata/scheduledevents?api-version=2020-07-01"

    def _concerns(self, event: dict[str, Any]) -> bool:
        resources = event.get("Resources")
        return event.get("EventType") in _ENDS and isinstance(resources, list) and self._machine in resources

    def _notice(self, event: dict[str, Any]) -> Notice:
        key = str(event.get("EventId", ""))
        due = None if event.get("EventStatus") == "Started" else _unix_seconds(event.get("NotBefore"))
        if due is None:  # it has begun: a later answer must not extend the deadline
            due = min(time.time() + _LEAST_SECONDS, self._due.get(key, math.inf))
        return Notice(self.name, f"scheduled event ({event['EventType']})", "stop", due, key=key)


def _unix_seconds(text: object) -> float | None:
    """Parse a time such as Mon, 19 Sep 2016 18:29:47 GMT; None if it is invalid."""
    try:
        return parsedate_to_datetime(str(text)).timestamp()
    except ValueError:
        return None
