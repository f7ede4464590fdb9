"""The identity of a run: which run a checkpoint, a claim or a remote tier belongs to.

A run gets an id when its directory is made and keeps it for life, even if config, data or machine change. The id is in
`run.json` (key `id`), in `remote.json`, in every claim and every manifest, together with name and seed for people. A
new directory without checkpoints adopts the id of the run that owns its remote tier, if config and data are the same:
so a run continues on another machine.

Checkpoints of older versions have no id. They belong to every run that has had their config.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from headway.checkpoint.format.folders import checkpoint_folders
from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.config import Config, identity
from headway.core.errors import CheckpointError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_or_empty
from headway.core.files.hashes import fingerprint

#: Key of a manifest's context: fingerprint of the config values that decide the run's mathematics
#: (`headway.config.derived.identity`).
IDENTITY = "identity"
#: Key of a manifest's context: id, name and seed of the run that made it.
OF_RUN = "of_run"
#: Key of `run.json`.
RUN_ID = "id"

RUN_FILE = "run.json"
CLAIM_FILE = "remote.json"
_ID = re.compile(r"[0-9a-f]{32}")

Relation = Literal["own", "other", "unknown"]


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, from its own directory."""

    run: Path
    id: str | None
    """None for a directory of an older version without an attempt since."""
    name: str
    seed: int | None = None
    config: str | None = None
    """Fingerprint of its current config."""
    data: str | None = None
    """Fingerprint of its data; None if unknown."""

    def record(self) -> dict[str, Any]:
        """Return the record of the run for manifests and claims."""
        return {"id": self.id, "name": self.name, "seed": self.seed}

    def settings(self) -> dict[str, Any]:
        """Return all but the directory, as JSON values for another process."""
        return {**self.record(), "config": self.config, "data": self.data}

    @cached_property
    def configs(self) -> frozenset[str]:
        """Fingerprints of the configs of all attempts in this directory, or else of its checkpoints."""
        records = [self.run / RUN_FILE, *self.run.glob(f"attempts/*/{RUN_FILE}")]
        found = {_config_of(read_json_or_empty(path)) for path in records} - {None}
        if not found:
            found = {manifest.context.get(IDENTITY) for manifest in self._made_here()}
        return frozenset(one for one in (*found, self.config) if isinstance(one, str))

    def relation(self, manifest: Manifest) -> Relation:
        """Return whether a checkpoint belongs to this run.

        One without an id does if it was made with a config that the run has had, or does not record its config.
        Otherwise the result is "unknown": another run may have made it.
        """
        made_by = run_record(manifest.context.get(OF_RUN))
        if made_by is not None and self.id is not None:
            return "own" if made_by["id"] == self.id else "other"
        config = manifest.context.get(IDENTITY)
        return "own" if config is None or config in self.configs else "unknown"

    def obstacle(self, configs: Collection[str | None], data: str | None) -> str | None:
        """Return why this directory may not continue a run with another id; None if it may.

        It may with the run's current config and data, and if no checkpoint here was made under an id of its own.

        Args:
            configs: Fingerprints of the other run's config.
            data: Fingerprint of its data, if known.
        """
        if self.config is None or self.config not in configs:
            return "its config differs from this run's"
        if self.data and data and self.data != data:
            return "its data differs from this run's"
        made_by = (run_record(manifest.context.get(OF_RUN)) for manifest in self._made_here())
        if any(record is not None and record["id"] == self.id for record in made_by):
            return "this run has checkpoints of its own"
        return None

    def keep(self) -> None:
        """Write the id into the records of this directory that have another one."""
        attempts = sorted(self.run.glob(f"attempts/*/{RUN_FILE}"))
        for path in (self.run / RUN_FILE, *attempts[-1:]):
            record = read_json_or_empty(path)
            if record and record.get(RUN_ID) != self.id:
                write_json(path, {**record, RUN_ID: self.id})

    def _made_here(self) -> Iterator[Manifest]:
        with suppress(OSError):
            for folder in checkpoint_folders(self.run / "checkpoints").values():
                with suppress(CheckpointError):
                    yield read_manifest(folder)


def run_identity(config: Config, data: str | None = None, run: Path | None = None) -> RunIdentity:
    """Return the identity of the run that a config names.

    Args:
        config: The resolved config.
        data: Fingerprint of its data.
        run: The run directory; the config's if None.
    """
    run = Path(run or config.run_directory).absolute()
    name = run.resolve().name  # also the name of its remote tier
    return RunIdentity(run, read_run_id(run), name, config.seed, fingerprint(identity(config)), data)


def new_run_id() -> str:
    """Make the id of a new run."""
    return secrets.token_hex(16)


def read_run_id(run: Path) -> str | None:
    """Return the id of the run in a directory; None if there is no record of it.

    If `run.json` is lost, the id comes from the claim, an earlier attempt's record, or a checkpoint made under this
    directory's name.
    """
    attempts = sorted(run.glob(f"attempts/*/{RUN_FILE}"), reverse=True)
    found = [read_json_or_empty(run / RUN_FILE).get(RUN_ID), read_json_or_empty(run / CLAIM_FILE).get("run")]
    found += [read_json_or_empty(path).get(RUN_ID) for path in attempts]
    for value in found:
        run_id = value.get("id") if isinstance(value, dict) else value
        if _is_id(run_id):
            return str(run_id)
    with suppress(OSError):
        for folder in reversed(checkpoint_folders(run / "checkpoints").values()):
            with suppress(CheckpointError):
                made_by = run_record(read_manifest(folder).context.get(OF_RUN))
                if made_by is not None and made_by["name"] == run.resolve().name:
                    return str(made_by["id"])
    return None


def run_record(value: Any) -> dict[str, Any] | None:
    """Parse the id, name and seed in a manifest or a claim; None if there is no id."""
    if not isinstance(value, Mapping) or not _is_id(value.get("id")):
        return None
    return {"id": value["id"], "name": str(value.get("name")), "seed": value.get("seed")}


def in_words(record: Mapping[str, Any]) -> str:
    """Describe a run: `run 'small' with seed 3 (id 0a1b2c3d)`."""
    return f"run '{record['name']}' with seed {record['seed']} (id {str(record['id'])[:8]})"


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _config_of(record: Mapping[str, Any]) -> str | None:
    fingerprints = record.get("fingerprints")
    found = fingerprints.get("config") if isinstance(fingerprints, dict) else None
    return found if isinstance(found, str) else None
