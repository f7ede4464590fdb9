"""`headway prices`: compare, import and refresh prices of machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.clouds.prices.refresh import refresh_prices
from headway.clouds.prices.skypilot import read_catalogue
from headway.core.command_line import DefaultVerb, JsonOption, print_json, print_table
from headway.core.console import notice, print_line
from headway.core.errors import ConfigError
from headway.core.format import counted
from headway.cost.price_book import save_offers, select

if TYPE_CHECKING:
    from headway.cost.offers import Offer

_EXAMPLES = """[bold]Examples[/bold]

headway prices --gpu H100 --spot
headway prices --gpu A100 --cloud gcp --json
headway prices import ~/.sky/catalogs/v8/aws/vms.csv
headway prices refresh azure --region eastus
"""
HELP = f"""Compare the prices of machines with accelerators between clouds and regions.

Lists a dated snapshot, and what was imported or refreshed since; old prices are marked. Give a run the price of an \
offer by its name: cost.offer=aws/us-east-1/p5.48xlarge/spot.

{_EXAMPLES}
Exit codes: 0 listed, 2 usage, or no such accelerator, cloud or region.
"""


class ListByDefault(DefaultVerb):
    """Makes `headway prices --gpu H100` mean `headway prices list --gpu H100`."""

    default = "list"


prices = typer.Typer(cls=ListByDefault, help=HELP, subcommand_metavar="[COMMAND] [ARGS]...")


@prices.command("list")
def list_(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Accelerator, e.g. H100.")] = None,
    spot: Annotated[
        bool | None, typer.Option("--spot/--on-demand", help="Only spot, or only on-demand prices.")
    ] = None,
    cloud: Annotated[str | None, typer.Option("--cloud", help="Cloud, e.g. aws.")] = None,
    region: Annotated[str | None, typer.Option("--region", help="Region of a cloud.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the known prices of machines, the cheapest accelerator first; `list` may be left out.

    [bold]Examples[/bold]

    headway prices list --gpu H100 --spot
    """
    found = select(gpu, spot=spot, cloud=cloud, region=region)
    if as_json:
        print_json([offer.as_json() for offer in found])
    elif not found:
        notice("no known offer is like that")
    else:
        _print(found)


@prices.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="SkyPilot's vms.csv of a cloud.")],
    cloud: Annotated[
        str | None, typer.Option("--cloud", help="Name of the cloud; that of the file's folder when not given.")
    ] = None,
    date: Annotated[
        str | None,
        typer.Option("--date", help="When the prices were valid; the file's time when not given."),
    ] = None,
) -> None:
    """Import the prices of a catalogue of SkyPilot.

    [bold]Examples[/bold]

    headway prices import ~/.sky/catalogs/v8/aws/vms.csv
    headway prices import vms.csv --cloud gcp --date 2026-11-01
    """
    found = read_catalogue(file, cloud, _day(date))
    _notice_kept(found, save_offers(f"skypilot-{found[0].cloud}", found))


@prices.command()
def refresh(
    cloud: Annotated[Literal["aws", "azure", "gcp"], typer.Argument(metavar="aws|azure|gcp", help="Cloud.")],
    region: Annotated[list[str] | None, typer.Option("--region", help="Region; may be repeated.")] = None,
) -> None:
    """Fetch the current prices of a cloud: AWS needs credentials, GCP an API key, Azure neither.

    [bold]Examples[/bold]

    headway prices refresh azure
    headway prices refresh aws --region us-east-1 --region us-west-2
    GOOGLE_API_KEY=... headway prices refresh gcp
    """
    _notice_kept(*refresh_prices(cloud, region or ()))


def _notice_kept(offers: Sequence[Offer], path: Path) -> None:
    notice(f"{counted(len(offers), 'offer')} in {path}")


def _day(text: str | None) -> Any:
    from datetime import date

    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"'{text}' is not a date", where="--date", fix="--date 2026-11-26") from None


def _print(offers: Sequence[Offer]) -> None:
    headers = ["OFFER", "GPU", "GPUS", "$/HOUR", "$/GPU-HOUR", "HISTORY", "INTERRUPTED", "AGE"]
    rows = [
        [
            offer.key,
            offer.gpu,
            str(offer.gpus),
            f"{offer.usd_per_hour:,.2f}",
            f"{offer.usd_per_gpu_hour:,.2f}",
            _history(offer),
            offer.interruption or "n/a",
            offer.age_text(),
        ]
        for offer in offers
    ]
    print_table(headers, rows, numeric=range(2, 5))
    stale = sum(offer.is_stale() for offer in offers)
    if stale:
        print_line(
            f"{stale} of {len(offers)} prices are stale: headway prices refresh, or import, brings newer ones; --json"
            " has the source of each"
        )


def _history(offer: Offer) -> str:
    if not offer.history:
        return "n/a"
    prices = [price for _, price in offer.history]
    days = (offer.history[-1][0] - offer.history[0][0]).days + 1
    return f"{min(prices):,.2f} to {max(prices):,.2f} in {days} d"
