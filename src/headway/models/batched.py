"""The next token of several sequences at once, with the bits that each sequence alone has.

Matrix kernels choose how they add up by the number of rows: with PyTorch and MKL the product of one fp32 row differs
in its last bits from that of the same row among others. So a batch is proven before use, on this machine and with this
model: for every shape of matrix the fastest way is taken whose bits are those of a row alone.

`together`: one product of all rows. `each`: one call that multiplies row by row, which saves calls and no memory
traffic. `loop`: one call per row. A model whose batch has other bits in any of these ways is computed one sequence
after the other, as are models with experts or Mamba-2 layers and those of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.nn import functional as F

from headway.models.decoder import Decoder
from headway.models.hub.transformers_model import TransformersModel
from headway.models.layers.cache import KVCache, RowCaches

if TYPE_CHECKING:
    Model = Decoder | TransformersModel

Way = Literal["together", "each", "loop"]
_WAYS: tuple[Way, ...] = ("together", "each", "loop")
#: Decoding steps that are compared for each size of a batch.
_STEPS = 2


class BatchedSteps:
    """Computes the next logits of sequences, each with a cache of its own, in batches that are proven to be exact.

    The proof takes about three tokens' time for each of `most` rows, on the thread that computes them later.

    Args:
        model: In evaluation mode. Its matrix products are changed for batches; single rows are computed as before.
        most: Rows of the largest batch; a power of two.
        exact: Whether bits must be those of a row alone. Otherwise a batch is one product, faster, and its logits
            differ from those of a row alone by rounding.

    Attributes:
        sizes: Proven sizes of batches, in ascending order; (1,) computes sequences one after the other.
        ways: The way that is taken for each shape of matrix.
    """

    def __init__(self, model: Model, most: int, *, exact: bool = True) -> None:
        self._model = model
        self._rows = 1
        self.sizes: tuple[int, ...] = (1,)
        self.ways: dict[tuple[int, ...], Way] = {}
        if not _is_dense(model) or most == 1:
            return
        decoder = cast("Decoder", model)
        matrices = {tuple(one.weight.shape): one for one in decoder.modules() if isinstance(one, nn.Linear)}
        sizes = [2**power for power in range(1, most.bit_length())]
        weights = [*(one.weight for one in matrices.values()), decoder.projection]
        self.ways = {tuple(one.shape): _way(one, sizes) if exact else "together" for one in weights}
        for module in decoder.layers.modules():
            if isinstance(module, nn.Linear):
                module.forward = partial(self._product, module)  # type: ignore[method-assign]
        if exact:
            sizes = self._proven(sizes)
        self.sizes = (1, *sizes)

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int], caches: Sequence[Any]) -> list[torch.Tensor]:
        """Compute the logits after one more token of each sequence, (V,) each, and add it to its cache."""
        if len(tokens) == 1 or self.sizes == (1,):
            return [self._alone([token], cache) for token, cache in zip(tokens, caches, strict=True)]
        most = self.sizes[-1]
        if len(tokens) > most:
            rest = self.next_logits(tokens[most:], caches[most:])
            return self.next_logits(tokens[:most], caches[:most]) + rest
        return list(self._batch(tokens, caches))

    @torch.no_grad()
    def first_logits(self, prompt: Sequence[int], cache: Any) -> torch.Tensor:
        """Compute the logits after a prompt, (V,), and add it to an empty cache."""
        return self._alone(prompt, cache)

    def _alone(self, ids: Sequence[int], cache: Any) -> torch.Tensor:
        ids_1T = torch.tensor([list(ids)], device=self._device)
        return self._model.next_logits(ids_1T, cache)[0]

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _batch(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> torch.Tensor:
        """Compute a batch that is padded to the next proven size, (rows, V)."""
        decoder = cast("Decoder", self._model)
        size = next(size for size in self.sizes if size >= len(tokens))
        padded = [*tokens, *[0] * (size - len(tokens))]
        self._rows = len(tokens)
        try:
            x_BD = decoder.hidden_states(torch.tensor(padded, device=self._device)[:, None], RowCaches(caches))[:, -1]
            if self.ways[tuple(decoder.projection.shape)] == "together":
                return decoder.logits(x_BD)[: self._rows]
            return torch.cat([decoder.logits(x_BD[row : row + 1]) for row in range(self._rows)])
        finally:
            self._rows = 1

    def _product(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Multiply as the matrix's shape demands where rows are those of a batch; else as always."""
        way = self.ways[tuple(module.weight.shape)]
        if self._rows == 1 or way == "together":
            return F.linear(x, module.weight, module.bias)
        y = x.new_zeros(*x.shape[:-1], module.weight.shape[0])
        y[: self._rows] = _by_row(x[: self._rows], module.weight, module.bias, way)
        return y

    def _proven(self, sizes: list[int]) -> list[int]:
        """Return the sizes of batches whose logits, keys and values are those of every sequence alone."""
        vocabulary = self._model.config.vocab_size
        assert vocabulary is not None
        draw = torch.Generator().manual_seed(0)
        most = min(sizes[-1], max(1, self._model.config.max_sequence_length - _STEPS))
        tokens = torch.randint(vocabulary, (sizes[-1], _STEPS), generator=draw).tolist()
        begun: list[Any] = []
        for row in range(sizes[-1]):
            prompt = torch.randint(vocabulary, (row % most + 1,), generator=draw).tolist()
            begun.append(self._model.new_cache(1, len(prompt) + _STEPS))
            self.first_logits(prompt, begun[-1])
        alone = [cache.copy() for cache in begun]
        wanted = [
            torch.stack([self._alone([tokens[row][step]], alone[row]) for row in range(sizes[-1])])
            for step in range(_STEPS)
        ]
        return [size for size in sizes if self._is_same(size, tokens, begun, alone, wanted=wanted)]

    @torch.no_grad()
    def _is_same(
        self, size: int, tokens: list[list[int]], begun: list[KVCache], alone: list[KVCache], *, wanted: Any
    ) -> bool:
        """Return whether a full and a padded batch of one size give the bits of sequences alone."""
        self.sizes = (1, size)
        for rows in {size, size // 2 + 1}:
            caches = [cache.copy() for cache in begun[:rows]]
            for step in range(_STEPS):
                logits = self._batch([tokens[row][step] for row in range(rows)], caches)
                if not torch.equal(logits, wanted[step][:rows]):
                    return False
            for one, other in zip(caches, alone, strict=False):
                if not (torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)):
                    return False
        return True


