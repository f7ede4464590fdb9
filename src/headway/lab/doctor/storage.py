"""Storage of runs and token stores: free space, type of file system, speed."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.core.console import notice
from headway.core.errors import fix_for
from headway.core.format import format_bytes
from headway.core.machine.system import Machine
from headway.lab.doctor.findings import Finding

_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "afs", "orangefs", "weka"}
_MEMORY = {"tmpfs", "ramfs"}

_TIGHT_BYTES = 2**30
_LOW_BYTES = 20 * 2**30

_BLOCK_BYTES = 2**22
_TEST_BYTES = 2**26


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    kind: str
    source: str
    device: str
    """Major and minor number."""
    read_only: bool


def examine_storage(machine: Machine, folders: Mapping[str, Path], *, write: bool = False) -> Iterator[Finding]:
    """Examine the file system of each folder.

    Args:
        folders: Folders by purpose, absolute or relative to the working directory. For a missing folder the nearest
            existing parent is examined.
        write: Also write and sync a file of 64 MiB there, and remove it.
    """
    mounts = list(_mounts(machine))
    for purpose, folder in folders.items():
        path = Path(os.path.abspath(folder))  # noqa: PTH100 (a recorded machine's links are its own)
        there = next((parent for parent in (path, *path.parents) if machine.exists(parent)), Path("/"))
        around = [mount for mount in mounts if there.is_relative_to(mount.point)]
        # Of several mounts at one point the last one is visible.
        mount = max(reversed(around), key=lambda mount: len(mount.point), default=None)
        yield from _examine(machine, f"{purpose} ({folder})", there, mount)
        if write:
            notice(f"writing {format_bytes(_TEST_BYTES)} to {there}")
            yield _write_test(machine.path(there), purpose)


def _examine(machine: Machine, name: str, folder: Path, mount: Mount | None) -> Iterator[Finding]:
    where = str(folder)
    if mount is not None and mount.read_only:
        yield Finding(
            "error", f"{name}: read-only", f"{mount.point} ({mount.kind})", "choose another place, or remount"
        )
        return
    if machine.root == Path("/") and not os.access(folder, os.W_OK):
        yield Finding("error", f"{name}: you may not write there", where, "choose another place, for example runs=...")
        return
    kind = "file system n/a" if mount is None else _described(machine, mount)
    try:
        space = machine.space(folder)
    except OSError as error:
        yield Finding("warning", f"{name}: {error.strerror or error}", where)
        return
    text = f"{name}: {format_bytes(space.free_bytes)} of {format_bytes(space.total_bytes)} free, {kind}"
    if space.free_bytes < _TIGHT_BYTES:
        yield Finding("error", text, where, "free some space, or choose another place", f"du -xh {folder} | sort -h")
    elif space.free_bytes < _LOW_BYTES:
        what = f"{text}: a checkpoint takes 12 bytes per parameter with AdamW, and checkpoint.keep of them are kept"
        yield Finding("warning", what, where, "free some space, or keep fewer", "checkpoint.keep=1")
    else:
        yield Finding("ok", text, where)
    if mount is not None and mount.kind in _MEMORY:
        yield Finding("warning", f"{name} is in memory: it is gone after a restart", where, "choose a disk")


def _described(machine: Machine, mount: Mount) -> str:
    kind = mount.kind
    if kind in _NETWORK or (kind.startswith("fuse.") and kind != "fuse.fuse-overlayfs"):
        return f"{kind} (network)"
    if kind in _MEMORY:
        return f"{kind} (memory)"
    block = f"/sys/dev/block/{mount.device}"
    name = re.sub(r"^/dev/", "", mount.source)
    if name.startswith("nvme"):
        return f"{kind} on NVMe"
    # A partition has no queue; its disk has.
    rotates = machine.number(f"{block}/queue/rotational")
    if rotates is None:
        rotates = machine.number(f"{block}/../queue/rotational")
    if rotates is None:
        return f"{kind}, speed class n/a"
    # Virtual disks report that they rotate, whatever hardware they use.
    if name.startswith(("vd", "xvd")):
        return f"{kind} on a virtual disk"
    return f"{kind} on {'a rotating disk' if rotates else 'an SSD'}"


def _write_test(folder: Path, purpose: str) -> Finding:
    """Test sequential writes with one sync at the end, as in a checkpoint."""
    block = os.urandom(_BLOCK_BYTES)
    try:
        start = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder) as out:  # nameless, so it disappears even after a kill
            for _ in range(_TEST_BYTES // _BLOCK_BYTES):
                out.write(block)
            out.flush()
            written = time.perf_counter()
            os.fsync(out.fileno())
        seconds = time.perf_counter() - start
        rate = _TEST_BYTES / seconds
        text = (
            f"{purpose}: {format_bytes(_TEST_BYTES)} written and synced at {format_bytes(rate)}/s"
            f" (the sync took {time.perf_counter() - written:.2f} s)"
        )
    except OSError as error:
        return Finding(
            "error", f"{purpose}: writing fails: {error.strerror or error}", str(folder), fix_for(error, "see the disk")
        )
    if rate < 50 * 2**20:
        return Finding("warning", text, str(folder), "checkpoints will take long; save less often, or elsewhere")
    return Finding("ok", text, str(folder))


def _mounts(machine: Machine) -> Iterator[Mount]:
    """Yield all mounts (proc(5), /proc/pid/mountinfo); the fields after the hyphen are type, source and options."""
    for line in (machine.text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        kind, source, *options = after.split()
        read_only = "ro" in fields[5].split(",") or "ro" in ",".join(options).split(",")
        # Spaces in names are written in octal.
        yield Mount(fields[4].replace("\\040", " "), kind, source, fields[2], read_only)
