"""All checkpoints of a run: save, find the newest that verifies, load, keep a few."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.format.file_layout import Elements, Piece, plan_files
from headway.checkpoint.format.folders import REPLACED, checkpoint_folders, discard, remove
from headway.checkpoint.format.manifest import MANIFEST, Manifest, dtype_name, read_manifest, step_name, tensor_bytes
from headway.checkpoint.format.reading import SavedTensors, read_tensors
from headway.checkpoint.format.signing import Key
from headway.checkpoint.pruning import Pruner
from headway.checkpoint.retention import Rules
from headway.checkpoint.save.parts import write_part
from headway.checkpoint.save.publish import Publisher
from headway.checkpoint.verify import Verification, verify_checkpoint
from headway.core import console
from headway.core.errors import CheckpointError, explaining_os_errors, fix_for
from headway.core.files.paths import is_there
from headway.core.format import format_bytes
from headway.core.process.waiting import wait_until
from headway.core.types import Block, StateBlocks, StateTensors


@dataclass(frozen=True)
class CheckpointInfo:
    """A local checkpoint and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.manifest.step

    @property
    def cursor(self) -> dict[str, int]:
        """Position of the run."""
        return self.manifest.cursor

    @property
    def context(self) -> dict[str, Any]:
        """Facts about the run and the attempt."""
        return self.manifest.context

    @property
    def state_sha256(self) -> str:
        """The hash that names the state."""
        return self.manifest.state_sha256


