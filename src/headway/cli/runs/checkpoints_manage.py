"""`headway checkpoints diff`, `prune`, `copy`, `restore`, `reseal` and `lifecycle`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.checkpoint.compare import compare
from headway.checkpoint.lifecycle import bucket_rule
from headway.checkpoint.retention import Rules
from headway.checkpoint.transfer import copy_checkpoints
from headway.config import load_resolved
from headway.config.arguments import StorageOption, load, storage_options
from headway.core.command_line import JsonOption, RunArgument, print_json, print_table
from headway.core.console import exact_results, notice, print_line, print_text
from headway.core.errors import CheckpointError, ConfigError
from headway.core.format import UNKNOWN, counted
from headway.run.directory.reseal import reseal as reseal_run
from headway.run.directory.restore import prune as prune_run
from headway.run.directory.restore import restore as restore_run
from headway.run.directory.run_directory import RunDirectory, command_line

if TYPE_CHECKING:
    from headway.checkpoint.compare import Comparison, TensorDifference

CheckpointArgument = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder.")]


def diff(
    first: CheckpointArgument,
    second: CheckpointArgument,
    values: Annotated[
        bool, typer.Option("--values", help="Read the tensors that differ, and print by how much.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print which tensors of two checkpoints differ, by the hashes in their manifests, whatever their layout.

    [bold]Examples[/bold]

    headway checkpoints diff old/step-00001000 new/step-00001000
    headway checkpoints diff A B --values --json
    """
    found = compare(first, second, values)
    if json:
        print_json(_comparison(found))
        return
    for key, (a, b) in found.cursor_differences.items():
        print_line(f"cursor {key}: {a} and {b}")
    if found.differences:
        headers = ["TENSOR", "DIFFERENCE", *(["ELEMENTS", "ABSOLUTE", "RELATIVE"] if values else [])]
        print_table(headers, [_difference_row(d, values) for d in found.differences], numeric=(2, 3, 4))
    verdict = "the same state" if found.same_state else "other states"
    print_line(f"{verdict}: {found.equal_tensors} tensors are equal, {len(found.differences)} differ")


