"""Amazon EC2: interruption notices of spot instances, and rebalance recommendations, from IMDSv2.

Sources: "Spot Instance interruption notices" and "EC2 instance rebalance recommendations" in the EC2 user guide. A
notice comes two minutes ahead, and 404 means that there is none. Amazon recommends a query every 5 seconds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from headway.core.coordination.preemption_board import Notice
from headway.run.notices.metadata import Answer, Unavailable, ask

AWS = "http://169.254.169.254"
"""Address of EC2's metadata service."""

_TOKEN_SECONDS = 6 * 3600


class Aws:
    """The interruption notices and rebalance recommendations of this EC2 instance.

    Args:
        endpoint: Address of the metadata service.
        on_rebalance: Action on a recommendation without an interruption notice.
    """

    name = "aws"
    pause_seconds = 5.0

    def __init__(
        self,
        endpoint: str = AWS,
        on_rebalance: Literal["save", "stop", "ignore"] = "save",
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._on_rebalance = on_rebalance
        self._token: str | None = None

    def check(self) -> Notice | None:
        """Return an interruption notice if there is one, else a rebalance recommendation, else None."""
        answer = self._get("spot/instance-action")
        if answer.status == 200:
            document = answer.json_object()
            action = document.get("action")
            when = document.get("time")
            # A hibernation may begin at once, so its time is no deadline.
            deadline = _unix_seconds(when) if action != "hibernate" else None
            return Notice(self.name, f"spot interruption ({action})", "stop", deadline, key=f"{action} {when}")
        if self._on_rebalance == "ignore":
            return None
        answer = self._get("events/recommendations/rebalance")
        if answer.status != 200:
            return None
        when = answer.json_object().get("noticeTime")
        return Notice(self.name, "rebalance recommendation", self._on_rebalance, key=f"rebalance {when}")

    def acknowledge(self, notice: Notice) -> None:
        """Do nothing: EC2 takes no answer."""

    def _get(self, document: str) -> Answer:
        """Fetch a document, and renew the token if it has expired."""
        for fresh in (False, True):
            if fresh or self._token is None:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
                answer = ask(f"{self._endpoint}/latest/api/token", headers, method="PUT")
                if answer.status != 200 or not answer.text.isascii() or not 0 < len(answer.text) < 1024:
                    raise Unavailable(f"status {answer.status} for a token")
                self._token = answer.text
            url = f"{self._endpoint}/latest/meta-data/{document}"
            answer = ask(url, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
        if answer.status not in (200, 404):
            raise Unavailable(f"status {answer.status} for {document}")
        return answer


def _unix_seconds(text: object) -> float | None:
    """Parse a time such as 2026-01-31T08:22:00Z; None if it is invalid."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else None
