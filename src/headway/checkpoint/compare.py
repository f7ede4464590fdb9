"""Comparison of two checkpoints, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.format.folders import checkpoint_folders
from headway.checkpoint.format.manifest import Manifest, TensorEntry, read_manifest
from headway.checkpoint.format.reading import read_tensors
from headway.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two checkpoints."""

    name: str
    what: str
    """`only in the first`, `only in the second`, `shape`, `dtype` or `values`."""
    elements: int | None = None
    """Number of elements that differ; None if they were not compared."""
    largest_absolute: float | None = None
    """Largest absolute difference; NaN against a number counts as infinite, NaN against NaN as equal."""
    largest_relative: float | None = None
    """Largest difference relative to the larger magnitude of the two."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two checkpoints."""

    first: Manifest
    second: Manifest
    differences: tuple[TensorDifference, ...]
    equal_tensors: int

    @property
    def same_state(self) -> bool:
        """Whether tensors and cursor are equal."""
        return self.first.state_sha256 == self.second.state_sha256

    @property
    def cursor_differences(self) -> dict[str, tuple[int | None, int | None]]:
        """The cursor values that differ, by key."""
        a = self.first.cursor
        b = self.second.cursor
        return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def compare(first: Path, second: Path, values: bool = False) -> Comparison:
    """Compare two checkpoint folders by the hashes in their manifests, independent of files and numbers of workers.

    Args:
        first: A checkpoint folder.
        second: Another one.
        values: Whether to read the tensors that differ, and measure by how much.

    Raises:
        CheckpointError: A manifest or, for values, a file cannot be read.
    """
    a = _manifest_in(first)
    b = _manifest_in(second)
    found = [_difference(name, a.tensors.get(name), b.tensors.get(name)) for name in sorted({*a.tensors, *b.tensors})]
    differences = [difference for difference in found if difference is not None]
    if values and any(difference.what == "values" for difference in differences):
        one = read_tensors(first, a)
        other = read_tensors(second, b)
        differences = [_measured(d, one, other) if d.what == "values" else d for d in differences]
    return Comparison(a, b, tuple(differences), len(found) - len(differences))


def _manifest_in(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; raise an error for a run, which has several."""
    inside = list(checkpoint_folders(folder / "checkpoints").values())
    if inside:
        fix = f"give one of its checkpoints, for example {inside[-1]}"
        raise CheckpointError("this is a run, not a checkpoint", where=str(folder), fix=fix)
    return read_manifest(folder)


def _difference(name: str, a: TensorEntry | None, b: TensorEntry | None) -> TensorDifference | None:
    if a is None or b is None:
        return TensorDifference(name, "only in the second" if a is None else "only in the first")
    if a.shape != b.shape:
        return TensorDifference(name, "shape")
    if a.dtype != b.dtype:
        return TensorDifference(name, "dtype")
    return None if a.sha256 == b.sha256 else TensorDifference(name, "values")


def _measured(
    found: TensorDifference, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> TensorDifference:
    import torch

    a, b = (side[found.name].to(torch.float64).reshape(-1) for side in (first, second))
    # Bits may differ where values are equal: -0 and 0, and different NaNs.
    apart = (a != b) & ~(a.isnan() & b.isnan())
    gap = (a - b).abs()[apart].nan_to_num(nan=float("inf"))
    scale = torch.maximum(a.abs(), b.abs())[apart]
    relative = (gap / scale).nan_to_num(nan=float("inf"))
    return TensorDifference(
        found.name,
        found.what,
        int(apart.sum()),
        float(gap.max()) if gap.numel() else 0.0,
        float(relative.max()) if gap.numel() else 0.0,
    )
