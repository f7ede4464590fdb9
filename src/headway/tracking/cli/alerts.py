"""`headway alerts`: write what Grafana or Prometheus reads."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.core.command_line import print_table, writing
from headway.core.console import print_line
from headway.tracking.alert_rules import RULES, export_rules
from headway.tracking.cli.dashboards import FolderArgument, KubernetesOption, NamespaceOption
from headway.tracking.kubernetes import Cluster, export_alerts

alerts = typer.Typer(no_args_is_help=True, help="List or write alert rules of runs for Prometheus.")


@alerts.command()
def export(
    folder: FolderArgument,
    kubernetes: KubernetesOption = False,
    namespace: NamespaceOption = "default",
    *,
    release: Annotated[
        str, typer.Option("--release", metavar="NAME", help="Helm release of kube-prometheus-stack.")
    ] = "kube-prometheus-stack",
    image: Annotated[
        str | None,
        typer.Option("--image", help="Image with Headway: also write a Deployment of the exporter."),
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option("--claim", metavar="NAME", help="Volume claim with the runs that it reads."),
    ] = None,
) -> None:
    """Write the alert rules as YAML, for rule_files of Prometheus.

    With --kubernetes: a PrometheusRule, a ServiceMonitor for `headway top --serve`, and values for the charts of
    kube-prometheus-stack and DCGM's exporter.

    [bold]Examples[/bold]

    headway alerts export monitoring
    headway alerts export monitoring --kubernetes --namespace team \\
    --image registry.example/headway:1 --claim runs
    """
    with writing(folder):
        cluster = Cluster(namespace, release, image, claim)
        written = export_alerts(folder, cluster) if kubernetes else [export_rules(folder)]
    for path in written:
        print_line(str(path))


@alerts.command("list")
def list_() -> None:
    """List the alert rules.

    [bold]Examples[/bold]

    headway alerts list
    """
    rows = [[rule.name, rule.severity, rule.hold, rule.promql] for rule in RULES]
    print_table(["ALERT", "SEVERITY", "FOR", "EXPRESSION"], rows)
