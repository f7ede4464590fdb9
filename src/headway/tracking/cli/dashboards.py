"""`headway dashboards`: write what Grafana or Prometheus reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import print_table, writing
from headway.core.console import print_line
from headway.tracking.dashboards import BOARDS, export_dashboards, panels
from headway.tracking.kubernetes import Cluster
from headway.tracking.kubernetes import export_dashboards as export_objects

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to.")]
KubernetesOption = Annotated[
    bool, typer.Option("--kubernetes", help="Write objects of Kubernetes, for kube-prometheus-stack, instead.")
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", metavar="NAME", help="Namespace of the objects: that of the runs.")
]

dashboards = typer.Typer(no_args_is_help=True, help="List or write dashboards of runs for Grafana.")


@dashboards.command()
def export(
    folder: FolderArgument, kubernetes: KubernetesOption = False, namespace: NamespaceOption = "default"
) -> None:
    """Write all dashboards as JSON, for Grafana's import or its provisioning.

    [bold]Examples[/bold]

    headway dashboards export monitoring/dashboards
    headway dashboards export monitoring --kubernetes --namespace team
    """
    with writing(folder):
        written = export_objects(folder, Cluster(namespace)) if kubernetes else export_dashboards(folder)
    for path in written:
        print_line(str(path))


@dashboards.command("list")
def list_() -> None:
    """List the dashboards with their panels.

    [bold]Examples[/bold]

    headway dashboards list
    """
    print_table(["DASHBOARD", "PANEL"], [[board, panel.title] for board in BOARDS for panel in panels(board)])
