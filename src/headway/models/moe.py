"""Mixture of experts in place of a feed-forward layer: router, shared experts, balance.

Tokens choose their `experts_per_token` best experts (Shazeer et al. 2017, section 2.1); shared experts see every token
(Dai et al. 2024, DeepSeekMoE, section 3.2). Suffixes of tensor names as in `headway.models.experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headway.config.experts import resolved_balance
from headway.core.dtensors import is_dtensor
from headway.models.experts import Experts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from headway.config import ModelConfig
    from headway.models.shape import Shape

#: Losses are added up in whole multiples of this: sums of integers are the same in every order.
_LOSS_UNIT = 2.0**-20
_LARGEST_LOSS = 2.0**40
#: Integers that a layer counts beside the loads of its experts: tokens, and two losses in units.
_BESIDE_LOADS = 3


class Routing(NamedTuple):
    """Where tokens go."""

    logits_NE: torch.Tensor
    """fp32."""
    scores_NE: torch.Tensor
    """fp32: softmax or sigmoid of the logits."""
    experts_NK: torch.Tensor
    """int64, best first."""
    weights_NK: torch.Tensor
    """fp32, adding up to 1 for each token."""


class SharedExperts(nn.Module):
    """The experts that every token has: as one SwiGLU of their common width."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        gate_NF, up_NF = self.gate_up(x_ND).chunk(2, dim=-1)
        y_ND: torch.Tensor = self.down(F.silu(gate_NF) * up_NF)
        return y_ND


