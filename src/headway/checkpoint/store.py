"""All checkpoints of a run: save, find the newest that verifies, load, keep a few.

A save becomes visible by one rename of a complete, flushed folder. Whatever kills it, on whichever line, leaves the
checkpoints that were there before, plus at most a hidden folder that the next save clears away.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format import (
    MANIFEST,
    FileEntry,
    Manifest,
    Slice,
    TensorEntry,
    read_manifest,
    state_hash,
    step_name,
    step_of,
)
from headway.checkpoint.shards import dtype_name, plan_shards, read_tensors, write_shard
from headway.checkpoint.verify import Verification, verify_checkpoint
from headway.core import console
from headway.core.cores import usable_cores
from headway.core.errors import CheckpointError
from headway.core.faults import fault_point
from headway.core.files import sync_folder
from headway.core.format import format_bytes

if TYPE_CHECKING:
    import torch

    from headway.core.types import StateBlocks, StateTensors

#: A save in progress, or a checkpoint on its way out. Nobody reads these.
_TEMPORARY = ".tmp-"
#: A checkpoint that steps aside while another of the same step takes its place. It counts as long as that is not there.
_REPLACED = ".replaced-"


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint, as its manifest tells."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.manifest.step

    @property
    def cursor(self) -> dict[str, int]:
        """Where the run is."""
        return self.manifest.cursor

    @property
    def context(self) -> dict[str, Any]:
        """What the state belongs to and how it came about."""
        return self.manifest.context

    @property
    def state_sha256(self) -> str:
        """The name of the state."""
        return self.manifest.state_sha256


class CheckpointStore:
    """The `checkpoints` folder of a run. It needs not exist before the first save.

    Args:
        directory: The folder.
        keep: Newest checkpoints that survive a save.
        may_write: Called right before a save becomes visible; raises when this process no longer owns the run.
        max_shard_bytes: Size of a file, roughly; a larger tensor gets a file of its own.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 3,
        may_write: Callable[[], None] = lambda: None,
        max_shard_bytes: int = 2 * 1024**3,
    ) -> None:
        if keep < 1:
            raise ValueError("at least one checkpoint must be kept")
        self.directory, self.keep = Path(directory), keep
        self._may_write, self._max_shard_bytes = may_write, max_shard_bytes

    # Reading

    def folders(self) -> Sequence[Path]:
        """The folders that claim to be checkpoints, by rising step.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        try:
            names = [path.name for path in self.directory.iterdir()] if self.directory.exists() else []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be looked for: {error.strerror}", where=str(self.directory), fix="make it readable"
            ) from error
        found = {step: name for name in names if (step := step_of(name)) is not None}
        # A replacement that was killed between its two renames.
        aside = {step: name for name in names if (step := step_of(name.removeprefix(_REPLACED))) is not None}
        return [self.directory / name for _, name in sorted({**aside, **found}.items())]

    def list(self) -> Sequence[CheckpointInfo]:
        """The checkpoints whose manifest can be read, by rising step; their bytes are not looked at."""
        infos = []
        for folder in self.folders():
            try:
                infos.append(CheckpointInfo(folder, read_manifest(folder)))
            except CheckpointError:
                continue
        return infos

    def info(self, step: int) -> CheckpointInfo:
        """The checkpoint of one step; its bytes are not looked at.

        Raises:
            CheckpointError: there is none, or its manifest cannot be trusted.
        """
        folder = self._folder(step)
        if not folder.exists():
            there = ", ".join(f"{info.step}" for info in self.list())
            raise CheckpointError(
                f"there is no checkpoint of step {step}",
                where=str(self.directory),
                fix=f"take one that is there: {there or 'none'}",
            )
        return CheckpointInfo(folder, read_manifest(folder))

    def verify(
        self, checkpoint: int | Path, full: bool = True, advance: Callable[[int], None] = lambda _: None
    ) -> Verification:
        """Compare one checkpoint, by step or path, with its manifest; damage is reported, not raised.

        `full` hashes every file and every tensor; without it only names, sizes and headers are looked at. `advance` is
        called with numbers of bytes that are done.
        """
        path = checkpoint if isinstance(checkpoint, Path) else self._folder(checkpoint)
        return verify_checkpoint(path, hashes=full, tensors=full, advance=advance)

    def newest(self, notice: Callable[[str], None] = console.warning) -> CheckpointInfo | None:
        """The newest checkpoint that verifies, every file's hash included; None when there never was one.

        Args:
            notice: Told about every newer one that is passed over, and why.

        Raises:
            CheckpointError: there are checkpoints, and none verifies.
        """
        folders = self.folders()
        for folder in reversed(folders):
            found = verify_checkpoint(folder)
            if found.good and found.manifest is not None:
                return CheckpointInfo(folder, found.manifest)
            notice(f"passing over {folder}: {'; '.join(map(str, found.damage))}")
        if folders:
            raise CheckpointError(
                f"none of the {len(folders)} checkpoints verifies",
                where=str(self.directory),
                fix="restore one from a copy, or start a new run under another name",
            )
        return None

    def load(self, info: CheckpointInfo) -> StateTensors:
        """Its tensors on the CPU, mapped: bytes are read when they are touched.

        Raises:
            CheckpointError: the files do not hold the names, dtypes and shapes of the manifest.
        """
        return read_tensors(info.path, info.manifest)

    def load_into(
        self, info: CheckpointInfo, blocks: StateBlocks, gather: Callable[[Any], Sequence[Any]] = lambda said: [said]
    ) -> None:
        """Copy what a worker needs of a checkpoint into its part of the state, on whatever device that is.

        Only that is read. The parts may be cut in another way than when the checkpoint was made.

        Args:
            blocks: The parts of this worker.
            gather: Gives what every worker says; all of them load together.

        Raises:
            CheckpointError: the names, shapes or dtypes of all parts together differ from the checkpoint's; nothing has
                been copied then.
        """
        import torch

        here: dict[str, Any] = {}
        for worker in gather({n: (dtype_name(n, b.local), b.shape) for n, b in blocks.items()}):
            here |= worker
        _refuse_differences(info, here)
        saved = self.load(info)
        with torch.no_grad():
            for name, block in blocks.items():
                block.local.copy_(block.of(saved[name]))

    def _folder(self, step: int) -> Path:
        aside = self.directory / (_REPLACED + step_name(step))
        folder = self.directory / step_name(step)
        return aside if aside.exists() and not folder.exists() else folder

    # Writing

    def save(self, step: int, tensors: StateTensors, cursor: Mapping[str, int], context: Mapping[str, Any]) -> Manifest:
        """Write a checkpoint, make it visible, and remove those that are too old.

        A good checkpoint of the same step and state is left as it is. One of another state, or a damaged one, is
        replaced.

        Args:
            step: Finished steps.
            tensors: The state; must not change meanwhile.
            cursor: Where the run is.
            context: What the state belongs to, as JSON values; the time is added.

        Raises:
            CheckpointError: it cannot be written, or `may_write` forbids it. Earlier checkpoints are intact.
        """
        temporary = self.directory / f"{_TEMPORARY}{step_name(step)}-{os.getpid()}"
        self._may_write()  # or a process that lost the run would clear away the save of the one that has it
        try:
            if not self.directory.exists():
                self.directory.mkdir(parents=True)
                sync_folder(self.directory.parent)
            self._clear_leftovers()
            written = self._write(temporary, step, tensors, dict(cursor), {**context, "time": time.time()})
            manifest = self._publish(temporary, written)
        except OSError as error:
            _remove(temporary)
            raise self._cannot_write(step, tensors, error) from error
        except BaseException:
            _remove(temporary)
            raise
        self._prune(step)
        return manifest

    def _write(
        self,
        folder: Path,
        step: int,
        tensors: StateTensors,
        cursor: dict[str, int],
        context: dict[str, Any],
    ) -> Manifest:
        """A complete checkpoint under a name that nobody reads: tensors first, the manifest last, all flushed."""
        folder.mkdir()
        shards = {f"shard-{i:05d}.safetensors": s for i, s in enumerate(plan_shards(tensors, self._max_shard_bytes))}
        # Hashing and writing let go of the interpreter's lock; more threads than this only wait for the disk.
        with ThreadPoolExecutor(min(4, usable_cores())) as pool:
            written = pool.map(lambda s: write_shard(folder / s[0], {n: tensors[n] for n in s[1]}), shards.items())
            files: dict[str, FileEntry] = {}
            entries: dict[str, TensorEntry] = {}
            for (name, members), (files[name], hashes) in zip(shards.items(), written, strict=True):
                entries |= {member: _entry(name, member, tensors[member], hashes[member]) for member in members}
        manifest = Manifest(
            step=step,
            cursor=cursor,
            context=context,
            state_sha256=state_hash(entries, cursor),
            files=files,
            tensors=entries,
        )
        fault_point("checkpoint.manifest")
        with (folder / MANIFEST).open("wb") as file:
            file.write(manifest.render())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
        return manifest

    def _publish(self, temporary: Path, manifest: Manifest) -> Manifest:
        """Give a complete folder its name; returns the manifest that is there afterwards."""
        target = self.directory / step_name(manifest.step)
        aside = self.directory / (_REPLACED + target.name)
        occupied = os.path.lexists(target)
        if occupied:
            there = verify_checkpoint(target)
            if there.good and there.manifest and there.manifest.state_sha256 == manifest.state_sha256:
                _remove(temporary)
                return there.manifest
            why = "; ".join(map(str, there.damage)) or "it holds another state"
            console.warning(f"replacing {target}: {why}")
        fault_point("checkpoint.rename")
        self._may_write()
        if occupied:
            target.rename(aside)
            fault_point("checkpoint.replace")
        temporary.rename(target)
        sync_folder(self.directory)
        return manifest

    def _clear_leftovers(self) -> None:
        """Remove what killed saves have left, and put back a checkpoint that a killed replacement has put aside."""
        for path in self.directory.glob(f"{_TEMPORARY}*"):
            _remove(path)
        for path in self.directory.glob(f"{_REPLACED}*"):
            name = self.directory / path.name.removeprefix(_REPLACED)
            if os.path.lexists(name):
                self._discard(path)
            else:
                path.rename(name)

    def _prune(self, saved: int) -> None:
        """Remove all but the newest `keep` checkpoints up to the one just saved, which is good and so among them.

        Folders of later steps were passed over when the run resumed; they are evidence, and their turn comes when the
        run gets there.
        """
        folders = [folder for folder in self.folders() if (step_of(folder.name) or 0) <= saved]
        for folder in (*self.directory.glob(f"{_REPLACED}*"), *folders[: -self.keep]):
            try:
                fault_point("checkpoint.prune")
                self._discard(folder)
            except OSError as error:
                console.warning(f"the old checkpoint {folder} cannot be removed: {error.strerror}")

    def _discard(self, folder: Path) -> None:
        """Remove a checkpoint, out of sight first, so that a kill never leaves half of one to be found."""
        hidden = self.directory / f"{_TEMPORARY}discarded-{folder.name}"
        _remove(hidden)
        folder.rename(hidden)
        fault_point("checkpoint.discard")
        _remove(hidden)

    def _cannot_write(self, step: int, tensors: StateTensors, error: OSError) -> CheckpointError:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        try:
            free = format_bytes(shutil.disk_usage(self.directory).free)
        except OSError:
            free = "an unknown amount"
        intact = [info.step for info in self.list()]
        kept = f"; the checkpoint of step {intact[-1]} is untouched" if intact else ""
        return CheckpointError(
            f"the checkpoint of step {step} cannot be written: {error.strerror or error}{kept}",
            where=f"{self.directory} ({format_bytes(needed)} needed, {free} free)",
            fix="make room there or mend the disk, then run the same command again",
        )


def _entry(file: str, name: str, tensor: torch.Tensor, sha256: str) -> TensorEntry:
    """A tensor that lies in one file in one piece."""
    shape = tuple(tensor.shape)
    part = Slice(file=file, offset=(0,) * len(shape), shape=shape)
    return TensorEntry(dtype=dtype_name(name, tensor), shape=shape, sha256=sha256, slices=(part,))


def _refuse_differences(info: CheckpointInfo, here: Mapping[str, Sequence[Any]]) -> None:
    """Compare with what the workers hold together: dtype and shape by name."""
    entries = info.manifest.tensors
    problems = [f"'{name}' is not in the checkpoint" for name in sorted(here.keys() - entries.keys())]
    problems += [f"'{name}' is only in the checkpoint" for name in sorted(entries.keys() - here.keys())]
    for name in sorted(here.keys() & entries.keys()):
        saved, mine = (entries[name].dtype, list(entries[name].shape)), (here[name][0], list(here[name][1]))
        if saved != mine:
            problems.append(f"'{name}' is {saved[0]} {saved[1]} in the checkpoint and {mine[0]} {mine[1]} here")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"the checkpoint does not fit this model and optimizer: {'; '.join(problems[:5])}{more}",
            where=str(info.path),
            fix="resume with the config that the run was made with",
        )


def _remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
