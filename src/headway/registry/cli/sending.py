"""`headway registry pull` and `push`: a version on this machine, and in a mirror."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.config.arguments import StorageOption
from headway.core.command_line import JsonOption, RegistryOption, print_json, print_table
from headway.core.console import notice, print_line, warning
from headway.core.errors import CheckpointError
from headway.core.format import format_bytes
from headway.models.hub.push import push as send
from headway.models.versions import local_folder, resolve
from headway.registry.cli.options import KeyOption, VersionArgument, open_named
from headway.registry.mirrors import MLFLOW, check_target, hub_upload, send_to_mlflow
from headway.registry.pull import pull_to
from headway.registry.signing import signature_problem
from headway.registry.who import audit


def pull(
    version: VersionArgument,
    folder: Annotated[Path | None, typer.Argument(help="New folder; a cache when not given.")] = None,
    *,
    place: RegistryOption = None,
    option: StorageOption = None,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Fetch a version and verify every byte; print the folder, which transformers and headway load.

    [bold]Examples[/bold]

    headway registry pull my-model@prod
    headway registry pull my-model@3 my-folder
    headway registry pull my-model@prod --json
    """
    found = resolve(version, open_named(place, option))
    path = local_folder(found) if folder is None else pull_to(found, folder)
    if key is not None and (problem := signature_problem(path, key)):
        raise CheckpointError(
            f"{found.version} {problem}", where=str(path), fix="do not use it; ask who has registered it"
        )
    if json:
        print_json(
            {
                "name": found.version.name,
                "number": found.number,
                "alias": None if found.change is None else found.change.alias,
                "manifest_sha256": found.manifest_hash,
                "path": str(path),
            }
        )
    else:
        print_line(str(path))


def push(
    version: VersionArgument,
    target: Annotated[str, typer.Argument(metavar="hf://ORG/NAME|mlflow:NAME", help="Where to send it.")],
    *,
    place: RegistryOption = None,
    option: StorageOption = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Who may see it on the Hub.")] = True,
    alias: Annotated[str | None, typer.Option(help="For MLflow: alias that points to it there.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be sent, and send nothing.")] = False,
) -> None:
    """Mirror a version, verified and with its card: to the Hugging Face Hub, or to a registered model of MLflow.

    The Hub's token is HF_TOKEN, and MLflow's address MLFLOW_TRACKING_URI.

    [bold]Examples[/bold]

    headway registry push my-model@prod hf://me/my-model --dry-run
    headway registry push my-model@3 mlflow:my-model --alias champion
    """
    check_target(target)
    found = resolve(version, open_named(place, option))
    if target.startswith(MLFLOW):
        name = target.removeprefix(MLFLOW)
        if dry_run:
            notice(f"nothing was sent; {found.version} would become a version of {name}")
            return
        address = send_to_mlflow(found, name, alias)
    else:
        if alias is not None:
            warning("the Hub has no aliases: --alias has no effect")
        upload = hub_upload(found.version, local_folder(found), target)
        sizes = sorted(upload.sizes.items())
        print_table(["File", "Size"], [[name, format_bytes(size)] for name, size in sizes], numeric=(1,))
        if dry_run:
            notice(f"nothing was sent to {target}")
            return
        address = send(upload, private=private)
    audit(found.registry, found.version.name, "registry push", version=found.number, target=target)
    notice(f"sent to {address}")
