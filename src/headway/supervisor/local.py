"""Checks before several workers are started on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from headway.config import Config, resolve_grid
from headway.parallel.world import pick_device
from headway.session.attempt import RunOptions, is_finished
from headway.training.available import check_available


def check_local(config: Config, fingerprints: Mapping[str, str], options: RunOptions) -> bool:
    """Check that this machine can run the workers, and return whether the run has steps left.

    Raises:
        HeadwayError: this machine cannot do it.
    """
    resolve_grid(config, config.parallel.workers)
    check_available(config, pick_device(config.train.device))
    return not (options.leave_finished and is_finished(config, fingerprints, options))
