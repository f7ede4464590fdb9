"""The results of a unit's pieces, collected in input order and recorded when all are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.core.files.atomic import atomic_write
from headway.text.dedup import join_prints
from headway.text.preparing.pieces import SPLITS, PieceResult, Recipe
from headway.text.preparing.records import Records, Shards, Survey
from headway.text.preparing.shards import ShardWriter

if TYPE_CHECKING:
    from headway.text.dedup import DocumentPrints

#: Files of a survey for the search for duplicates: fingerprints, and a mask of the documents that passed the cleaning.
PRINTS = "prints"
KEPT = "kept.npy"


def search_files(recipe: Recipe) -> list[str]:
    """Return the suffixes of a survey's files for the search for duplicates."""
    if recipe.fingerprints is None:
        return []
    return [PRINTS, KEPT] if any(recipe.clean) else [PRINTS]


class UnitCollector:
    """Collects the results of a unit's pieces, and records them.

    Args:
        records: Where they are recorded.
        recipe: The settings that all pieces share.
        name: Name of the unit's source.
        key: The key of the unit's survey; None if the unit has been surveyed before.
        shards_key: The key of its shards; None if it is only surveyed.

    Attributes:
        survey: The outcome of reading so far.
        shards: The unit's contribution to the store so far.
    """

    def __init__(self, records: Records, recipe: Recipe, name: str, key: str | None, shards_key: str | None) -> None:
        self._records = records
        self._recipe = recipe
        self._name = name
        self._key = key
        self._shards_key = shards_key
        self._kept: list[NDArray[np.bool_]] = []
        self._prints: list[DocumentPrints] = []
        self._writers: dict[str, ShardWriter] = {}
        self.survey = Survey()
        self.shards = Shards()
        if shards_key:
            self._writers = {split: ShardWriter(records.folder / split / name, shards_key) for split in SPLITS}

    def add(self, result: PieceResult) -> None:
        """Add the result of the next piece.

        Raises:
            DataError: The piece could not be processed, or has a malformed document that is not skipped.
            OSError: The files cannot be written, for example because the disk is full.
        """
        if result.error is not None:
            raise result.error
        if self._key is not None:
            if result.failed is not None:
                raise result.failed.error(result.also_failed)
            self.survey.add(result)
            if result.kept is not None:
                self._kept.append(result.kept)
            if result.prints is not None:
                self._prints.append(result.prints)
        self.shards.add(result)
        for split, part in result.splits.items():
            if len(part.lengths):
                self._writers[split].write(part.tokens, np.cumsum(part.lengths), part.trained)

    def finish(self) -> None:
        """Record the unit.

        Raises:
            OSError: The files cannot be written, for example because the disk is full.
        """
        if self._key is not None:
            self._records.save_survey(self._key, self.survey, self._save_for_search(self._key))
        if self._shards_key:
            for split, writer in self._writers.items():
                entry = writer.finish()
                if entry is not None:
                    self.shards.splits[split] = entry
            self._records.save_shards(self._shards_key, self.shards, self._name)

    def abandon(self) -> None:
        """Remove incomplete shards."""
        for writer in self._writers.values():
            writer.abandon()

    def _save_for_search(self, key: str) -> list[str]:
        """Save the data that the search for duplicates needs, and return the suffixes of its files."""
        names = search_files(self._recipe)
        if self._recipe.fingerprints is not None:
            join_prints(self._prints, self._recipe.fingerprints).save(self._records.new_file(key, PRINTS))
        if KEPT in names:
            with atomic_write(self._records.new_file(key, KEPT)) as file:
                np.save(file, np.concatenate([np.empty(0, dtype=bool), *self._kept]), allow_pickle=False)
        return names
