"""What speaks against several workers on this machine, before any is started."""

from __future__ import annotations

from collections.abc import Mapping

from headway.config import Config, resolve_grid
from headway.parallel.world import pick_device
from headway.session.attempt import RunOptions, is_finished
from headway.training.available import check_available


def check_local(config: Config, fingerprints: Mapping[str, str], options: RunOptions) -> bool:
    """Whether there is something to do.

    Raises:
        HeadwayError: this machine cannot do it.
    """
    resolve_grid(config, config.parallel.workers)
    check_available(config, pick_device(config.train.device))
    return not (options.leave_finished and is_finished(config, fingerprints, options))
