"""`headway checkpoints`: what is saved, and whether it is still what was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.common import JsonOption, RunArgument, print_json, print_table

if TYPE_CHECKING:
    from headway.checkpoint.store import CheckpointInfo, CheckpointStore
    from headway.checkpoint.verify import Verification

checkpoints = typer.Typer(no_args_is_help=True, help="List and verify the checkpoints of a run.")


@checkpoints.command("list")
def list_(run: RunArgument, json: JsonOption = False) -> None:
    """List a run's checkpoints, the oldest first, as their manifests tell; `verify` reads the bytes too.

    [bold]Examples[/bold]

    headway checkpoints list runs/quickstart
    """
    from headway.checkpoint.format import read_manifest
    from headway.checkpoint.store import CheckpointInfo
    from headway.core.console import notice, warning
    from headway.core.errors import CheckpointError

    found = []
    folders = _store(run).folders()
    for folder in folders:
        try:
            found.append(CheckpointInfo(folder, read_manifest(folder)))
        except CheckpointError as error:
            warning(f"{folder}: {error.what}")
    if json:
        print_json([_record(info) for info in found])
    elif not folders:
        notice(f"no checkpoints in {run}")
    else:
        headers = ["STEP", "SAVED", "SIZE", "STATE", "ATTEMPT", "WORKERS"]
        print_table(headers, [_row(info) for info in found], numeric=(0, 2, 4, 5))


@checkpoints.command()
def verify(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Run directory or checkpoint folder.", show_default=False)
    ],
    json: JsonOption = False,
) -> None:
    """Read every byte and compare it with the hashes taken before it was written. Exit code 4 when any differs.

    [bold]Examples[/bold]

    headway checkpoints verify runs/quickstart
    headway checkpoints verify runs/quickstart/checkpoints/step-00001000 --json
    """
    from headway.checkpoint.format import MANIFEST, step_of
    from headway.checkpoint.verify import verify_checkpoint
    from headway.core.console import progress
    from headway.core.errors import CheckpointError

    is_checkpoint = path.is_dir() and (step_of(path.name) is not None or (path / MANIFEST).exists())
    folders = [path] if is_checkpoint else list(_store(path).folders())
    if not folders:
        raise CheckpointError(
            f"'{path}' has no checkpoints", where=str(path.absolute()), fix="give a run directory, or a checkpoint"
        )
    with progress("verifying", _size(folders), "B") as bar:
        results = [verify_checkpoint(folder, tensors=True, advance=bar.advance) for folder in folders]
    if json:
        print_json([_result(result) for result in results])
    else:
        print("\n".join(line for result in results for line in _lines(result)))
    damaged = [str(result.path) for result in results if not result.good]
    if damaged:
        raise CheckpointError(
            f"damaged checkpoints: {len(damaged)} of {len(results)}",
            where=", ".join(damaged),
            fix="restore them from a copy; training goes on from the newest good one by itself",
        )


def _store(run: Path) -> CheckpointStore:
    """The checkpoints of a run directory, or of the `checkpoints` folder in one."""
    from headway.checkpoint.store import CheckpointStore
    from headway.core.errors import CheckpointError

    if not run.is_dir():
        raise CheckpointError(
            f"'{run}' is not a folder", where=str(run.absolute()), fix="headway runs list shows the runs there are"
        )
    return CheckpointStore(run if run.name == "checkpoints" else run / "checkpoints")


def _size(folders: list[Path]) -> int:
    return sum(file.lstat().st_size for folder in folders for file in folder.glob("*.safetensors"))


def _record(info: CheckpointInfo) -> dict[str, Any]:
    manifest = info.manifest
    return {
        "step": info.step,
        "path": str(info.path),
        "bytes": manifest.total_bytes,
        "state_sha256": info.state_sha256,
        "cursor": info.cursor,
        "context": info.context,
        "files": len(manifest.files),
        "tensors": len(manifest.tensors),
    }


def _row(info: CheckpointInfo) -> list[str]:
    from headway.core.format import UNKNOWN, format_bytes
    from headway.telemetry.record import as_time
    from headway.telemetry.summary import time_text

    return [
        f"{info.step:,}",
        time_text(as_time(info.context.get("time"))),
        format_bytes(info.manifest.total_bytes),
        info.state_sha256[:12],
        str(info.context.get("attempt", UNKNOWN)),
        str(info.context.get("world_size", UNKNOWN)),
    ]


def _result(result: Verification) -> dict[str, Any]:
    manifest = result.manifest
    return {
        "path": str(result.path),
        "good": result.good,
        "step": manifest.step if manifest else None,
        "state_sha256": manifest.state_sha256 if manifest else None,
        "damage": [{"file": d.file, "what": d.what, "tensors": list(d.tensors)} for d in result.damage],
    }


def _lines(result: Verification) -> list[str]:
    from headway.core.format import format_bytes

    if result.good and result.manifest:
        size = format_bytes(result.manifest.total_bytes)
        return [f"{result.path.name}: good, {size}, state {result.manifest.state_sha256[:12]}"]
    return [f"{result.path.name}: damaged", *(f"  {damage}" for damage in result.damage)]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.add_typer(checkpoints, name="checkpoints")
