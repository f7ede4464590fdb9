"""Updates in host memory that continue while the next forward pass begins: each layer waits for its own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from headway.core.model_protocol import Shardable
from headway.parallel.host_weights.transfers import Transfers


class OverlappedUpdate:
    """The updates of layers, on a thread of their own and in the order of the forward pass.

    Layers are those that a model declares (`Shardable`): nothing else uses their parameters. All other parameters, such
    as embeddings and the output projection, may be used anywhere, so they are updated before `start` returns.
    """

    def __init__(self, module: nn.Module, transfers: Transfers) -> None:
        self._transfers = transfers
        units = module.wrap_units() if isinstance(module, Shardable) else ()
        self._unit_of: dict[torch.Tensor, nn.Module] = {p: unit for unit in units for p in unit.parameters()}
        self._waiting: dict[nn.Module, Future[None]] = {}
        self._thread = ThreadPoolExecutor(
            1, "headway-update", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        for unit in units:
            unit.register_forward_pre_hook(self._before_forward)

    def start(self, updates: Iterable[tuple[torch.Tensor, Callable[[], None]]]) -> None:
        """Do what updates parameters outside of layers now, and the rest in the background.

        Args:
            updates: Each parameter with the function that updates it and sends its weights to the device.
        """
        by_unit: dict[nn.Module, list[Callable[[], None]]] = {}
        for p, update in updates:
            unit = self._unit_of.get(p)
            if unit is None:
                update()
            else:
                by_unit.setdefault(unit, []).append(update)
        self._transfers.finish_weights()
        self._waiting = {unit: self._thread.submit(_run, some) for unit, some in by_unit.items()}

    def finish(self) -> None:
        """Wait for all updates; what the device computes from now on has the new weights."""
        for unit in list(self._waiting):
            self._before_forward(unit)

    def _before_forward(self, unit: nn.Module, *_: object) -> None:
        update = self._waiting.pop(unit, None)
        if update is not None:
            update.result()
            self._transfers.finish_weights()


def _run(updates: Iterable[Callable[[], None]]) -> None:
    for update in updates:
        update()