class MixtureOfExperts(nn.Module):
    """Routed and shared experts.

    While training, the router's losses join the objective in the backward pass: their gradient is that of a sum over
    tokens which is added to the loss that is differentiated. So that loss must be a sum over tokens too, and whatever
    scales it has to scale the gradients instead, as `headway.training.step` does, or to set `loss_scale`.
    """

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        super().__init__()
        self.experts_per_token, self.dropout = shape.experts_per_token, config.dropout
        self.score, self.z_weight = config.router_score, config.router_z_loss
        balance = resolved_balance(config)
        self.balance_weight, self.bias_rate = balance["balance_loss"] or 0.0, balance["balance_bias_rate"] or 0.0
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        self.experts = Experts(shape.experts, shape.dim, shape.expert_ffn_dim)
        self.shared = SharedExperts(shape.dim, shape.shared_ffn_dim) if shape.shared_ffn_dim else None
        bias = torch.zeros(shape.experts) if selects_with_bias(config) else None
        self.register_buffer("selection_bias", bias)
        self.loss_scale = 1.0
        """What the loss is multiplied by before it is differentiated."""
        self.row_sharers: ProcessGroup | None = None
        """Workers that compute other positions of the same rows; None when this one has whole rows."""
        self._tally: torch.Tensor | None = None

    @property
    def bias_E(self) -> torch.Tensor | None:
        """fp32, added to the scores where experts are chosen, and nowhere else; None with softmax and no `bias_rate`.

        It changes between steps only, by `after_step`.
        """
        return self.selection_bias  # type: ignore[return-value]

    # The loop over experts reads their loads, and the tally is no matter for a graph; the products are large anyway.
    # This is `torch.compiler.disable`, which loads the compiler where it is used, not where it is named.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, x_BTD: torch.Tensor, counted_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Output of all experts of a token, weighted and added up, (B, T, D).

        Args:
            x_BTD: Normalised residual stream.
            counted_BT: True for tokens that take part in the loss. The others (padding) are computed like them, but
                enter neither the router's losses nor the loads.
        """
        x_ND = x_BTD.flatten(0, -2)
        routing = self.route(x_ND)
        loads_E = count_experts(routing.experts_NK, self.router.out_features)
        y_NKD = self.experts(x_ND, routing.experts_NK, loads_E)
        y_ND = (y_NKD * routing.weights_NK.unsqueeze(-1)).sum(1)
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        y_ND = y_ND.to(y_NKD.dtype)
        if self.training and torch.is_grad_enabled():
            y_ND = self._with_losses(y_ND, routing, loads_E, counted_BT)
        return F.dropout(y_ND.view(x_BTD.shape), self.dropout, self.training)

    def route(self, x_ND: torch.Tensor) -> Routing:
        """Choose the experts of every token, in fp32 whatever `train.precision` is (TF32 where that is asked for)."""
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.float(), _on_own_tokens(self.router.weight).float())
        scores_NE = logits_NE.softmax(-1) if self.score == "softmax" else logits_NE.sigmoid()
        chosen_from_NE = scores_NE.detach()
        if self.bias_E is not None:
            chosen_from_NE = chosen_from_NE + self.bias_E
        experts_NK = chosen_from_NE.topk(self.experts_per_token, dim=-1).indices
        weights_NK = _chosen(scores_NE, experts_NK)
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return Routing(logits_NE, scores_NE, experts_NK, weights_NK)

    def _with_losses(
        self, y_ND: torch.Tensor, routing: Routing, loads_E: torch.Tensor, counted_BT: torch.Tensor | None
    ) -> torch.Tensor:
        counted_N1 = None if counted_BT is None else counted_BT.reshape(-1, 1)
        if counted_N1 is not None:
            loads_E = count_experts(routing.experts_NK, loads_E.numel(), counted_N1)
        tokens = counted_N1.sum() if counted_N1 is not None else loads_E.new_tensor(y_ND.shape[0])
        z = summed_z_loss(routing.logits_NE, counted_N1)
        # The loss of a micro-batch has a factor that knows all its tokens, and one that is a sum over them: so the
        # parts of it that workers with parts of its rows compute add up to the whole.
        all_loads_E, all_tokens = self._over_whole_rows(loads_E, tokens)
        balance = summed_balance_loss(routing.scores_NE, all_loads_E, all_tokens, self.experts_per_token, counted_N1)
        record = torch.cat([loads_E, torch.stack([tokens, _in_units(z), _in_units(balance)])])
        # A loss without a weight stays out altogether: zero times infinity would not.
        terms = [weight * loss for weight, loss in ((self.z_weight, z), (self.balance_weight, balance)) if weight]
        loss = torch.stack(terms).sum() if terms else torch.zeros_like(z)
        joined: torch.Tensor = _JoinLoss.apply(  # type: ignore[no-untyped-call]
            y_ND, loss, self.loss_scale, record, self._add
        )
        return joined

    def _over_whole_rows(self, loads_E: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loads and tokens of all positions of the micro-batch, of which this worker may have a part."""
        if self.row_sharers is None:
            return loads_E, tokens
        everyone = torch.cat([loads_E, tokens.view(1)])
        dist.all_reduce(everyone, group=self.row_sharers)
        return everyone[:-1], everyone[-1]

    def _add(self, record: torch.Tensor) -> None:
        self._tally = record.clone() if self._tally is None else self._tally.add_(record)

    def take_tally(self) -> torch.Tensor | None:
        """What backward passes have counted since the last call, int64 on the layer's device: loads of all experts,
        tokens, and two losses in units. None if there were none."""
        tally, self._tally = self._tally, None
        return tally

    @torch.no_grad()
    def move_bias(self, loads_E: torch.Tensor) -> None:
        """Make overloaded experts less likely and the others more, all by the same amount.

        Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing", algorithm 1; DeepSeek-V3, section 2.1.2.

        Args:
            loads_E: int64, tokens of each expert in the global batch. The signs are those of integers, so every worker
                that knows them has the same bias, bit for bit.
        """
        if self.bias_E is not None and self.bias_rate:
            error_E = loads_E.sum() - loads_E * loads_E.numel()
            self.bias_E.add_(error_E.sign().to(self.bias_E), alpha=self.bias_rate)


def _on_own_tokens(weight: torch.Tensor) -> torch.Tensor:
    """A weight that tensor-parallel workers all have, each for its own tokens: its gradient is one part of a sum."""
    if not is_dtensor(weight):
        return weight
    from torch.distributed.tensor import Partial

    return weight.to_local(grad_placements=[Partial()])


def selects_with_bias(config: ModelConfig) -> bool:
    """Whether routers have a bias: with sigmoid scores always, as Hugging Face checkpoints of that kind do."""
    return config.router_score == "sigmoid" or bool(resolved_balance(config)["balance_bias_rate"])


def count_experts(experts_NK: torch.Tensor, experts: int, counted_N1: torch.Tensor | None = None) -> torch.Tensor:
    """How many tokens each expert has, int64 (E,); exact, since integers are added."""
    ones = torch.ones_like(experts_NK) if counted_N1 is None else counted_N1.expand_as(experts_NK).long()
    tokens = experts_NK.shape[0]
    one_hot = torch.zeros(tokens * experts, dtype=torch.int64, device=experts_NK.device)
    return one_hot.scatter_(0, _flat(experts_NK, experts), ones.flatten()).view(tokens, experts).sum(0)


def _chosen(scores_NE: torch.Tensor, experts_NK: torch.Tensor) -> torch.Tensor:
    """The scores of chosen experts, (N, K)."""
    return scores_NE.flatten().gather(0, _flat(experts_NK, scores_NE.shape[1])).view_as(experts_NK)


