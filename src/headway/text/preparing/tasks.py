"""Units of input that another machine processes: what it is sent, and what it does with it.

A task reads the same input, records the same results under the same keys as a worker of this machine, and so leaves the
same bytes. It works in a folder of its own; only complete results move on, whole, the records last.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import unicodedata
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import DataError, HeadwayError, error_with
from headway.core.version import __version__
from headway.text.preparing.collecting import UnitCollector
from headway.text.preparing.inputs import InputHashes, files_of
from headway.text.preparing.pieces import Bits, PieceResult, Recipe, Verdict, Work
from headway.text.preparing.records import WORK, Records
from headway.text.preparing.units import Unit
from headway.text.preparing.workers import Pipeline, pipeline
from headway.text.reading.pieces import Piece
from headway.text.reading.places import SourceFile


@dataclass(frozen=True)
class Order:
    """What all tasks share."""

    recipe: Recipe
    folder: Path
    """The folder in which the results are recorded, as the machine that prepares has it."""
    width: int
    """Bytes of a token."""
    most: int
    """`data.max_document_bytes`."""
    code: tuple[str, ...]
    """Versions of everything that decides bytes besides the input."""

    @classmethod
    def of(cls, recipe: Recipe, records: Records) -> Order:
        """Return the order for results that are recorded here."""
        folder = records.folder.absolute()
        if recipe.tokenizer is not None:
            recipe = replace(recipe, tokenizer=recipe.tokenizer.absolute())
        return cls(recipe, folder, records.width, records.most, _code())

    def to_json(self) -> dict[str, Any]:
        """Return the order as JSON. It holds no credentials: a config has none."""
        from pydantic import TypeAdapter

        recipe = TypeAdapter(Recipe).dump_python(self.recipe, mode="json")
        limits = {"width": self.width, "most": self.most}
        return {"recipe": recipe, "folder": str(self.folder), **limits, "code": list(self.code)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Order:
        """Return the order that `to_json` has written."""
        from pydantic import TypeAdapter

        recipe = TypeAdapter(Recipe).validate_python(value["recipe"])
        return cls(recipe, Path(value["folder"]), value["width"], value["most"], tuple(value["code"]))


@dataclass(frozen=True)
class UnitTask:
    """A unit for another machine."""

    name: str
    """Name of its source."""
    key: str | None
    """The key of its survey; None if it has been surveyed."""
    shards_key: str | None
    """The key of its shards; None if it is only surveyed."""
    pieces: tuple[Piece, ...]
    inputs: list[dict[str, Any]]
    """The description of its input (`InputHashes.of`), which the other machine must find there."""
    verdicts: tuple[Verdict, ...] = ()
    """Per piece, the documents that remain after the search for duplicates."""

    @property
    def record(self) -> str:
        """The file, relative to the store's folder, whose presence says that the unit is complete."""
        return f"{WORK}/{self.shards_key}.shards.json" if self.shards_key else f"{WORK}/{self.key}.survey.json"

    def to_json(self) -> dict[str, Any]:
        """Return the task as JSON."""
        pieces = [[p.source, asdict(p.file), p.field, p.span, p.bytes, p.template, p.most] for p in self.pieces]
        verdicts = [
            [
                _packed(verdict.keep),
                None if verdict.paragraphs is None else _packed(verdict.paragraphs),
                None if verdict.paragraph_counts is None else verdict.paragraph_counts.tolist(),
            ]
            for verdict in self.verdicts
        ]
        names = {"name": self.name, "key": self.key, "shards_key": self.shards_key, "inputs": self.inputs}
        return {**names, "pieces": pieces, "verdicts": verdicts}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> UnitTask:
        """Return the task that `to_json` has written."""
        pieces = tuple(
            Piece(source, SourceFile(**file), field, span and tuple(span), size, template, most=most)
            for source, file, field, span, size, template, most in value.pop("pieces")
        )
        verdicts = tuple(
            Verdict(
                _unpacked(keep),
                None if paragraphs is None else _unpacked(paragraphs),
                None if counts is None else np.array(counts, dtype=np.int64),
            )
            for keep, paragraphs, counts in value.pop("verdicts")
        )
        return cls(pieces=pieces, verdicts=verdicts, **value)


