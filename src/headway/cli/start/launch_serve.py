"""`headway launch serve`: serve a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.clouds.cli.launching import DryRunOption, OutOption, YesOption, agrees, show_or_write, write_files
from headway.clouds.launchers import serving
from headway.clouds.launchers.job import DNS_LABEL_LENGTH, Job
from headway.config import load_config
from headway.config.checks.contradictions import combined
from headway.core.command_line import print_table
from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.models.versions import is_reference

_TARGET = "kubernetes"


def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME@VERSION|FOLDER", help="Version of a registry, or a folder on a volume."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of launch, e.g. launch.image=..."),
    ] = None,
    *,
    on: Annotated[str, typer.Option("--on", metavar="TARGET", help="kubernetes.")],
    name: Annotated[str | None, typer.Option(help="Name of the server; that of the model when not given.")] = None,
    registry: Annotated[
        str | None,
        typer.Option(metavar="FOLDER|URL", help="The registry, as pods see it."),
    ] = None,
    replicas: Annotated[
        str, typer.Option(metavar="N or MIN:MAX", help="Number of pods; MIN:MAX writes an autoscaler.")
    ] = "1",
    scale_on: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC=VALUE",
            help="Scale on a metric of the pods; on processors if not given.",
        ),
    ] = None,
    key_secret: Annotated[str | None, typer.Option(help="Secret with api-key; NAME-key when not given.")] = None,
    tls_secret: Annotated[
        str | None, typer.Option(help="Secret of type kubernetes.io/tls; NAME-tls when not given.")
    ] = None,
    serve_option: Annotated[
        list[str] | None,
        typer.Option(help="One more option of headway serve, as --serve-option=--batch=64."),
    ] = None,
    dry_run: DryRunOption = False,
    out: OutOption = None,
    yes: YesOption = False,
) -> None:
    """Serve a model on Kubernetes: a Deployment with probes, a Service, and an autoscaler between bounds.

    Clients need the key of a Secret, and talk TLS. The image is the one with the extra serve; everything else is in the
    config section launch. Pods with an alias follow it: another version is loaded beside the old one.

    [bold]Examples[/bold]

    headway launch serve my-model@prod --on kubernetes --dry-run launch.image=r/s
    headway launch serve my-model@prod --on kubernetes --replicas 2:8 -y
    """
    if on != _TARGET:
        raise ConfigError(f"there are no servers on '{on}'", where="--on", fix=f"--on {_TARGET}")
    job = _job(model, name, list(overrides or []), out)
    least, most = _bounds(replicas)
    served = serving.ServedModel(
        model,
        is_reference(model),
        registry,
        least,
        most,
        key_secret or f"{job.name}-key",
        tls_secret or f"{job.name}-tls",
        scale_on,
        tuple(serve_option or ()),
    )
    problems = list(serving.problems(job, served))
    if problems:
        raise combined(problems)
    files = serving.files(job, served)
    if dry_run:
        show_or_write(files, out)
        return
    rows = [["model", model], ["target", on], ["pods", replicas], ["image", str(job.config.launch.image)]]
    print_table(["SERVE", job.name], rows)
    if not yes and not agrees("launch", "Launch?"):
        raise typer.Exit(1)
    folder = out or Path("serve") / job.name
    write_files(files, folder)
    serving.apply(job, served, folder)
    namespace = job.config.launch.kubernetes.namespace
    notice(f"applied {folder}; kubectl --namespace {namespace} rollout status deployment/{job.name} shows how it is")


def _job(model: str, name: str | None, overrides: list[str], out: Path | None) -> Job:
    """Return what says where the server runs: a config of which only `launch` counts.

    Raises:
        ConfigError: a key of another section is given.
    """
    for text in overrides:
        if not text.startswith("launch."):
            raise ConfigError("a server has keys of launch only", where=text, fix="headway serve -h lists its options")
    plain = name or "".join(sign if sign.isalnum() else "-" for sign in Path(model.partition("@")[0]).name.lower())
    base = {"base": "laptop", "name": plain.strip("-")[:DNS_LABEL_LENGTH] or "model", "train": {"device": "cpu"}}
    return Job(load_config(base, overrides, trains=False), out=out)


def _bounds(text: str) -> tuple[int, int]:
    """Parse the number of pods.

    Raises:
        ConfigError: it is none.
    """
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal():
        raise ConfigError(f"'{text}' is no number of pods", where="--replicas", fix="--replicas 2, or --replicas 1:4")
    return int(low), int(high or low)