def _flat(experts_NK: torch.Tensor, experts: int) -> torch.Tensor:
    """Where chosen experts are in (N, E), flat: where GPUs are to be deterministic, the host waits for whatever is
    scattered in more dimensions, as the gradient of what was gathered is."""
    first_N1 = torch.arange(0, experts_NK.shape[0] * experts, experts, device=experts_NK.device).unsqueeze(1)
    return (first_N1 + experts_NK).flatten()


def summed_z_loss(logits_NE: torch.Tensor, counted_N1: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over tokens of the squared log-sum-exp of their logits (Zoph et al. 2022, ST-MoE, equation 5)."""
    z_N1 = logits_NE.logsumexp(-1, keepdim=True).square()
    return (z_N1 if counted_N1 is None else z_N1.where(counted_N1, 0.0)).sum()


def summed_balance_loss(
    scores_NE: torch.Tensor,
    loads_E: torch.Tensor,
    tokens: torch.Tensor,
    experts_per_token: int,
    counted_N1: torch.Tensor | None = None,
) -> torch.Tensor:
    """E times the sum over experts of load share times mean score share (Fedus et al. 2021, equation 4), times tokens.

    It is taken within a micro-batch. 1 per token when all experts have the same load.
    """
    shares_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    if counted_N1 is not None:
        shares_NE = shares_NE.where(counted_N1, 0.0)
    scale = loads_E.numel() / (experts_per_token * tokens.clamp(min=1))
    return (loads_E * shares_NE.sum(0)).sum() * scale


def _in_units(loss: torch.Tensor) -> torch.Tensor:
    finite = loss.detach().double().nan_to_num(_LARGEST_LOSS).clamp(-_LARGEST_LOSS, _LARGEST_LOSS)
    return (finite / _LOSS_UNIT).round().long()


class _JoinLoss(torch.autograd.Function):
    """Passes a tensor on unchanged; in the backward pass a scalar gets the gradient it has as a summand of the loss.

    What was counted is told then too: a backward pass happens once, also where the forward pass is done again for it.
    """

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, loss: torch.Tensor, scale: float, record: torch.Tensor, tell: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(record)
        ctx.tell, ctx.dtype, ctx.scale = tell, loss.dtype, scale
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        (record,) = ctx.saved_tensors
        ctx.tell(record)
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device), None, None, None


def take_counts(layers: Sequence[MixtureOfExperts | None], experts: int) -> torch.Tensor:
    """What all layers have counted, one row each, int64 on the CPU; zeros for those that other workers have."""
    tallies = [None if layer is None else layer.take_tally() for layer in layers]
    device = next((tally.device for tally in tallies if tally is not None), None)
    nothing = torch.zeros(experts + _BESIDE_LOADS, dtype=torch.int64, device=device)
    # Brought from a GPU at once, and not one after the other.
    return torch.stack([nothing if tally is None else tally for tally in tallies]).cpu()


def after_step(
    layers: Sequence[MixtureOfExperts | None], counts: torch.Tensor, updated: bool, experts_per_token: int
) -> dict[str, float]:
    """Move the routers' biases by what the global batch did, and say what that was.

    Args:
        layers: All of the model; None for those that other workers have.
        counts: Sum over workers of `take_counts`.
        updated: Whether the weights were updated. If not, loss or gradient was not finite, so no bias moves, and what
            was counted tells nothing.

    Returns:
        Metrics: `train/router_z_loss` and `train/router_balance_loss` (means over tokens and layers, before their
        weights), `train/expert_load_max` (largest load over mean load, of the layer where that is most),
        `train/dropped_share` (of the pairs of tokens and experts that were to be computed).
    """
    experts = counts.shape[1] - _BESIDE_LOADS
    loads, tokens, z, balance = counts.split([experts, 1, 1, 1], dim=1)
    seen = int(tokens.sum())
    if not updated or not seen:
        return {}
    for layer, loads_E in zip(layers, loads, strict=True):
        if layer is not None:
            layer.move_bias(loads_E)
    pairs = seen * experts_per_token
    return {
        "train/router_z_loss": int(z.sum()) * _LOSS_UNIT / seen,
        "train/router_balance_loss": int(balance.sum()) * _LOSS_UNIT / seen,
        "train/expert_load_max": float((loads.amax(1) * experts / loads.sum(1)).max()),
        "train/dropped_share": 1.0 - int(loads.sum()) / pairs,
    }