class CheckpointStore:
    """The `checkpoints` folder of a run. It need not exist before the first save.

    Args:
        directory: The folder.
        keep: Number of newest checkpoints to keep.
        may_write: Called right before a save becomes visible; it raises an error if this process no longer owns the
            run.
        max_shard_bytes: Approximate size of a file; a larger tensor gets a file of its own.
        after_save: Called with the manifest of each published checkpoint (`CheckpointMaintainer`). If None, the store
            keeps the newest `keep` checkpoints.
        sign_with: Key to sign manifests with.
        encrypt_with: Key that `save` encrypts files with. Sealed files are read with the key from the environment.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 3,
        may_write: Callable[[], None] = lambda: None,
        *,
        max_shard_bytes: int = 2 * 1024**3,
        after_save: Callable[[Manifest], None] | None = None,
        sign_with: Key | None = None,
        encrypt_with: bytes | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError("at least one checkpoint must be kept")
        self.directory = Path(directory)
        self.keep = keep
        self.publisher = Publisher(self.directory, may_write, sign_with)
        self.after_save = after_save or Pruner(self.directory, Rules(keep=keep))
        self._max_shard_bytes = max_shard_bytes
        self._encrypt_with = encrypt_with

    # Reading

    def folders(self) -> Sequence[Path]:
        """Return the folders that are checkpoints by name, in ascending order of steps.

        Raises:
            CheckpointError: The directory cannot be read.
        """
        with explaining_os_errors(CheckpointError, "checkpoints cannot be listed", self.directory, "make it readable"):
            return list(checkpoint_folders(self.directory).values())

    def list(self) -> Sequence[CheckpointInfo]:
        """Return the checkpoints with a readable manifest, in ascending order of steps; their files are not checked."""
        infos = []
        for folder in self.folders():
            try:
                infos.append(CheckpointInfo(folder, read_manifest(folder)))
            except CheckpointError:
                continue
        return infos

    def info(self, step: int, patience_seconds: float = 0.0) -> CheckpointInfo:
        """Return the checkpoint of one step; its files are not checked.

        Args:
            step: The step.
            patience_seconds: How long to wait until this machine sees what another machine has written.

        Raises:
            CheckpointError: There is none, or its manifest cannot be trusted.
        """
        wait_until(lambda: is_there(self._folder(step) / MANIFEST, folders=3), patience_seconds, 0.2)
        folder = self._folder(step)
        if not folder.exists():
            there = ", ".join(f"{info.step}" for info in self.list())
            raise CheckpointError(
                f"there is no checkpoint of step {step}",
                where=str(self.directory),
                fix=f"choose one of these steps: {there or 'none'}",
            )
        return CheckpointInfo(folder, read_manifest(folder))

    def verify(
        self, checkpoint: int | Path, full: bool = True, advance: Callable[[int], None] = lambda _: None
    ) -> Verification:
        """Compare one checkpoint with its manifest; damage is reported, not raised.

        Args:
            checkpoint: Its step or path.
            full: Whether to hash every file and every tensor; if not, only names, sizes and headers are checked.
            advance: Called with the number of bytes done.
        """
        path = checkpoint if isinstance(checkpoint, Path) else self._folder(checkpoint)
        return verify_checkpoint(path, hashes=full, tensors=full, advance=advance)

    def newest(
        self,
        notice: Callable[[str], None] = console.warning,
        usable: Callable[[Manifest], bool] = lambda manifest: True,
    ) -> CheckpointInfo | None:
        """Return the newest checkpoint that verifies, including the hash of every file; None if there are none.

        Args:
            notice: Called with a message about each newer checkpoint that is passed over.
            usable: Return whether the run may resume from a checkpoint; others are passed over.

        Raises:
            CheckpointError: There are checkpoints, and none verifies.
        """
        folders = self.folders()
        for folder in reversed(folders):
            found = verify_checkpoint(folder)
            why = "; ".join(map(str, found.damage))
            if found.good and found.manifest is not None:
                if usable(found.manifest):
                    return CheckpointInfo(folder, found.manifest)
                why = "it was trained on rows that are skipped now"
            notice(f"passing over {folder}: {why}")
        if folders:
            raise CheckpointError(
                f"none of the {len(folders)} checkpoints verifies",
                where=str(self.directory),
                fix="restore one from a copy, or start a new run under another name",
            )
        return None

    def load(self, info: CheckpointInfo) -> StateTensors:
        """Load the tensors of a checkpoint on the CPU; files are mapped and read when touched.

        Raises:
            CheckpointError: The files do not hold the names, dtypes and shapes of the manifest.
        """
        return read_tensors(info.path, info.manifest)

    def load_into(
        self, info: CheckpointInfo, blocks: StateBlocks, gather: Callable[[Any], Sequence[Any]] = lambda value: [value]
    ) -> None:
        """Copy a worker's part of a checkpoint into its part of the state, on any device; all workers load together.

        Only the needed parts are read. Tensors may be cut differently than when the checkpoint was made.

        Args:
            info: The checkpoint.
            blocks: This worker's part of the state.
            gather: Exchanges a value with all workers and returns the values by rank.

        Raises:
            CheckpointError: The names, shapes or dtypes of the whole state differ from the checkpoint's. Nothing has
                been copied then. Only fp32 and bf16 are converted, to nearest: a run may continue with
                `train.weights` or `optimizer.moments` changed.
        """
        import torch

        here: dict[str, Any] = {}
        for worker in gather({n: (dtype_name(n, b.local), b.shape) for n, b in blocks.items()}):
            here |= worker
        _check_no_differences(info, here)
        saved = SavedTensors(info.path, info.manifest)
        with torch.no_grad():
            for name, block in blocks.items():
                saved.copy_into(name, block)

    def _folder(self, step: int) -> Path:
        aside = self.directory / (REPLACED + step_name(step))
        folder = self.directory / step_name(step)
        return aside if aside.exists() and not folder.exists() else folder

    # Writing

    def save(
        self,
        step: int,
        tensors: StateTensors,
        cursor: Mapping[str, int],
        context: Mapping[str, Any],
    ) -> Manifest:
        """Save a whole state in this process, and remove old checkpoints by the retention rules.

        A good checkpoint of the same step and state stays as it is. One of another state, or a damaged one, is
        replaced.

        Args:
            step: Finished steps.
            tensors: The state; it must not change meanwhile.
            cursor: Position of the run.
            context: Facts about the run and the attempt, as JSON values; the time is added.

        Raises:
            CheckpointError: The state cannot be written, or `may_write` forbids it. Earlier checkpoints are intact.
        """
        pieces = [Piece.of(name, Block.whole(tensor)) for name, tensor in tensors.items()]
        files = plan_files(pieces, 0, self._max_shard_bytes)
        with self.saving(step, os.getpid(), sum(file.nbytes for file in files)) as folder:
            elements = Elements(lambda piece: tensor_bytes(tensors[piece.name]))
            part = write_part(folder, files, elements, key=self._encrypt_with)
            manifest = self.publisher.finish(folder, [part], {**cursor, "step": step}, {**context, "time": time.time()})
        self.after_save(manifest)
        return manifest

    @contextmanager
    def saving(self, step: int, tag: object, nbytes: int) -> Iterator[Path]:
        """Provide a folder to save a step in; it is removed if the block fails.

        Args:
            step: Finished steps.
            tag: Distinguishes saves of the same step.
            nbytes: Size of the state, for the error message.

        Raises:
            CheckpointError: The state cannot be written, or `may_write` forbids it. Earlier checkpoints are intact.
        """
        temporary = self.publisher.folder(step, tag)
        try:
            yield self.publisher.begin(step, tag)
        except OSError as error:
            remove(temporary)
            raise self._cannot_write(step, nbytes, error) from error
        except BaseException:
            remove(temporary)
            raise

    def discard(self, step: int) -> None:
        """Remove the checkpoint of one step.

        Raises:
            CheckpointError: This process no longer owns the run, or the checkpoint cannot be removed.
        """
        self.publisher.assert_owned()
        with explaining_os_errors(
            CheckpointError,
            f"the checkpoint of step {step} cannot be removed",
            self._folder(step),
            "make its folder writable, and run the same command again",
        ):
            discard(self._folder(step))

    def _cannot_write(self, step: int, needed: int, error: OSError) -> CheckpointError:
        try:
            free = format_bytes(shutil.disk_usage(self.directory).free)
        except OSError:
            free = "an unknown amount"
        intact = [info.step for info in self.list()]
        kept = f"; the checkpoint of step {intact[-1]} is untouched" if intact else ""
        return CheckpointError(
            f"the checkpoint of step {step} cannot be written: {error.strerror or error}{kept}",
            where=f"{self.directory} ({format_bytes(needed)} needed, {free} free)",
            fix=fix_for(error, "make room there or repair the disk, then run the same command again"),
        )


#: Types of weights and moments, of which one may become the other.
_CONVERTED = {"F32", "BF16"}


def _check_no_differences(info: CheckpointInfo, here: Mapping[str, Sequence[Any]]) -> None:
    """Raise an error if names, dtypes or shapes of the workers' whole state differ from the checkpoint's."""
    entries = info.manifest.tensors
    problems = [f"'{name}' is not in the checkpoint" for name in sorted(here.keys() - entries.keys())]
    problems += [f"'{name}' is only in the checkpoint" for name in sorted(entries.keys() - here.keys())]
    for name in sorted(here.keys() & entries.keys()):
        saved = (entries[name].dtype, list(entries[name].shape))
        mine = (here[name][0], list(here[name][1]))
        converts = {saved[0], mine[0]} <= _CONVERTED and saved[1] == mine[1]
        if saved != mine and not converts:
            problems.append(f"'{name}' is {saved[0]} {saved[1]} in the checkpoint and {mine[0]} {mine[1]} here")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"the checkpoint does not fit this model and optimizer: {'; '.join(problems[:5])}{more}",
            where=str(info.path),
            fix="resume with the config that the run was made with",
        )