def prune(
    run: RunArgument,
    keep: Annotated[int | None, typer.Option("--keep", min=1, help="Keep the newest N instead of the rules.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove the checkpoints of a run that the rules of its config (`checkpoint.keep` and others) do not keep.

    The newest one that verifies always stays. The command is refused while the run is in use.

    [bold]Examples[/bold]

    headway checkpoints prune runs/quickstart --dry-run
    headway checkpoints prune runs/quickstart --keep 1
    """
    directory = _run_of(run)
    stay, gone = prune_run(RunDirectory(directory), _rules(directory, keep), dry_run)
    if json:
        print_json({"kept": stay, "removed": gone, "dry_run": dry_run})
        return
    verb = "would be removed" if dry_run else "removed"
    rows = [(step, f"kept: {why}") for step, why in stay.items()] + [(step, verb) for step in gone]
    for step, what in sorted(rows):
        print_line(f"step {step:,}: {what}")
    if not rows:
        print_line("there are no checkpoints")


def copy(
    source: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|URL", help="What to copy.")],
    target: Annotated[str, typer.Argument(metavar="FOLDER|URL", help="Where to put it.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Copy only the checkpoint of this step.")] = None,
    option: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """Copy checkpoints to a folder or to object storage, and verify them; each becomes visible when it is complete.

    A checkpoint that is already there is not copied again. Copies are in FOLDER/step-00001000 and so on.

    [bold]Examples[/bold]

    headway checkpoints copy runs/quickstart /mnt/backup/quickstart
    headway checkpoints copy runs/a/checkpoints/step-00001000 s3://bucket/models
    headway checkpoints copy s3://bucket/runs/quickstart copies --step 1000
    """
    copies = copy_checkpoints(source, target, step, storage_options(option, source, target))
    if json:
        print_json(
            [{"step": c.manifest.step, "place": c.place, "state_sha256": c.manifest.state_sha256} for c in copies]
        )
    else:
        for copied in copies:
            print_line(copied.place)


def restore(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Return to this step; the newest one when not given.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="RUN|CHECKPOINT|URL", help="Source of the checkpoint.")
    ] = None,
    option: StorageOption = None,
    json: JsonOption = False,
) -> None:
    """Make a run continue from an earlier checkpoint. Later ones are set aside, locally and in the remote tier.

    Nothing is removed: later checkpoints move to RUN/set-aside. Remote ones stay hidden until the run saves at their
    steps again. The ledger records that their steps were rolled back. The command is refused while the run is in use.

    [bold]Examples[/bold]

    headway checkpoints restore runs/quickstart --step 1000
    headway checkpoints restore runs/lost --from s3://bucket/runs/lost
    headway checkpoints restore runs/new --from runs/quickstart --step 1000
    """
    options = storage_options(option, source)
    found = restore_run(RunDirectory(_run_of(run)), step, source, options, command_line())
    if json:
        print_json(
            {
                "step": found.step,
                "path": str(found.path),
                "state_sha256": found.state_sha256,
                "set_aside": list(found.set_aside),
            }
        )
        return
    print_line(f"{found.path}: training continues from step {found.step:,} (state {found.state_sha256[:12]})")
    for place in found.set_aside:
        print_line(f"set aside: {place}")


def lifecycle(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://, gs:// or az://: checkpoint.remote.url.")],
    kept_by: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Config of the run, for what it keeps there."),
    ] = None,
) -> None:
    """Print the lifecycle rule of a bucket that fits what a run keeps there, for the cloud's own program.

    It removes parts of uploads that were cut off, and old versions in a bucket that keeps them, never a checkpoint.
    With `keep_every`, large objects move to storage that costs less.

    [bold]Examples[/bold]

    headway checkpoints lifecycle s3://bucket/runs > rule.json
    headway checkpoints lifecycle gs://bucket/runs --config my.yaml > rule.json
    """
    loaded = None if kept_by is None else load(kept_by, [], trains=False)
    remote = None if loaded is None else loaded.checkpoint.remote
    if loaded is not None and (remote is None or not url.startswith(remote.url)):
        raise ConfigError(
            f"{kept_by} keeps nothing at {url}", where="checkpoint.remote.url", fix="give the URL that is there"
        )
    rule = bucket_rule(url, Rules() if remote is None else Rules.of(remote))
    with exact_results():
        print_text(rule.text)
    notice(f"it replaces the bucket's rules, so merge what is there; apply it with: {rule.command}")


def reseal(run: RunArgument, json: JsonOption = False) -> None:
    """Change the key that the checkpoints of a run are encrypted or signed with, here and in the remote tier.

    HEADWAY_ENCRYPTION_KEY and HEADWAY_SIGNING_KEY are the present keys, HEADWAY_NEW_ENCRYPTION_KEY and
    HEADWAY_NEW_SIGNING_KEY the new ones, each also with _FILE. After a kill the same command continues; until it has
    ended, the run cannot train. Exit code 4 when a checkpoint cannot be opened.

    [bold]Examples[/bold]

    headway checkpoints reseal runs/quickstart
    """
    directory = _run_of(run)
    done = reseal_run(RunDirectory(directory), command_line())
    if json:
        print_json({"changed": done.changed, "left": done.left, "failed": [str(error.where) for error in done.failed]})
    else:
        for place in done.changed:
            print_line(f"{place}: has the new key")
        print_line(f"{counted(len(done.left), 'checkpoint')} had it already, or has none")
    if done.failed:
        raise CheckpointError(
            f"{counted(len(done.failed), 'checkpoint')} could not be opened: {done.failed[0].what}",
            where=", ".join(str(error.where) for error in done.failed),
            fix=done.failed[0].fix,
        )


def _run_of(path: Path) -> Path:
    return path.parent if path.name == "checkpoints" else path


def _rules(run: Path, keep: int | None) -> Rules:
    if keep is not None:
        return Rules(keep=keep)
    config = run / "config.yaml"
    if not config.exists():
        raise CheckpointError(
            "there is no config with rules on what to keep", where=str(run.absolute()), fix="give a run, or --keep N"
        )
    return Rules.of(load_resolved(config).checkpoint)


def _comparison(found: Comparison) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "same_state": found.same_state,
        "states": [found.first.state_sha256, found.second.state_sha256],
        "cursor": {key: list(pair) for key, pair in found.cursor_differences.items()},
        "equal_tensors": found.equal_tensors,
        "differences": [_plain(asdict(difference)) for difference in found.differences],
    }


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities, which JSON does not have, by a word."""
    return {key: "Infinity" if value == float("inf") else value for key, value in record.items()}


def _difference_row(difference: TensorDifference, values: bool) -> list[str]:
    row = [difference.name, difference.what]
    if not values:
        return row
    if difference.elements is None:
        return [*row, UNKNOWN, UNKNOWN, UNKNOWN]
    return [
        *row,
        f"{difference.elements:,}",
        f"{difference.largest_absolute:.3g}",
        f"{difference.largest_relative:.3g}",
    ]
