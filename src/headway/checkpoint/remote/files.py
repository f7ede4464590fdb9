"""The files of a remote checkpoint: what they are called there, and which of them have arrived."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from headway.checkpoint.format.manifest import MANIFEST, Manifest
from headway.checkpoint.format.sealing import SEALED
from headway.checkpoint.remote.objects import Objects
from headway.core.files import fingerprint
from headway.core.foreign import read_json_lines


def sent_name(manifest: Manifest, file: str) -> str:
    """What a file is called where it is sent to: `<16 hexadecimal digits>-<its name>`.

    The digits belong to this one checkpoint, so that a process that has lost the run, and whose upload of the same step
    ends at last, cannot write over a file of the one that was published meanwhile. They follow from nothing but what
    the manifest says. Hashes of the files alone would let a store that holds encrypted ones try what is in them.
    """
    files = {name: entry.hash for name, entry in manifest.files.items()}
    return f"{fingerprint([manifest.state_sha256, manifest.context, files])[:16]}-{file}"


def name_there(folder: Objects, manifest: Manifest, file: str) -> str:
    """What a file of a remote checkpoint is called: its own name, where the checkpoint was copied there by hand or sent
    before files had names of their own there."""
    sent = sent_name(manifest, file)
    return sent if folder.facts(sent) is not None else file


def names_there(manifest: Manifest) -> set[str]:
    """All that files of a remote checkpoint may be called."""
    return {name for file in manifest.files for name in (sent_name(manifest, file), file)}


def unexpected_objects(names: Iterable[str], manifest: Manifest) -> list[str]:
    """Of what lies in the folder of a checkpoint that was sent, the files that are not its own."""
    own = {sent_name(manifest, file).removesuffix(SEALED) for file in manifest.files} | {MANIFEST}
    return [name for name in names if name.removesuffix(SEALED) not in own]


class Journal:
    """What has been sent of one checkpoint, and as which version: a line per file, each on disk when it counts."""

    def __init__(self, path: Path, url: str, state_sha256: str) -> None:
        self._path, self._head = path, {"url": url, "state_sha256": state_sha256}
        lines = list(read_json_lines(path))
        self._sent = {line["file"]: line for line in lines[1:] if "file" in line}
        if not lines or lines[0] != self._head:
            self._sent = {}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._head) + "\n", encoding="utf-8")

    def version_of(self, file: str, sha256: str) -> str | None:
        """The version that was sent; None when it was not, or with another content."""
        line = self._sent.get(file)
        return str(line["version"]) if line is not None and line.get("sha256") == sha256 else None

    def note(self, file: str, sha256: str, version: str) -> None:
        """A file has arrived."""
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"file": file, "sha256": sha256, "version": version}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
