"""Collection of results from logs, folders, standard input, and `kubectl logs`."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.errors import ConfigError, DataError
from headway.core.files.foreign import parse_json, read_given_bytes
from headway.core.format import format_bytes
from headway.lab.bench.blocks import find_blocks
from headway.lab.bench.results import (
    CELLS,
    DISCARDED,
    EARLIER,
    CellResult,
    merge_results,
    parse_result,
    read_results,
    write_result,
)

KUBECTL = "kubectl:"
_KUBECTL_SECONDS = 120
_GZIP, _PIECE_BYTES = b"\x1f\x8b", 4096
#: The largest amount read from one log, packed and unpacked.
_LOG_BYTES = 256 * 2**20


@dataclass
class Collected:
    """The results of a collection."""

    results: list[CellResult]
    broken: list[str] = field(default_factory=list)
    """Incomplete blocks, by source."""
    sources: int = 0
    """Number of sources that were read."""
    replaced: int = 0
    """Successful repeats that newer ones of the same cell and number have replaced."""


def collect(sources: Sequence[str], folder: Path) -> Collected:
    """Read results, merge repeats of the same cell, and write them into a folder.

    Args:
        sources: Files (also .gz), result JSON files, folders (all their files, except those that a folder of results
            has put aside), `-` for standard input, and `kubectl:` with the arguments of `kubectl logs`:
            `kubectl:pod/bench-0`, `kubectl:-n ml job/bench`.
        folder: Results that exist there stay, except repeats that are found in a newer form.

    Raises:
        ConfigError: a source does not exist.
        DataError: a block holds something other than a result of this version.
    """
    found = Collected([])
    for source in sources:
        for where, lines in _opened(source):
            found.sources += 1
            blocks = find_blocks(lines)
            found.results += [parse_result(value, where) for value in blocks.values]
            found.broken += [f"{where}: block {name[:12]}" for name in blocks.broken]
    every = [*read_results(folder), *found.results]
    found.results, merged = merge_results(found.results), merge_results(every)
    for result in merged:
        write_result(folder, result)
    found.replaced = len(_measured(every) - _measured(merged))
    return found


def _measured(results: Iterable[CellResult]) -> set[tuple[str, int, float]]:
    """Return the successful repeats, each once even if it was reported several times."""
    return {
        (result.key, repeat.number, repeat.started)
        for result in results
        for repeat in result.repeats
        if repeat.measured is not None
    }


def _opened(source: str) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield every log of a source."""
    if source == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # the encoding of files, whatever the locale
        yield "standard input", sys.stdin
        return
    if source.startswith(KUBECTL):
        yield source, _kubectl(source.removeprefix(KUBECTL))
        return
    path = Path(source)
    if not path.exists():
        raise ConfigError(
            "there is no such file or folder", where=source, fix="give logs, folders, - or kubectl:pod/NAME"
        )
    for file in sorted(_files(path)) if path.is_dir() else [path]:
        yield str(file), _lines(file)


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files except those that a folder of results has put aside, which its report omits, too."""
    for root, folders, names in os.walk(folder):
        if CELLS in folders:
            folders[:] = [name for name in folders if name not in (EARLIER, DISCARDED)]
        yield from (path for name in names if (path := Path(root, name)).is_file())


def _lines(file: Path) -> list[str]:
    """Yield the lines of a log; for a result file, the lines that would have been printed for it."""
    from headway.lab.bench.blocks import block

    try:
        data = read_given_bytes(file, _LOG_BYTES)
    except OSError as error:
        raise DataError(f"the log cannot be read: {error.strerror}", where=str(file), fix="check the file") from None
    if file.suffix == ".gz":
        data = _unpacked(data, str(file))
    text = data.decode(errors="replace")
    if file.name.endswith((".json", ".json.gz")):
        try:
            value = parse_json(text)
        except ValueError:
            return text.splitlines()
        if isinstance(value, dict) and {"schema_version", "cell", "repeats"} <= value.keys():
            return block(value).splitlines()
    return text.splitlines()


def _unpacked(data: bytes, where: str) -> bytes:
    """Yield the content of a gzipped log up to its end or to damage; other content unchanged.

    A pod that vanished leaves half a file, which may contain complete results.
    """
    whole, size = list[bytes](), 0
    while data.startswith(_GZIP):
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        with suppress(zlib.error):
            for start in range(0, len(data), _PIECE_BYTES):  # an error loses only its own piece
                whole.append(member.decompress(data[start : start + _PIECE_BYTES]))
                size += len(whole[-1])
                if size > _LOG_BYTES:
                    fix = "cut it in several"
                    raise DataError(f"the log has more than {format_bytes(_LOG_BYTES)}", where=where, fix=fix)
        data = member.unused_data if member.eof else b""
    return b"".join([*whole, data])


def _kubectl(arguments: str) -> list[str]:
    """Return the output of `kubectl logs`."""
    try:
        command = ["kubectl", "logs", *shlex.split(arguments)]  # selectors contain blanks: -l 'app in (a, b)'
    except ValueError as error:
        raise ConfigError(f"no arguments of kubectl: {error}", where=KUBECTL + arguments, fix="close quotes") from None
    try:
        done = subprocess.run(command, capture_output=True, timeout=_KUBECTL_SECONDS, check=False)
    except OSError:
        raise ConfigError("there is no kubectl here", where=KUBECTL, fix="install it, or pipe logs in with -") from None
    except subprocess.TimeoutExpired:
        raise DataError("kubectl does not answer", where=" ".join(command), fix="check the cluster") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise DataError(f"kubectl: {said}", where=" ".join(command), fix="check pod and namespace")
    return done.stdout.decode(errors="replace").splitlines()
