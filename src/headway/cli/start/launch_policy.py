"""`headway launch policy`: the least rights that a run needs, at its buckets and on Kubernetes."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from headway.clouds.launchers.job import load_job
from headway.clouds.launchers.kubernetes import KubernetesLauncher, yaml_text
from headway.clouds.launchers.launcher import find_launcher
from headway.clouds.launchers.policy import policy_for
from headway.clouds.launchers.roles import role_objects
from headway.command_line import ConfigArgument, OverridesArgument, load
from headway.core.console import exact_results, notice, print_text
from headway.core.errors import ConfigError


def policy(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    cloud: Annotated[
        Literal["aws", "gcp", "azure"] | None,
        typer.Option("--cloud", help="Rights at the buckets that the config names there."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="TARGET",
            help="Roles for people: kubernetes, jobset, trainjob, pytorchjob, rayjob.",
        ),
    ] = None,
    machines: Annotated[str, typer.Option("--machines", metavar="N", help="Number of machines, for --on.")] = "2",
) -> None:
    """Print the least rights that a run needs: of its identity at a cloud's buckets, or of people on Kubernetes.

    With --cloud, the run may write below its own folder of checkpoint.remote.url, and read data.remote and sources
    behind URLs. With --on, three roles for its namespace: viewers follow runs, trainers start and remove them,
    operators manage volumes and quotas too.

    [bold]Examples[/bold]

    headway launch policy my.yaml --cloud aws > policy.json
    headway launch policy my.yaml --on kubernetes > roles.yaml
    """
    if (cloud is None) == (on is None):
        raise ConfigError("one of two is needed", where="--cloud, --on", fix="--cloud aws, or --on kubernetes")
    if cloud is not None:
        found = policy_for(load(config, overrides, trains=False), cloud)
        with exact_results():
            print_text(found.text)
        notice(f"fill in the words in capitals, and apply it with: {found.command}")
        return
    assert on is not None, "one of the two is given"
    launcher = find_launcher(on)
    if not isinstance(launcher, KubernetesLauncher):
        raise ConfigError(f"{on} has no roles for people", where="--on", fix="--on kubernetes, or another of its kinds")
    documents = role_objects(launcher, load_job(config, list(overrides or []), machines))
    with exact_results():
        print_text(yaml_text(documents))
    notice("apply it with: kubectl apply --filename roles.yaml")
