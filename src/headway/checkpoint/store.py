"""All checkpoints of a run: save, find the newest that verifies, load, keep a few."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.file_layout import Elements, Piece, plan_files
from headway.checkpoint.format.folders import REPLACED, checkpoint_folders, discard, remove
from headway.checkpoint.format.manifest import MANIFEST, Manifest, dtype_name, read_manifest, step_name, tensor_bytes
from headway.checkpoint.format.reading import SavedTensors, read_tensors
from headway.checkpoint.format.signing import Key
from headway.checkpoint.pruning import Pruner
from headway.checkpoint.retention import Rules
from headway.checkpoint.save.publish import Publisher, write_part
from headway.checkpoint.verify import Verification, verify_checkpoint
from headway.core import console
from headway.core.errors import CheckpointError, fix_for
from headway.core.files import is_there
from headway.core.format import format_bytes
from headway.core.types import Block
from headway.core.waiting import wait_until

if TYPE_CHECKING:
    from headway.core.types import StateBlocks, StateTensors


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
        after_save: Called with the manifest of what has been published (`CheckpointMaintainer`); when not given, the
            newest `keep` are kept.
        sign_with: Signs manifests.
        encrypt_with: Key that `save` seals files with; what is sealed is read with the one of the environment.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 3,
        may_write: Callable[[], None] = lambda: None,
        max_shard_bytes: int = 2 * 1024**3,
        after_save: Callable[[Manifest], None] | None = None,
        sign_with: Key | None = None,
        encrypt_with: bytes | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError("at least one checkpoint must be kept")
        self.directory, self.keep = Path(directory), keep
        self.publisher = Publisher(self.directory, may_write, sign_with)
        self.after_save = after_save or Pruner(self.directory, Rules(keep=keep))
        self._max_shard_bytes, self._encrypt_with = max_shard_bytes, encrypt_with

    # Reading

    def folders(self) -> Sequence[Path]:
        """The folders that claim to be checkpoints, by rising step.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        try:
            return list(checkpoint_folders(self.directory).values())
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be looked for: {error.strerror}", where=str(self.directory), fix="make it readable"
            ) from error

    def list(self) -> Sequence[CheckpointInfo]:
        """The checkpoints whose manifest can be read, by rising step; their bytes are not looked at."""
        infos = []
        for folder in self.folders():
            try:
                infos.append(CheckpointInfo(folder, read_manifest(folder)))
            except CheckpointError:
                continue
        return infos

    def info(self, step: int, patience_seconds: float = 0.0) -> CheckpointInfo:
        """The checkpoint of one step; its bytes are not looked at.

        Args:
            patience_seconds: How long it may take until this machine sees what another one has written.

        Raises:
            CheckpointError: there is none, or its manifest cannot be trusted.
        """
        wait_until(lambda: is_there(self._folder(step) / MANIFEST, folders=3), patience_seconds, 0.2)
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

    def newest(
        self,
        notice: Callable[[str], None] = console.warning,
        usable: Callable[[Manifest], bool] = lambda manifest: True,
    ) -> CheckpointInfo | None:
        """The newest checkpoint that verifies, every file's hash included; None when there never was one.

        Args:
            notice: Told about every newer one that is passed over, and why.
            usable: Whether one may be gone on from; the others are passed over.

        Raises:
            CheckpointError: there are checkpoints, and none verifies.
        """
        folders = self.folders()
        for folder in reversed(folders):
            found = verify_checkpoint(folder)
            why = "; ".join(map(str, found.damage))
            if found.good and found.manifest is not None:
                if usable(found.manifest):
                    return CheckpointInfo(folder, found.manifest)
                why = "it was made with rows that are left out now"
            notice(f"passing over {folder}: {why}")
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
        """Save a whole state at once, in this process, and remove checkpoints that are too old.

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
        pieces = [Piece.of(name, Block.whole(tensor)) for name, tensor in tensors.items()]
        images = plan_files(pieces, 0, self._max_shard_bytes)
        with self.saving(step, os.getpid(), sum(image.nbytes for image in images)) as folder:
            elements = Elements(lambda piece: tensor_bytes(tensors[piece.name]))
            part = write_part(folder, images, elements, key=self._encrypt_with)
            manifest = self.publisher.finish(folder, [part], {**cursor, "step": step}, {**context, "time": time.time()})
        self.after_save(manifest)
        return manifest

    @contextmanager
    def saving(self, step: int, tag: object, nbytes: int) -> Iterator[Path]:
        """A folder to save a step in, for the length of a block; whatever goes wrong in it, nothing is left.

        Args:
            step: Finished steps.
            tag: Tells saves of the same step apart.
            nbytes: Size of the state, for the message.

        Raises:
            CheckpointError: it cannot be written, or `may_write` forbids it. Earlier checkpoints are intact.
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
            CheckpointError: this process no longer owns the run, or the checkpoint cannot be removed.
        """
        self.publisher.assert_owned()
        try:
            discard(self._folder(step))
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be removed: {error.strerror}",
                where=str(self._folder(step)),
                fix="make its folder writable, and run the same command again",
            ) from error

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
            fix=fix_for(error, "make room there or mend the disk, then run the same command again"),
        )


def _check_no_differences(info: CheckpointInfo, here: Mapping[str, Sequence[Any]]) -> None:
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
