"""Mamba-2 mixer: a state space with one decay per head, computed in chunks by matrix products (Dao & Gu 2024).

Documents of a packed row are kept apart: convolution and state begin anew with each of them, so a packed row gives what
its documents give alone.

Tensor-name suffixes: B rows, T positions, C chunks, Q positions of a chunk (I of the output, J of the input), G groups,
R heads of a group, H = G * R heads, P width of a head, N width of a state, D width of the residual stream, W width of
the convolution, E channels of the convolution.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from headway.config import ModelConfig
from headway.core.types import Fusion
from headway.models.layers.attention import Positions
from headway.models.layers.cache import KVCache, MambaState
from headway.models.shape import Shape


class Mamba(nn.Module):
    """Mamba-2 mixer (Dao & Gu 2024, section 7.1), with the norm after the gate, as in Nemotron-H.

    All but the two projections is computed in fp32 whatever `train.precision` is.
    """

    def __init__(self, config: ModelConfig, shape: Shape, layer: int) -> None:
        super().__init__()
        assert config.mamba is not None
        self.layer = layer
        self.dropout = config.dropout
        self.eps = config.norm_eps
        self.sizes = sizes = config.mamba
        self.input = nn.Linear(shape.dim, sizes.projected, bias=False)
        # (E, 1, W): no optimizer takes it for a matrix of a product.
        self.conv_weight = nn.Parameter(torch.empty(sizes.channels, 1, sizes.conv_width))
        self.conv_bias = nn.Parameter(torch.empty(sizes.channels)) if sizes.conv_bias else None
        self.step_bias = nn.Parameter(torch.empty(sizes.heads))
        self.log_decay = nn.Parameter(torch.empty(sizes.heads))
        self.skip = nn.Parameter(torch.empty(sizes.heads))
        self.norm_weight = nn.Parameter(torch.empty(sizes.width))
        self.output = nn.Linear(sizes.width, shape.dim, bias=False)

    def fusions(self) -> dict[nn.Parameter, Fusion]:
        """Return the rows of gate, inputs, B, C and steps (`headway.core.model_protocol.FusesProjections`)."""
        sizes = self.sizes
        inner = self.sizes.groups * self.sizes.state_dim
        fusion = Fusion((sizes.width, sizes.width, inner, inner, sizes.heads))
        return dict.fromkeys(self.input.parameters(), fusion)

    def forward(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | None) -> torch.Tensor:
        state = None if cache is None else cache.states[self.layer]
        projected = self.input(x_BTD)
        with torch.autocast(x_BTD.device.type, enabled=False):
            y = self._mix(projected.float(), positions.documents, state).to(projected.dtype)
        return F.dropout(self.output(y), self.dropout, self.training)

    def _mix(
        self, projected: torch.Tensor, documents_BT: torch.Tensor | None, state: MambaState | None
    ) -> torch.Tensor:
        sizes = self.sizes
        gate, mixed_BTE, step_BTH = projected.split([sizes.width, sizes.channels, sizes.heads], dim=-1)
        before = mixed_BTE.new_zeros(len(mixed_BTE), sizes.conv_width - 1, sizes.channels)
        extended_BTE = torch.cat((before if state is None else state.inputs, mixed_BTE), dim=1)
        mixed_BTE = F.silu(causal_conv(extended_BTE, self.conv_weight.float(), self.conv_bias, documents_BT))
        inner = sizes.groups * sizes.state_dim
        x, b, c = mixed_BTE.split([sizes.width, inner, inner], dim=-1)
        step_BTH = F.softplus(step_BTH + self.step_bias).clamp(min=sizes.min_step)
        x_BTHP = x.unflatten(-1, (sizes.heads, -1))
        y_BTHP, last = scan(
            x_BTHP * step_BTH.unsqueeze(-1),
            -self.log_decay.float().exp() * step_BTH,
            b.unflatten(-1, (sizes.groups, -1)),
            c.unflatten(-1, (sizes.groups, -1)),
            chunk=sizes.chunk,
            documents_BT=documents_BT,
            first=None if state is None else state.sums,
        )
        if state is not None:
            state.inputs.copy_(extended_BTE[:, 1 - sizes.conv_width :])
            state.sums.copy_(last)
        y = (y_BTHP + x_BTHP * self.skip.unsqueeze(-1)).flatten(2) * F.silu(gate)
        grouped = y.unflatten(-1, (sizes.groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(2) * self.norm_weight


def first_mamba_value(
    name: str, size: tuple[int, ...], config: ModelConfig, generator: torch.Generator
) -> torch.Tensor:
    """Return the first value of a parameter that is no matrix of a product (Gu & Dao 2023, sections 3.6 and 4.6).

    Decays are 1 to H, skips and gains 1. Steps are log-uniform; their bias is what softplus turns into them.
    """
    sizes = config.mamba
    assert sizes is not None
    if name.endswith("conv_weight"):
        bound = size[-1] ** -0.5
        return torch.empty(size).uniform_(-bound, bound, generator=generator)
    if name.endswith("log_decay"):
        return torch.arange(1, size[0] + 1, dtype=torch.float32).log()
    if name.endswith("step_bias"):
        low = math.log(max(sizes.min_step, 1e-4))
        high = math.log(sizes.max_step)
        step_H = torch.empty(size).uniform_(low, max(low, high), generator=generator).exp()
        return step_H + torch.log(-torch.expm1(-step_H))
    return torch.zeros(size) if name.endswith("bias") else torch.ones(size)


def causal_conv(
    extended_BTE: torch.Tensor, weight: torch.Tensor, bias_E: torch.Tensor | None, documents_BT: torch.Tensor | None
) -> torch.Tensor:
    """Convolve each channel with its own kernel over a position and the W - 1 before it.

    Args:
        extended_BTE: The inputs, after W - 1 earlier ones.
        weight: (E, 1, W); the last element is that of the position itself.
        bias_E: Bias of the channels.
        documents_BT: Numbers of documents; inputs of another one count as zeros.
    """
    W = weight.shape[-1]
    T = extended_BTE.shape[1] - W + 1
    y_BTE = extended_BTE[:, W - 1 :] * weight[:, 0, W - 1]
    for back in range(1, min(W, T + W - 1)):
        part_BTE = extended_BTE[:, W - 1 - back : W - 1 - back + T] * weight[:, 0, W - 1 - back]
        if documents_BT is not None:
            other_BT = torch.ones_like(documents_BT, dtype=torch.bool)
            other_BT[:, back:] = documents_BT[:, back:] != documents_BT[:, :-back]
            part_BTE = part_BTE.masked_fill(other_BT.unsqueeze(-1), 0.0)
        y_BTE = y_BTE + part_BTE
    return y_BTE if bias_E is None else y_BTE + bias_E


def scan(
    x_BTHP: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    b_BTGN: torch.Tensor,
    c_BTGN: torch.Tensor,
    *,
    chunk: int,
    documents_BT: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the state space h_t = a_t h_{t-1} + b_t x_t, y_t = c_t h_t by chunks (Dao & Gu 2024, section 6).

    Within a chunk, outputs are attention scores c b^T times decays times inputs. The state at the end of each chunk is
    a product too; states are passed on by the products of the decays of whole chunks, and give the rest of the outputs.
    With documents, a state is passed on only within one: nothing of it is left when the next one begins.

    No operation depends on timing: sums run along dimensions of products, in a fixed order.

    Args:
        x_BTHP: Inputs times their steps, fp32.
        log_decay_BTH: Logarithms of the decays a, at most 0.
        b_BTGN, c_BTGN: Input and output vectors; head h has those of group h // R.
        chunk: Positions of a chunk.
        documents_BT: Numbers of documents, which do not fall along a row.
        first: State before the first position, (B, G, N, R * P); not together with documents.

    Returns:
        Outputs (B, T, H, P), and the state after the last position, (B, G, N, R * P).
    """
    T = x_BTHP.shape[1]
    P = x_BTHP.shape[3]
    G = b_BTGN.shape[2]
    Q = min(chunk, T)
    C = -(-T // Q)
    # Positions after the end add nothing and decay nothing, so that the last state is that of the last position.
    x, log_decay, b, c = (_in_chunks(t, C, Q) for t in (x_BTHP, log_decay_BTH, b_BTGN, c_BTGN))
    links = None if documents_BT is None else _Links.of(documents_BT, C, Q)
    # Sums begin anew in each document: in a difference of sums the earlier one would leave its rounding.
    sum_BCHQ = running_sum(log_decay.transpose(2, 3), None if links is None else links.number_BCQ.unsqueeze(2))
    spread_BCHIJ = sum_BCHQ.unsqueeze(-1) - sum_BCHQ.unsqueeze(-2)
    unseen = torch.ones(Q, Q, dtype=torch.bool, device=x.device).triu(1)
    if links is not None:
        unseen = unseen | links.other_BCIJ.unsqueeze(2)
    decay_BCHIJ = spread_BCHIJ.masked_fill(unseen, -torch.inf).exp()

    b_BCGQN = b.transpose(2, 3)
    c_BCGQN = c.transpose(2, 3)
    x_BCGQRP = x.unflatten(3, (G, -1)).transpose(2, 3)
    score_BCGIJ = c_BCGQN @ b_BCGQN.transpose(-1, -2)
    weight = (score_BCGIJ.unsqueeze(3) * decay_BCHIJ.unflatten(2, (G, -1))).flatten(2, 3)
    y_BCHQP = weight @ x.transpose(2, 3)

    to_end_BCHQ = sum_BCHQ[..., -1:] - sum_BCHQ
    from_start_BCHQ = sum_BCHQ
    if links is not None:
        to_end_BCHQ = to_end_BCHQ.masked_fill(~links.at_end_BCQ.unsqueeze(2), -torch.inf)
        from_start_BCHQ = from_start_BCHQ.masked_fill(~links.at_start_BCQ.unsqueeze(2), -torch.inf)
    to_end_BCHQ = to_end_BCHQ.exp()
    from_start_BCHQ = from_start_BCHQ.exp()
    decayed = x_BCGQRP * _by_group(to_end_BCHQ, G)
    added = b_BCGQN.transpose(-1, -2) @ decayed.flatten(4)  # (B, C, G, N, R * P): what each chunk adds to the state
    start = _pass_states(added, sum_BCHQ[..., -1], P, None if links is None else links.passes_BCC, first)
    carried = (c_BCGQN @ start).unflatten(-1, (-1, P)) * _by_group(from_start_BCHQ, G)
    y = y_BCHQP.transpose(2, 3) + carried.transpose(2, 3).flatten(3, 4)
    last = start[:, -1] * _over_widths(from_start_BCHQ[:, -1, :, -1], G, P) + added[:, -1]
    return y.flatten(1, 2)[:, :T], last


def _in_chunks(x: torch.Tensor, chunks: int, length: int) -> torch.Tensor:
    """Cut the positions of (B, T, ...) into chunks, (B, C, Q, ...); zeros fill the last one."""
    missing = chunks * length - x.shape[1]
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return torch.unflatten(x, 1, (chunks, length))


def _by_group(x_BCHQ: torch.Tensor, groups: int) -> torch.Tensor:
    """Rearrange a factor of each head to (B, C, G, Q, R, 1)."""
    return torch.unflatten(x_BCHQ, 2, (groups, -1)).transpose(3, 4).unsqueeze(-1)


def _over_widths(x_BH: torch.Tensor, groups: int, width: int) -> torch.Tensor:
    """Rearrange a factor of each head to that of a state, (..., G, 1, R * P)."""
    return torch.unflatten(x_BH, -1, (groups, -1)).repeat_interleave(width, dim=-1).unsqueeze(-2)


class _Links(NamedTuple):
    """Which positions and chunks belong to the same document."""

    number_BCQ: torch.Tensor
    """Numbers of the documents."""
    other_BCIJ: torch.Tensor
    """True for two positions of a chunk in different documents."""
    at_end_BCQ: torch.Tensor
    """True for positions in the document in which their chunk ends."""
    at_start_BCQ: torch.Tensor
    """True for positions in the document in which the chunk before ended."""
    passes_BCC: torch.Tensor
    """True where the chunk before the first index ends in the document in which the chunk of the second index ends."""

    @classmethod
    def of(cls, documents_BT: torch.Tensor, chunks: int, length: int) -> _Links:
        """Compare the documents of a row's chunks."""
        missing = chunks * length - documents_BT.shape[1]
        filled = torch.cat((documents_BT, documents_BT[:, -1:].expand(-1, missing)), dim=1)
        number_BCQ = filled.unflatten(1, (chunks, length))
        end_BC = number_BCQ[..., -1]
        before_BC = torch.cat((torch.full_like(end_BC[:, :1], -1), end_BC[:, :-1]), dim=1)
        return cls(
            number_BCQ,
            number_BCQ.unsqueeze(-1) != number_BCQ.unsqueeze(-2),
            number_BCQ == end_BC.unsqueeze(-1),
            number_BCQ == before_BC.unsqueeze(-1),
            before_BC.unsqueeze(-1) == end_BC.unsqueeze(-2),
        )


def _pass_states(
    added: torch.Tensor,
    decay_BCH: torch.Tensor,
    width: int,
    passes_BCC: torch.Tensor | None,
    first: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the state at the start of each chunk, (B, C, G, N, R * P).

    Args:
        added: What each chunk adds to the state at its end, of that shape.
        decay_BCH: Logarithm of the decay over a whole chunk.
        width: P.
        passes_BCC: As in `_Links`; all states are passed on without it.
        first: State before the first chunk.
    """
    C, G, N = added.shape[1:4]
    decay_BHC = decay_BCH.transpose(1, 2)
    unseen = torch.ones(C, C, dtype=torch.bool, device=added.device).triu()
    # From the end of chunk J to the start of chunk I, the chunks between them decay. They are summed for each J alone:
    # a difference of sums over the row would carry the rounding of a strong decay into all chunks after it.
    after_BHJC = decay_BHC.unsqueeze(-2).masked_fill(unseen.mT, 0.0)
    spread_BHIJ = F.pad(running_sum(after_BHJC)[..., :-1], (1, 0)).mT
    if passes_BCC is not None:
        unseen = unseen | ~passes_BCC.unsqueeze(1)
    decay_BHIJ = spread_BHIJ.masked_fill(unseen, -torch.inf).exp()
    by_head = added.unflatten(-1, (-1, width)).permute(0, 2, 4, 1, 3, 5)  # (B, G, R, C, N, P)
    start = (decay_BHIJ @ by_head.flatten(1, 2).flatten(3)).unflatten(-1, (N, width))  # (B, H, C, N, P)
    start = torch.unflatten(start, 1, (G, -1)).permute(0, 3, 1, 4, 2, 5).flatten(4)
    if first is None:
        return start
    before_BHC = F.pad(running_sum(decay_BHC)[..., :-1], (1, 0))
    return start + first.unsqueeze(1) * _over_widths(before_BHC.exp().transpose(1, 2), G, width)


def running_sum(x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the elements up to each one along the last dimension, from the first one of its document if these are given.

    It adds shifted copies, whose distance doubles, since `torch.cumsum` is not deterministic on GPUs.

    Args:
        x: (..., Q).
        documents: Numbers that do not fall along the last dimension, (..., Q).
    """
    step = 1
    while step < x.shape[-1]:
        shifted = F.pad(x[..., :-step], (step, 0))
        if documents is not None:
            begins = F.pad(documents[..., step:] != documents[..., :-step], (step, 0), value=True)
            shifted = shifted.masked_fill(begins, 0.0)
        x = x + shifted
        step *= 2
    return x
