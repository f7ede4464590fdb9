"""`headway alerts`: write what Grafana or Prometheus reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.command_line import print_table, writing
from headway.core.console import print_line

alerts = typer.Typer(no_args_is_help=True, help="List or write alert rules of runs for Prometheus.")


@alerts.command()
def export(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to.")]) -> None:
    """Write the alert rules as YAML, for rule_files of Prometheus.

    [bold]Examples[/bold]

    headway alerts export monitoring
    """
    from headway.tracking.alert_rules import export_rules

    with writing(folder):
        print_line(str(export_rules(folder)))


@alerts.command("list")
def list_() -> None:
    """List the alert rules.

    [bold]Examples[/bold]

    headway alerts list
    """
    from headway.tracking.alert_rules import RULES

    rows = [[rule.name, rule.severity, rule.hold, rule.promql] for rule in RULES]
    print_table(["ALERT", "SEVERITY", "FOR", "EXPRESSION"], rows)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.add_typer(alerts, name="alerts")
