"""Who has claimed the remote checkpoints of a run: what lies there, and what the run directory knows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.core.foreign import parse_json, read_json_object

#: In the run directory: what this run has claimed. In a new one after `--restart`, the wish to claim afresh.
CLAIM_FILE = "remote.json"
RESTARTED_FILE = ".restarted"


@dataclass(frozen=True)
class Claim:
    """Says whose the remote tier of a run is."""

    url: str
    """Of the run there, generation included."""
    number: int
    """Counted from 1 without gaps."""
    token: str
    attempt: int
    host: str
    time: float

    def render(self) -> bytes:
        """The content of the claim's object."""
        return json.dumps(asdict(self)).encode()


def read_claim(run: Path) -> Claim | None:
    """The claim that a run directory knows of; None when there is none that can be read."""
    try:
        return Claim(**read_json_object(run / CLAIM_FILE))
    except (OSError, ValueError, TypeError):
        return None


def in_words(claim: bytes) -> str:
    """Who has made a claim, by its object."""
    try:
        record = parse_json(claim)
        return f"attempt {record['attempt']} on {record['host']}"
    except (ValueError, KeyError, TypeError):
        return "another one"
