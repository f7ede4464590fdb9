"""Collection of results from logs, folders, launched runs, standard input, and what clusters keep of a job's output."""

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

from headway.core.console import warning
from headway.core.errors import ConfigError, DataError
from headway.core.files.foreign import parse_json, read_given_bytes
from headway.core.format import format_bytes
from headway.core.process.command import module_command
from headway.lab.bench.blocks import block, find_blocks
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
from headway.run.directory.run_directory import LAUNCH_FILE

#: Sources that are the output of a cluster's program, which gets the rest as its arguments.
_PROGRAMS = {"kubectl:": ("kubectl", "logs"), "ray:": ("ray", "job", "logs")}
#: Jobs of Slurm, whose logs are files.
_SLURM = "slurm:"
_PROGRAM_SECONDS = 120
_GZIP = b"\x1f\x8b"
_PIECE_BYTES = 4096
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
            has put aside; also what the launcher has of the log, if it is the directory of a launched run), `-` for
            standard input, `kubectl:` and `ray:` with the arguments of `kubectl logs` and `ray job logs`
            (`kubectl:pod/bench-0`, `kubectl:-n ml job/bench`), and `slurm:` with the number of a job.
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
    found.results = merge_results(found.results)
    merged = merge_results(every)
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
    scheme = source[: source.find(":") + 1]
    if scheme in _PROGRAMS:
        yield source, _printed([*_PROGRAMS[scheme], *_words(source, scheme)])
        return
    if scheme == _SLURM:
        yield from ((file, _lines(Path(file))) for file in _logs_of_slurm(source))
        return
    path = Path(source)
    if not path.exists():
        raise ConfigError(
            "there is no such file or folder",
            where=source,
            fix="give logs, folders, -, kubectl:pod/NAME, ray:JOB or slurm:JOB",
        )
    if (path / LAUNCH_FILE).is_file():
        yield from _launched(path)
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
    whole = list[bytes]()
    size = 0
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


def _launched(run: Path) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the log of a launched run as its launcher has it; the job may be gone, and its folder have the results."""
    try:
        yield f"log of {run}", _printed(module_command("headway", "launch", "logs", str(run)))
    except (ConfigError, DataError) as error:
        warning(f"only the files of {run} are read: {error.what}")


def _words(source: str, scheme: str) -> list[str]:
    try:
        return shlex.split(source.removeprefix(scheme))  # selectors contain blanks: -l 'app in (a, b)'
    except ValueError as error:
        raise ConfigError(f"no arguments of a command: {error}", where=source, fix="close quotes") from None


def _logs_of_slurm(source: str) -> list[str]:
    """Return the logs of a job of Slurm, of all parts of an array.

    `sacct` knows them since Slurm 24.05; before, `scontrol` does for some minutes after the end of a job.
    """
    job = source.removeprefix(_SLURM)
    options = ["--noheader", "--allocations", "--parsable2", "--expand-patterns", "--format=StdOut"]
    logs = list[str]()
    with suppress(DataError):
        logs = _printed(["sacct", *options, "--jobs", job])
    if not any(logs):
        lines = _printed(["scontrol", "show", "job", job])
        logs = [line.partition("=")[2] for line in lines if line.strip().startswith("StdOut=")]
    if not any(logs):
        raise DataError("Slurm does not know the log of this job", where=source, fix="name the log, or its folder")
    return list(dict.fromkeys(filter(None, logs)))


def _printed(command: Sequence[str]) -> list[str]:
    """Return what a program that shows a log prints."""
    name = command[0]
    where = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROGRAM_SECONDS, check=False)
    except OSError:
        raise ConfigError(f"there is no {name} here", where=where, fix="install it, or pipe logs in with -") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"{name} does not answer", where=where, fix="check the cluster") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise DataError(f"{name}: {said}", where=where, fix="check that the cluster still has the job")
    return done.stdout.decode(errors="replace").splitlines()
