"""Training in a process that belongs to a caller: afterwards its state is restored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from headway.models.layers.attention import attends_by_products, choose_products
from headway.parallel.world import abort_groups
from headway.training.setup.determinism import determinism_restored

#: Variables that a run adds to the environment, besides NCCL's.
_ADDED = (
    "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC", "LOCAL_RANK", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME",
)  # fmt: skip


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Restore the caller's process at the end: switches, threads, random state, environment, process groups."""
    environment = dict(os.environ)
    threads = torch.get_num_threads()
    by_products = attends_by_products()
    grouped = dist.is_initialized()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), determinism_restored():
        try:
            yield
        except BaseException:
            if not grouped:
                abort_groups()
            raise
        finally:
            if dist.is_initialized() and not grouped:  # DeepSpeed creates one even for a single worker
                dist.destroy_process_group()
            torch.set_num_threads(threads)
            choose_products(by_products)
            for name in {name for name in os.environ if name.startswith("NCCL_") or name in _ADDED}:
                if name not in environment:
                    del os.environ[name]
            os.environ.update({name: environment[name] for name in _ADDED if name in environment})
