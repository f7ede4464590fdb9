"""Two offers of the same machine in two regions, for tests of the choice between places."""

from __future__ import annotations

from datetime import date

from headway.cost.offers import Offer, make_offer

EAST, WEST = "aws/us-east-1/p5.48xlarge/spot", "aws/us-west-2/p5.48xlarge/spot"


def offer(key: str, usd_per_hour: float) -> Offer:
    """An offer of today."""
    cloud, region, instance, _ = key.split("/")
    return make_offer(
        {
            "cloud": cloud, "region": region, "instance": instance, "gpu": "H100", "gpus": 8, "spot": True,
            "usd_per_hour": usd_per_hour, "source": "made", "date": date.today().isoformat(),
        }
    )  # fmt: skip