def process(
    order: Order, tasks: Iterable[UnitTask], scratch: Path, deliver: Callable[[Path], None], *, workers: int = 1
) -> None:
    """Process units on this machine.

    Args:
        order: What they share.
        tasks: The units.
        scratch: A folder on the file system of the results; complete ones lie in a folder of their own in it.
        deliver: Called with that folder, which is then removed.
        workers: Number of pieces to process at a time.

    Raises:
        ConfigError: A package is not installed here.
        DataError: This machine has another version, the input differs here, or a unit cannot be processed.
        OSError: The results cannot be written.
    """
    if order.code != _code():
        raise DataError(
            f"this machine has {_named(_code())}, the one that prepares {_named(order.code)}",
            where=socket.gethostname(),
            fix="install the same versions on all machines",
        )
    with pipeline(order.recipe, workers) as line:
        for task in tasks:
            _TaskRun(order, task, Path(tempfile.mkdtemp(dir=scratch)), deliver).submit(line)
        line.drain()


class _TaskRun:
    """A unit on its way through the workers of this machine."""

    def __init__(self, order: Order, task: UnitTask, folder: Path, deliver: Callable[[Path], None]) -> None:
        self._task = task
        self._folder = folder
        self._deliver = deliver
        self._files = files_of(Unit(0, task.pieces))
        self._hashes = InputHashes()
        self._left = len(task.pieces)
        records = Records(folder, folder, order.width, order.most, fresh=True)
        self._collector = UnitCollector(records, order.recipe, task.name, task.key, task.shards_key)

    def submit(self, line: Pipeline) -> None:
        self._check_input()
        verdicts = iter(self._task.verdicts)
        for piece in self._task.pieces:
            line.submit(Work(piece, verdict=next(verdicts, None)), self._accept)

    def _accept(self, result: PieceResult) -> None:
        self._collector.add(result)
        self._left -= 1
        if not self._left:
            self._check_unchanged()
            self._collector.finish()
            self._deliver(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _check_input(self) -> None:
        """Check that this machine has the input that the unit's key stands for."""
        fix = "every machine needs the same input under the same path: in a shared folder, or behind a URL"
        try:
            self._check_unchanged()
            found = self._hashes.of(Unit(0, self._task.pieces))
        except DataError as error:
            where = f"{error.where} on {socket.gethostname()}"
            raise DataError(error.what, where=where, fix=fix) from error
        if found != self._task.inputs:
            where = f"{self._files[0].location} on {socket.gethostname()}"
            raise DataError("an input file differs from that of the machine that prepares", where=where, fix=fix)

    def _check_unchanged(self) -> None:
        for file in self._files:
            self._hashes.check_unchanged(file)


def result_files(folder: Path) -> list[str]:
    """Return the results in a folder that `process` delivers, relative to it, in the order in which they may appear."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    # A record says that its files are complete; that of the shards, that all is.
    return sorted(names, key=lambda name: (name.endswith(".shards.json"), name.endswith(".survey.json"), name))


def error_json(error: HeadwayError) -> dict[str, Any]:
    """Return an error as JSON; errors are redacted already."""
    return {"exit_code": error.exit_code, "what": error.what, "where": error.where, "fix": error.fix}


def error_from_json(value: dict[str, Any]) -> HeadwayError:
    """Return the error that `error_json` has described."""
    kind = error_with(int(value["exit_code"])) or HeadwayError
    return kind(str(value["what"]), where=value["where"], fix=value["fix"])


def _code() -> tuple[str, ...]:
    return __version__, unicodedata.unidata_version


def _named(code: Sequence[str]) -> str:
    return "Headway {} with Unicode {}".format(*code)


def _packed(bits: Bits) -> list[Any]:
    return [len(bits), b64encode(np.packbits(bits).tobytes()).decode()]


def _unpacked(value: list[Any]) -> Bits:
    count, text = value
    return np.unpackbits(np.frombuffer(b64decode(text), dtype=np.uint8), count=count).astype(bool)
