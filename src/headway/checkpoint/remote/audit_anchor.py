"""Anchors of a run's audit log in its remote tier: they tell when the log was cut at its end, or written anew.

    <url>/<name of the run>/audit/<name of the log>/00000012-9f86d081884c7d65.json

An anchor is made by a conditional put (S3: If-None-Match) and never written again. It is named by the number of lines
and the hash of the last one, so that two writers cannot disagree about one, and the same head is anchored once.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.remote.objects import Objects
from headway.checkpoint.remote.open import place_of
from headway.checkpoint.run_identity import read_run_id
from headway.core.audit import AUDIT_FILE, Anchor, AuditLog, Head
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.foreign import parse_json
from headway.core.machine.system import host_name

if TYPE_CHECKING:
    from headway.config import RemoteConfig

#: Folder of the anchors, next to the generations of the tier.
ANCHORS = "audit"
#: How long an anchor waits for the store: what it is about must not wait.
_PATIENCE_SECONDS = 5.0
_LOG = re.compile("[0-9a-f]{16}")
_NAME = re.compile(r"([0-9]{8,12})-([0-9a-f]{16})\.json")


def audit_place(remote: RemoteConfig, run: Path, patience_seconds: float = _PATIENCE_SECONDS) -> Objects:
    """Return the folder of the anchors of a run.

    Args:
        remote: The config's `checkpoint.remote`.
        run: The run directory.
        patience_seconds: How long to wait for the store.
    """
    # Anchors hold no training data, so they need no key.
    settings: dict[str, Any] = {**remote.model_dump(mode="json"), "encrypt": False}
    return place_of(settings, run.resolve().name, patience_seconds=patience_seconds).at(ANCHORS)


def anchor_log(remote: RemoteConfig, run: Path) -> bool:
    """Anchor the present end of a run's audit log; return whether that was possible. Nothing is raised, but a warning.

    Args:
        remote: The config's `checkpoint.remote`.
        run: The run directory.
    """
    log = AuditLog(run / AUDIT_FILE)
    try:
        name = log.name
        head = log.head()
        if name is None:
            return False
        anchor = Anchor(name, head, time.time(), host_name(), read_run_id(run))
        place = audit_place(remote, run)
        place.at(name).make_folder()
        place.create(f"{anchor.key}.json", json.dumps(asdict(anchor)).encode())
    except (CheckpointError, ConfigError) as error:
        warning(f"line {head.lines} of the audit log is not anchored at {remote.url}: {error.what}")
        return False
    except OSError as error:
        warning(f"the audit log cannot be read and anchored: {error.strerror or error}")
        return False
    return True


def read_anchors(place: Objects) -> Iterator[Anchor]:
    """Yield the anchors of all logs of a run; what is none is passed over.

    Args:
        place: Their folder (`audit_place`).

    Raises:
        CheckpointError: The store cannot be reached.
        ConfigError: It denies access.
    """
    for log in filter(_LOG.fullmatch, place.names()):
        folder = place.at(log)
        for name in folder.names():
            match = _NAME.fullmatch(name)
            anchor = None if match is None else _parse(folder.read(name))
            if match is None or anchor is None or anchor.log != log:
                continue
            if int(match[1]) == anchor.head.lines and anchor.head.sha256.startswith(match[2]):
                yield anchor


def _parse(content: bytes | None) -> Anchor | None:
    try:
        record = parse_json(content or b"")
        head = Head(int(record["head"]["lines"]), str(record["head"]["sha256"]))
        run = record.get("run")
        return Anchor(
            str(record["log"]),
            head,
            float(record["time"]),
            str(record["host"])[:64],
            str(run) if run else None,
        )
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
