"""Mixture of experts instead of a feed-forward layer: router, shared experts, balance.

Tokens choose their `experts_per_token` best experts (Shazeer et al. 2017, section 2.1); shared experts compute every
token (Dai et al. 2024, DeepSeekMoE, section 3.2). Tensor-name suffixes as in `headway.models.layers.experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from headway.config import ModelConfig
from headway.config.derived.experts import resolved_balance
from headway.core.startup.dtensors import is_dtensor
from headway.core.types import Fusion
from headway.models.layers.experts import Experts
from headway.models.shape import Shape

#: Losses are summed in integer multiples of this unit: integer sums do not depend on the order.
_LOSS_UNIT = 2.0**-20
_LARGEST_LOSS = 2.0**40
#: Integers that a layer counts in addition to the loads of its experts: tokens, and two losses in units.
_EXTRA_COUNTS = 3


class Routing(NamedTuple):
    """The experts chosen for each token."""

    logits_NE: torch.Tensor
    """fp32."""
    scores_NE: torch.Tensor
    """fp32: softmax or sigmoid of the logits."""
    experts_NK: torch.Tensor
    """int64, best first."""
    weights_NK: torch.Tensor
    """fp32; they add up to 1 for each token if they are normalised."""


class SharedExperts(nn.Module):
    """The experts that compute every token, as one SwiGLU of their combined width."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def fusions(self) -> dict[nn.Parameter, Fusion]:
        """Return the rows of the gate and of the linear branch (`headway.core.model_protocol.FusesProjections`)."""
        return dict.fromkeys(self.gate_up.parameters(), Fusion((self.gate_up.weight.shape[0] // 2,) * 2))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        gate_NF, up_NF = self.gate_up(x_ND).chunk(2, dim=-1)
        y_ND: torch.Tensor = self.down(F.silu(gate_NF) * up_NF)
        return y_ND


class MixtureOfExperts(nn.Module):
    """Routed and shared experts.

    In training, the router losses join the objective in the backward pass: their gradient is that of a sum over tokens,
    added to the loss being differentiated. That loss must therefore be a sum over tokens too. A caller that scales the
    loss must scale the gradients instead, as `headway.training.step` does, or set `loss_scale`.
    """

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        super().__init__()
        self.experts_per_token = shape.experts_per_token
        self.dropout = config.dropout
        self.normalizes = config.normalize_router_weights
        self.scale = config.router_scale
        self.score = config.router_score
        balance = {key: value or 0.0 for key, value in resolved_balance(config).items()}
        self.z_weight = balance["router_z_loss"]
        self.balance_weight = balance["balance_loss"]
        self.bias_rate = balance["balance_bias_rate"]
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        self.experts = Experts(shape.experts, shape.dim, shape.expert_ffn_dim)
        self.shared = SharedExperts(shape.dim, shape.shared_ffn_dim) if shape.shared_ffn_dim else None
        bias = torch.zeros(shape.experts) if selects_with_bias(config) else None
        self.register_buffer("selection_bias", bias)
        self.loss_scale = 1.0
        """Factor of the loss in the backward pass."""
        self.row_sharers: ProcessGroup | None = None
        """The workers that compute other positions of the same rows; None if rows are whole."""
        self._tally: torch.Tensor | None = None

    @property
    def bias_E(self) -> torch.Tensor | None:
        """fp32 bias of the scores, used only to choose experts; None with softmax scores and no `bias_rate`.

        Only `after_step` changes it, between steps.
        """
        return self.selection_bias  # type: ignore[return-value]

    # Not compiled: the loop over experts reads their loads on the host, the tally is a side effect, and the products
    # are large anyway. This is what `torch.compiler.disable` does, without importing the compiler here.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, x_BTD: torch.Tensor, counted_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the weighted sum of the outputs of each token's experts, (B, T, D).

        Args:
            x_BTD: Normalised residual stream.
            counted_BT: True for tokens that enter the loss. The other tokens (padding) are computed too, but enter
                neither the router's losses nor the loads.
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
        """Choose the experts of every token, in fp32 whatever `train.precision` is (TF32 if enabled)."""
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.float(), _on_own_tokens(self.router.weight).float())
        scores_NE = logits_NE.softmax(-1) if self.score == "softmax" else logits_NE.sigmoid()
        chosen_from_NE = scores_NE.detach()
        if self.bias_E is not None:
            chosen_from_NE = chosen_from_NE + self.bias_E
        experts_NK = chosen_from_NE.topk(self.experts_per_token, dim=-1).indices
        weights_NK = _chosen(scores_NE, experts_NK)
        if self.normalizes:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        if self.scale != 1.0:
            weights_NK = weights_NK * self.scale
        return Routing(logits_NE, scores_NE, experts_NK, weights_NK)

    def _with_losses(
        self, y_ND: torch.Tensor, routing: Routing, loads_E: torch.Tensor, counted_BT: torch.Tensor | None
    ) -> torch.Tensor:
        counted_N1 = None if counted_BT is None else counted_BT.reshape(-1, 1)
        if counted_N1 is not None:
            loads_E = count_experts(routing.experts_NK, loads_E.numel(), counted_N1)
        tokens = counted_N1.sum() if counted_N1 is not None else loads_E.new_tensor(y_ND.shape[0])
        z = summed_z_loss(routing.logits_NE, counted_N1)
        # The balance loss of a micro-batch is a factor over all its tokens times a sum over them. With that factor
        # summed over whole rows, the losses of the workers that share rows add up to the loss of the rows.
        all_loads_E, all_tokens = self._over_whole_rows(loads_E, tokens)
        balance = summed_balance_loss(routing.scores_NE, all_loads_E, all_tokens, self.experts_per_token, counted_N1)
        record = torch.cat([loads_E, torch.stack([tokens, _in_units(z), _in_units(balance)])])
        # Leave out a loss of weight zero altogether: zero times infinity is NaN.
        terms = [weight * loss for weight, loss in ((self.z_weight, z), (self.balance_weight, balance)) if weight]
        loss = torch.stack(terms).sum() if terms else torch.zeros_like(z)
        joined: torch.Tensor = _JoinLoss.apply(  # type: ignore[no-untyped-call]
            y_ND, loss, self.loss_scale, record, self._add
        )
        return joined

    def _over_whole_rows(self, loads_E: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum loads and tokens over all positions of the micro-batch, of which this worker may have only some."""
        if self.row_sharers is None:
            return loads_E, tokens
        everyone = torch.cat([loads_E, tokens.view(1)])
        dist.all_reduce(everyone, group=self.row_sharers)
        return everyone[:-1], everyone[-1]

    def _add(self, record: torch.Tensor) -> None:
        self._tally = record.clone() if self._tally is None else self._tally.add_(record)

    def take_tally(self) -> torch.Tensor | None:
        """Return and reset the counts of the backward passes since the last call; None if there were none.

        The counts are int64 on the layer's device: loads of all experts, tokens, and two losses in units.
        """
        tally = self._tally
        self._tally = None
        return tally

    @torch.no_grad()
    def move_bias(self, loads_E: torch.Tensor) -> None:
        """Make overloaded experts less likely and the others more likely, all by the same amount.

        Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing", algorithm 1; DeepSeek-V3, section 2.1.2.

        Args:
            loads_E: int64, tokens of each expert in the global batch. Signs of integers are exact, so the bias is
                identical on every worker, bit for bit.
        """
        if self.bias_E is not None and self.bias_rate:
            error_E = loads_E.sum() - loads_E * loads_E.numel()
            self.bias_E.add_(error_E.sign().to(self.bias_E), alpha=self.bias_rate)


def _on_own_tokens(weight: torch.Tensor) -> torch.Tensor:
    """Return the local weight of tensor-parallel workers that each apply it to their own tokens.

    Each worker's gradient is then a partial sum.
    """
    if not is_dtensor(weight):
        return weight
    from torch.distributed.tensor import Partial

    return weight.to_local(grad_placements=[Partial()])


def selects_with_bias(config: ModelConfig) -> bool:
    """Return whether routers have a bias; with sigmoid scores they always do, as in Hugging Face checkpoints."""
    return config.router_score == "sigmoid" or bool(resolved_balance(config)["balance_bias_rate"])


def count_experts(experts_NK: torch.Tensor, experts: int, counted_N1: torch.Tensor | None = None) -> torch.Tensor:
    """Count the tokens of each expert, int64 (E,); exact, since integers are added."""
    ones = torch.ones_like(experts_NK) if counted_N1 is None else counted_N1.expand_as(experts_NK).long()
    tokens = experts_NK.shape[0]
    one_hot = torch.zeros(tokens * experts, dtype=torch.int64, device=experts_NK.device)
    return one_hot.scatter_(0, _flat(experts_NK, experts), ones.flatten()).view(tokens, experts).sum(0)


def _chosen(scores_NE: torch.Tensor, experts_NK: torch.Tensor) -> torch.Tensor:
    """Gather the scores of the chosen experts, (N, K)."""
    return scores_NE.flatten().gather(0, _flat(experts_NK, scores_NE.shape[1])).view_as(experts_NK)


def _flat(experts_NK: torch.Tensor, experts: int) -> torch.Tensor:
    """Compute the flat indices of the chosen experts in (N, E).

    Indices in more dimensions would make the host wait on deterministic GPUs: the gradient of a gather is a scatter.
    """
    first_N1 = torch.arange(0, experts_NK.shape[0] * experts, experts, device=experts_NK.device).unsqueeze(1)
    return (first_N1 + experts_NK).flatten()


def summed_z_loss(logits_NE: torch.Tensor, counted_N1: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the squared log-sum-exp of the logits over tokens (Zoph et al. 2022, ST-MoE, equation 5)."""
    z_N1 = logits_NE.logsumexp(-1, keepdim=True).square()
    return (z_N1 if counted_N1 is None else z_N1.where(counted_N1, 0.0)).sum()


def summed_balance_loss(
    scores_NE: torch.Tensor,
    loads_E: torch.Tensor,
    tokens: torch.Tensor,
    experts_per_token: int,
    counted_N1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the balance loss of a micro-batch, summed over its tokens.

    Per token it is E times the sum over experts of load share times mean score share (Fedus et al. 2021, equation 4),
    which is 1 when all experts have the same load.
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
    """Return a tensor unchanged, and give a scalar in the backward pass the gradient of a summand of the loss.

    The backward pass also reports the counts: it happens once even if the forward pass is recomputed for it.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, loss: torch.Tensor, scale: float, *counting: Any) -> torch.Tensor:
        record, report = counting
        ctx.save_for_backward(record)
        ctx.report = report
        ctx.dtype = loss.dtype
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        (record,) = ctx.saved_tensors
        ctx.report(record)
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device), None, None, None


def take_counts(layers: Sequence[MixtureOfExperts | None], experts: int) -> torch.Tensor:
    """Return the counts of all layers, one row each, int64 on the CPU; zeros for layers of other workers."""
    tallies = [None if layer is None else layer.take_tally() for layer in layers]
    device = next((tally.device for tally in tallies if tally is not None), None)
    nothing = torch.zeros(experts + _EXTRA_COUNTS, dtype=torch.int64, device=device)
    # One copy from the GPU instead of one per layer.
    return torch.stack([nothing if tally is None else tally for tally in tallies]).cpu()


def after_step(
    layers: Sequence[MixtureOfExperts | None], counts: torch.Tensor, updated: bool, experts_per_token: int
) -> dict[str, float]:
    """Move the routers' biases by the loads of the global batch, and return its metrics.

    Args:
        layers: The layers with experts of the whole model; None for layers of other workers.
        counts: Sum of `take_counts` over workers.
        updated: Whether the weights were updated. If not, the loss or a gradient was not finite: biases stay, and
            the counts mean nothing.

    Returns:
        Metrics: `train/router_z_loss` and `train/router_balance_loss` (means over tokens and layers, before their
        weights), `train/expert_load_max` (largest load over mean load, maximum over layers), `train/dropped_share`
        (share of the pairs of token and expert that were dropped).
    """
    experts = counts.shape[1] - _EXTRA_COUNTS
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