def _is_dense(model: Model) -> bool:
    """Return whether a model is the native decoder, and the tokens of its rows meet in no computation."""
    if model.config.implementation == "transformers":
        return False
    shape = cast("Decoder", model).shape
    linear = {type(one) for one in model.modules() if isinstance(one, nn.Linear)}
    return not shape.experts and not shape.mamba_layers and linear <= {nn.Linear}


@torch.no_grad()
def _way(weight: torch.Tensor, sizes: list[int]) -> Way:
    """Return the first way of multiplying rows by a matrix whose bits are those of each row alone."""
    draw = torch.Generator().manual_seed(1)
    x_B1D = torch.randn(sizes[-1], 1, weight.shape[1], generator=draw).to(weight)
    alone = _by_row(x_B1D, weight, None, "loop")
    for way in _WAYS[:-1]:
        if way == "each" and weight.dtype != torch.float32:
            continue  # PyTorch multiplies batches of half precision without a fast kernel
        if all(torch.equal(_by_row(x_B1D[:size], weight, None, way), alone[:size]) for size in sizes):
            return way
    return "loop"


def _by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: Way) -> torch.Tensor:
    """Multiply (B, 1, D) by a matrix (N, D) in one of the ways."""
    if way == "together":
        return F.linear(x, weight, bias)
    if way == "each":
        y = torch.bmm(x, weight.t().expand(len(x), *weight.t().shape))
        return y if bias is None else y + bias
    return torch.cat([F.linear(x[row : row + 1], weight, bias) for row in range(len(x))])
