"""`headway checkpoints list` and `verify`: what is saved, and whether it is undamaged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.checkpoint.format.manifest import MANIFEST, read_manifest, step_of
from headway.checkpoint.format.signing import VARIABLE, signature_state
from headway.checkpoint.index import LOCAL, CheckpointIndex, Place, entry_of
from headway.checkpoint.transfer import is_url, local_folders, remote_manifests
from headway.checkpoint.verify import verify_checkpoint
from headway.checkpoint.verify_remote import remote_checkpoints, verify_remote
from headway.cli.runs.checkpoints_manage import copy, diff, lifecycle, prune, reseal, restore
from headway.config.arguments import StorageOption, storage_options
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import notice, print_line, progress, warning
from headway.core.errors import CheckpointError
from headway.core.format import UNKNOWN, format_bytes
from headway.telemetry.summary import loss_text, time_text

if TYPE_CHECKING:
    from headway.checkpoint.format.manifest import Manifest
    from headway.checkpoint.index import Entry
    from headway.checkpoint.verify import Verification

checkpoints = typer.Typer(no_args_is_help=True, help="List, verify, compare, copy, prune and restore checkpoints.")

PlaceArgument = Annotated[str, typer.Argument(metavar="RUN|URL", help="Run directory, or URL of remote checkpoints.")]


@checkpoints.command("list")
def list_(run: PlaceArgument, option: StorageOption = None, json: JsonOption = False) -> None:
    """List checkpoints, the oldest first, from their manifests; `verify` reads the bytes too.

    For a run, the list includes checkpoints in its remote tier, as its index (`checkpoints.sqlite`) has them. The
    index is updated from the run directory first.

    [bold]Examples[/bold]

    headway checkpoints list runs/quickstart
    headway checkpoints list s3://bucket/runs/quickstart --json
    headway checkpoints list s3://bucket/a --option endpoint_url=https://s3.org
    """
    entries, contexts = _entries(run, storage_options(option, run))
    if json:
        print_json([_record(entry, contexts.get((entry.step, entry.state_sha256))) for entry in entries])
    elif not entries:
        notice(f"no checkpoints in {run}")
    else:
        headers = ["STEP", "SAVED", "SIZE", "STATE", "KIND", "LOSS", "VALIDATION", "IN", "ATTEMPT", "WORKERS"]
        print_table(headers, [_row(entry) for entry in entries], numeric=(0, 2, 5, 6, 8, 9))


@checkpoints.command()
def verify(
    place: Annotated[
        str,
        typer.Argument(metavar="RUN|CHECKPOINT|URL", help="Run directory, checkpoint folder, or URL of either."),
    ],
    option: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """Read every byte and compare it with the hashes taken before it was written. Exit code 4 when any differs.

    Files behind a URL are downloaded for that, one at a time, and not kept.

    [bold]Examples[/bold]

    headway checkpoints verify runs/quickstart
    headway checkpoints verify runs/quickstart/checkpoints/step-00001000 --json
    headway checkpoints verify s3://bucket/runs/quickstart
    """
    options = storage_options(option, place)
    results = _verify_url(place, options) if is_url(place) else _verify_path(Path(place))
    if not results:
        where = place if is_url(place) else str(Path(place).absolute())
        raise CheckpointError(f"'{place}' has no checkpoints", where=where, fix="give a run, or a checkpoint")
    if json:
        print_json([_result(result) for result in results])
    else:
        for line in (line for result in results for line in _lines(result)):
            print_line(line)
    damaged = [result.place for result in results if not result.good]
    if damaged:
        raise CheckpointError(
            f"damaged checkpoints: {len(damaged)} of {len(results)}",
            where=", ".join(damaged),
            fix="restore them from a copy; training continues from the newest good one by itself",
        )


def _verify_url(url: str, options: dict[str, Any]) -> list[Verification]:
    found = remote_checkpoints(url, options)
    with progress("verifying", sum(checkpoint.bytes for checkpoint in found), "B") as bar:
        return [verify_remote(checkpoint, bar.advance) for checkpoint in found]


def _verify_path(path: Path) -> list[Verification]:
    is_checkpoint = path.is_dir() and (step_of(path.name) is not None or (path / MANIFEST).exists())
    folders = [path] if is_checkpoint else list(local_folders(path).values())
    with progress("verifying", _size(folders), "B") as bar:
        return [verify_checkpoint(folder, tensors=True, advance=bar.advance) for folder in folders]


def _size(folders: list[Path]) -> int:
    return sum(file.lstat().st_size for folder in folders for file in folder.glob("shard-*"))


def _entries(place: str, options: dict[str, Any]) -> tuple[list[Entry], dict[tuple[int, str], dict[str, Any]]]:
    """Return the checkpoints of a run or a URL by ascending step, and the contexts of those whose manifest was read."""
    from dataclasses import replace

    if is_url(place):
        found = remote_manifests(place, options)
        tier = "remote"
        entries = [replace(entry_of(f.manifest, None), places=(Place(tier, f.place, True),)) for f in found]
        return entries, {(f.manifest.step, f.manifest.state_sha256): _context(f.manifest) for f in found}

    path = Path(place)
    read = []
    run = path.parent if path.name == "checkpoints" else path
    for folder in local_folders(path).values():
        try:
            read.append((read_manifest(folder), str(folder)))
        except CheckpointError as error:
            warning(f"{folder}: {error.what}")
    contexts = {(manifest.step, manifest.state_sha256): _context(manifest) for manifest, _ in read}
    if (run / "config.yaml").exists():
        index = CheckpointIndex(run)
        index.rebuild(read)
        known = index.entries()
        if known:
            return known, contexts
    return [replace(entry_of(m, None), places=(Place(LOCAL, folder, True),)) for m, folder in read], contexts


def _context(manifest: Manifest) -> dict[str, Any]:
    return {"cursor": manifest.cursor, "context": manifest.context}


def _record(entry: Entry, context: dict[str, Any] | None) -> dict[str, Any]:
    from dataclasses import asdict

    local = [place.place for place in entry.places if place.tier == "local"]
    return {**asdict(entry), "path": local[0] if local else None, **(context or {})}


def _row(entry: Entry) -> list[str]:
    return [
        f"{entry.step:,}",
        time_text(entry.time),
        format_bytes(entry.bytes),
        entry.state_sha256[:12],
        entry.kind or UNKNOWN,
        loss_text(entry.metrics.get("train/loss")),
        loss_text(entry.metrics.get("evaluation/loss")),
        "+".join(place.tier if place.complete else f"({place.tier})" for place in entry.places),
        str(UNKNOWN if entry.attempt is None else entry.attempt),
        str(UNKNOWN if entry.world_size is None else entry.world_size),
    ]


def _result(result: Verification) -> dict[str, Any]:
    manifest = result.manifest
    return {
        "path": result.place,
        "good": result.good,
        "step": manifest.step if manifest else None,
        "state_sha256": manifest.state_sha256 if manifest else None,
        "signature": signature_state(manifest.context) if manifest else None,
        "damage": [{"file": d.file, "what": d.what, "tensors": list(d.tensors)} for d in result.damage],
    }


def _lines(result: Verification) -> list[str]:
    name = result.place.rsplit("/", 1)[-1]
    if result.good and result.manifest:
        size = format_bytes(result.manifest.total_bytes)
        state = signature_state(result.manifest.context)
        signed = {"none": "", "valid": ", signature valid"}.get(state, f", signature not checked (set {VARIABLE})")
        return [f"{name}: good, {size}, state {result.manifest.state_sha256[:12]}{signed}"]
    return [f"{name}: damaged", *(f"  {damage}" for damage in result.damage)]


for verb in (diff, prune, copy, restore, reseal, lifecycle):
    checkpoints.command()(verb)
