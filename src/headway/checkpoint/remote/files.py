"""The files of a remote checkpoint: their names in the store, and the journal of finished uploads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from headway.checkpoint.format.manifest import MANIFEST, Manifest
from headway.checkpoint.format.sealing import SEALED
from headway.checkpoint.records import RECORDS, RECORDS_FILE
from headway.checkpoint.remote.objects import Objects
from headway.core.files.foreign import read_json_lines
from headway.core.files.hashes import fingerprint

#: Key of a manifest's context: the digits before the names of its files, if machines without a common disk sent them.
SENT_AS = "sent_as"
_DIGITS = re.compile(r"[0-9a-f]{16}")


def sent_name(manifest: Manifest, file: str) -> str:
    """Return the name of a file in the store: `<16 hexadecimal digits>-<its name>`.

    The digits are unique to the checkpoint. So a fenced process whose upload of the same step finishes late cannot
    overwrite a file of the checkpoint that was published meanwhile. The digits follow from the manifest alone. Hashes
    of the files alone would let the operator of a store test guesses about the content of encrypted files. If several
    machines sent the files, the digits belong to the save.
    """
    digits = manifest.context.get(SENT_AS)
    if isinstance(digits, str) and _DIGITS.fullmatch(digits):
        return f"{digits}-{file}"
    files = {name: entry.hash for name, entry in manifest.files.items()}
    return f"{fingerprint([manifest.state_sha256, manifest.context, files])[:16]}-{file}"


def name_there(folder: Objects, manifest: Manifest, file: str) -> str:
    """Return the actual name of a file in the store.

    It is the plain file name if the checkpoint was copied there by hand, or uploaded by a version without the digits.
    """
    sent = sent_name(manifest, file)
    return sent if folder.stat(sent) is not None else file


def names_there(manifest: Manifest) -> set[str]:
    """Return all names that files of a remote checkpoint may have."""
    return {name for file in _files(manifest) for name in (sent_name(manifest, file), file)}


def unexpected_objects(names: Iterable[str], manifest: Manifest) -> list[str]:
    """Return the objects in the folder of an uploaded checkpoint that do not belong to it."""
    own = {sent_name(manifest, file).removesuffix(SEALED) for file in _files(manifest)} | {MANIFEST}
    return [name for name in names if name.removesuffix(SEALED) not in own]


def _files(manifest: Manifest) -> list[str]:
    """Return the files of a remote checkpoint, the archive of its records among them."""
    return [*manifest.files, *([RECORDS_FILE] if RECORDS in manifest.context else [])]


class Journal:
    """The journal of one checkpoint's upload: a line per finished file, with its version, flushed to disk."""

    def __init__(self, path: Path, url: str, state_sha256: str) -> None:
        self._path = path
        self._head = {"url": url, "state_sha256": state_sha256}
        lines = list(read_json_lines(path))
        self._sent = {line["file"]: line for line in lines[1:] if "file" in line}
        if not lines or lines[0] != self._head:
            self._sent = {}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._head) + "\n", encoding="utf-8")

    def version_of(self, file: str, sha256: str) -> str | None:
        """Return the version of an uploaded file; None if it was not uploaded with this content."""
        line = self._sent.get(file)
        return str(line["version"]) if line is not None and line.get("sha256") == sha256 else None

    def note(self, file: str, sha256: str, version: str) -> None:
        """Record a finished file."""
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"file": file, "sha256": sha256, "version": version}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
