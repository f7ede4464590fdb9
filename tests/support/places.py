"""What tests of prices that drive a training share: two offers of a machine, and a loss that takes its time."""

from __future__ import annotations

from datetime import date

from headway.cost.offers import Offer, make_offer

#: The usual loss, which takes so long that the week has time to pass.
SLOW_LOSS = """
import os, time
from torch.nn import functional as F
def slow(logits, batch):
    time.sleep(float(os.environ.get("NAP", 0)))
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), ignore_index=-100, reduction="sum")
"""
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
