"""A model of transformers, trained by the contract of the native decoder: ids and targets in, a summed loss out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headway.core.errors import ConfigError
from headway.core.types import IGNORE_TARGET, Checkpointing, Fusion
from headway.models.hub.fusions import find_fusions
from headway.models.hub.router_loss import balance_loss
from headway.models.loss import linear_cross_entropy
from headway.models.recompute import in_host_memory, selective_contexts

if TYPE_CHECKING:
    from headway.config import ModelConfig
    from headway.models.layers.attention import PackedDocuments

#: Logits from states differ from those of all positions by less than this share of their length; 1e-5 is usual.
_MOST_OF_STATES = 1e-3


@dataclass
class KeptStates:
    """What a model of transformers keeps of the positions that it has computed."""

    ids: list[torch.Tensor] = field(default_factory=list)
    states: Any = None
    """Of a kind of the model's own."""
    is_right: bool = True
    """The states have not led to other logits yet."""
    unproven: int = 2
    """How many logits that come from states are still to be compared."""


class TransformersModel(nn.Module):
    """Wraps a causal language model of transformers.

    Args:
        config: Complete (see `headway.models.build.complete`).
        network: The model of transformers, or the model of peft around it.
    """

    def __init__(self, config: ModelConfig, network: Any) -> None:
        super().__init__()
        self.config = config
        self.network = network
        #: Values of buffers that are no part of the state, by name: on the meta device they would be lost.
        self.buffers_at_first: dict[str, torch.Tensor] = {
            name: buffer.detach().clone()
            for name, buffer in network.named_buffers(prefix="network")
            if not buffer.is_meta
        }
        if config.neftune_alpha:
            self.causal.get_input_embeddings().register_forward_hook(self._add_noise)
        self.loss_from_hidden = False
        """Whether the loss is computed from the last hidden states, a chunk of rows at a time. The logits of a whole
        micro-batch then never exist. Only a proof may set it: many models change logits after the projection."""

    @property
    def has_adapter(self) -> bool:
        """Whether the network is a model of peft around one of transformers."""
        return hasattr(self.network, "peft_config")

    @property
    def causal(self) -> Any:
        """The model of transformers itself; adapters are inside of its layers."""
        return self.network.get_base_model() if self.has_adapter else self.network

    @property
    def backbone(self) -> nn.Module:
        """The model without its output projection."""
        named: nn.Module | None = getattr(self.causal, self.causal.base_model_prefix, None)
        if named is not None:
            return named
        embedding = self.causal.get_input_embeddings()
        around = (child for child in self.causal.children() if embedding in set(child.modules()))
        backbone: nn.Module = next(around, self.causal)
        return backbone

    @property
    def pass_options(self) -> dict[str, Any]:
        """Options of every pass: no cache, and no router losses of a micro-batch, which are no part of a sum."""
        routes = hasattr(self.causal.config, "output_router_logits")
        return {"use_cache": False, **({"output_router_logits": False} if routes else {})}

    def head(self) -> nn.Module | None:
        """Return the module of the output projection; of one that is trained beside an adapter, its trained copy."""
        head: nn.Module | None = self.causal.get_output_embeddings()
        copies = getattr(head, "modules_to_save", None)
        return head if copies is None else next(iter(copies.values()))

    def output_projection(self) -> torch.Tensor | None:
        """Return the matrix that turns the last activations into logits; None if it is not one matrix."""
        head = self.head()
        return head.weight if isinstance(head, nn.Linear) else None

    def _add_noise(self, _: nn.Module, inputs: Any, x_BTD: torch.Tensor) -> torch.Tensor:
        """Add uniform noise to embeddings in training (Jain et al. 2023, algorithm 1)."""
        if not (self.training and torch.is_grad_enabled()):
            return x_BTD
        largest = self.config.neftune_alpha / (x_BTD.shape[1] * x_BTD.shape[2]) ** 0.5
        return x_BTD + torch.empty_like(x_BTD).uniform_(-largest, largest)

    def make_buffers(self) -> None:
        """Restore the buffers that are not part of the state, on the device of the weights."""
        state = self.state_dict().keys()
        for name, value in self.buffers_at_first.items():
            if name not in state:
                self.get_buffer(name).copy_(value)

    def rate_scales(self) -> dict[nn.Parameter, float]:
        """Return the learning rates of modules that are trained beside adapters, relative to that of adapters."""
        adapter = self.config.adapter
        if adapter is None or adapter.also_trained_rate == 1.0:
            return {}
        trained = [p for name, p in self.named_parameters() if p.requires_grad and ".lora_" not in name]
        return dict.fromkeys(trained, adapter.also_trained_rate)

    def fusions(self) -> dict[nn.Parameter, Fusion]:
        """Return the matrices that are known to hold those of several projections, and how."""
        return dict(find_fusions(self.causal))

    def kept_elsewhere(self) -> set[str]:
        """Return the names of tensors of the state that are in the pretrained model and never change."""
        if not self.has_adapter:
            return set()
        frozen = {name for name, p in self.named_parameters(remove_duplicate=False) if not p.requires_grad}
        state = self.state_dict().keys()
        buffers = {name for name, _ in self.named_buffers(remove_duplicate=False)} & state
        return frozen | {name for name in buffers if ".lora_" not in name}

    def set_activation_checkpointing(self, mode: Checkpointing) -> None:
        """Set how much each layer keeps for the backward pass, as `Decoder.set_activation_checkpointing` does.

        Raises:
            ConfigError: the model cannot recompute its layers.
        """
        if mode == "none":
            return
        if not self.causal.supports_gradient_checkpointing or not self.layers():
            raise ConfigError(
                f"{type(self.causal).__name__} cannot recompute its layers",
                where="train.activation_checkpointing",
                fix="train.activation_checkpointing=none",
            )
        # torch.compile does not look into what transformers does for this, and does not accept a `context_fn` that does
        # nothing.
        options: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}
        for layer in self.layers():
            layer.forward = _recomputed(layer.forward, options, offloads=mode == "offload")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile every layer separately, as `Decoder.compile` does; the arguments are those of `torch.compile`."""
        options = {"dynamic": False, **kwargs}
        for layer in self.layers() or [self.backbone]:
            layer.forward = torch.compile(layer.forward, *args, **options)

    def layers(self) -> list[nn.Module]:
        """Return the modules that follow each other: the longest of the lists that are in no other list."""
        return max(_outermost_lists(self.backbone), key=len, default=[])

    def forward(
        self,
        ids_BT: torch.Tensor,
        targets_BT: torch.Tensor | None = None,
        documents: PackedDocuments | None = None,
        *,
        probe: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute the loss or the logits.

        Args:
            ids_BT: int64 token ids, (B, T).
            targets_BT: int64, (B, T); positions with `IGNORE_TARGET` are left out of the loss.
            documents: Documents packed into the rows; each begins at position 0, by which transformers tells them
                apart. Whether a model does is measured before training.
            probe: Is called instead, with the weights in place wherever a strategy keeps them.

        Returns:
            With targets, the fp32 scalar sum of the cross-entropies in nats; without targets, logits (B, T, V).
        """
        if probe is not None:
            return probe()
        options = self.pass_options
        if documents is not None:
            options["position_ids"] = documents.positions_BT
        balances = self.config.router_aux_weight > 0 and self.training and torch.is_grad_enabled()
        if balances:
            options["output_router_logits"] = True
        projection = self.output_projection() if self.loss_from_hidden else None
        if targets_BT is not None and projection is not None:
            output = self.backbone(ids_BT, **options)
            loss = linear_cross_entropy(output[0].flatten(0, 1), projection, targets_BT.flatten())
        else:
            output = self.causal(ids_BT, **options)
            logits_BTV: torch.Tensor = output.logits
            if targets_BT is None:
                return logits_BTV
            loss = F.cross_entropy(
                logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE_TARGET, reduction="sum"
            )
        if balances:
            chosen = self.causal.config.get_text_config().num_experts_per_tok
            logits = getattr(output, "router_logits", None)
            if not logits:  # as of a mixture's class in whose config no layer is one
                raise no_routers(type(self.causal).__name__)
            auxiliary = self.config.router_aux_weight * balance_loss(logits, targets_BT, chosen)
            loss = loss + (auxiliary - auxiliary.detach())  # only its gradient: what is reported stays a cross-entropy
        return loss

    def reference_loss(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Compute the loss of all targets but each row's last one by the loss function of transformers, summed."""
        labels_BT = torch.cat((ids_BT[:, :1], targets_BT[:, :-1]), dim=1)
        loss: torch.Tensor = self.causal(ids_BT, labels=labels_BT, **self.pass_options).loss
        return loss.float() * (labels_BT[:, 1:] != IGNORE_TARGET).sum()

    def logits_are_projected(self, ids_BT: torch.Tensor) -> bool:
        """Return whether the logits are the hidden states times the output projection, and nothing else.

        The projection's output is replaced by noise that is larger than any logits: if exactly the noise comes out,
        nothing scales, caps or masks it, however small the logits of these weights are.
        """
        head = self.head()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            return False
        seen: list[torch.Tensor] = []

        def replaced(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            noise = torch.linspace(-100.0, 100.0, output.numel(), device=output.device).view_as(output)
            seen[:] = [inputs[0], noise.to(output.dtype)]
            return seen[1]

        handle = head.register_forward_hook(replaced)
        try:
            logits = self.causal(ids_BT, **self.pass_options).logits
        finally:
            handle.remove()
        if not seen:
            return False
        hidden = self.backbone(ids_BT, **self.pass_options)[0]
        return torch.equal(logits, seen[1].to(logits.dtype)) and torch.equal(hidden, seen[0])

    def packed_logits(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        """Compute the logits of packed rows, whose documents begin where positions are 0."""
        logits: torch.Tensor = self.causal(ids_BT, position_ids=positions_BT, **self.pass_options).logits
        return logits

    @contextmanager
    def embeddings_of_pass(self) -> Iterator[list[torch.Tensor]]:
        """Give what the input embeddings return in a pass as leaves of its graph, so that gradients end there."""
        leaves: list[torch.Tensor] = []

        def cut(_: nn.Module, inputs: Any, x_BTD: torch.Tensor) -> torch.Tensor:
            leaves.append(x_BTD.detach().requires_grad_())
            return leaves[-1]

        handle = self.causal.get_input_embeddings().register_forward_hook(cut)
        try:
            yield leaves
        finally:
            handle.remove()

    @property
    def has_experts(self) -> bool:
        """Whether tokens choose their experts, which then multiply tokens of all documents together."""
        return bool(getattr(self.causal.config.get_text_config(), "num_experts_per_tok", None))

    def new_cache(self, rows: int, capacity: int) -> KeptStates:
        """Create an empty cache for `next_logits`."""
        return KeptStates()

    def next_logits(self, ids_BT: torch.Tensor, cache: KeptStates) -> torch.Tensor:
        """Compute the logits after ids that continue those in the cache, (B, V), and add them to it.

        Some models compute something else from the states that they keep. So the first logits that come from states
        are compared with those from all positions, which are computed each time if the two differ.
        """
        cache.ids.append(ids_BT)
        logits = self._logits_from_states(ids_BT, cache) if cache.is_right else None
        if logits is not None and (len(cache.ids) == 1 or not cache.unproven):
            return logits
        whole: torch.Tensor = self(torch.cat(cache.ids, dim=1))[:, -1]
        if logits is not None:
            cache.unproven -= 1
            cache.is_right = bool((logits - whole).norm() <= _MOST_OF_STATES * whole.norm())
        if not cache.is_right:
            cache.states = None
        return whole

    def _logits_from_states(self, ids_BT: torch.Tensor, cache: KeptStates) -> torch.Tensor | None:
        """Compute the logits after ids from the states before them; None if the model keeps none."""
        options = {**self.pass_options, "use_cache": True}
        if cache.states is not None:
            options["past_key_values"] = cache.states
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the name of the option is about to change for some
                output = self.causal(ids_BT, **options)
        except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError):  # it takes none
            cache.is_right = False
            return None
        cache.states = getattr(output, "past_key_values", None)
        cache.is_right = cache.states is not None
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def kernels(self) -> dict[str, str]:
        """Return the implementations that transformers has chosen, on which bits can depend."""
        config = self.causal.config
        kinds = {"attention": "_attn_implementation", "experts": "_experts_implementation"}
        found = {kind: getattr(config, name, None) for kind, name in kinds.items()}
        return {kind: str(name) for kind, name in found.items() if name is not None}

    def active_share(self, p: torch.Tensor) -> float:
        """Return the share of a parameter that computes a token: less than 1 for stacked experts, (E, ...)."""
        chosen = getattr(self.causal.config.get_text_config(), "num_experts_per_tok", None) or 1
        return min(1.0, chosen / p.shape[0]) if p.ndim == 3 else 1.0

    def flops_per_token(self, length: int) -> float:
        """Estimate the training FLOPs per token: 6 per weight in a product, 4 where it is frozen, and attention.

        See `headway.models.facts.flops_per_token`. Of stacked experts only those that compute a token count.
        """
        config = self.causal.config.get_text_config()
        embedding = self.causal.get_input_embeddings()
        total = 0.0
        tied = embedding.weight is self.output_projection()
        for p in self.parameters():
            if p.ndim < 2 or (p is embedding.weight and not tied):
                continue
            total += (6 if p.requires_grad else 4) * self.active_share(p) * p.numel()
        layers, heads = (getattr(config, key, 0) or 0 for key in ("num_hidden_layers", "num_attention_heads"))
        width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        return float(total + 12 * layers * heads * width * length)


def _outermost_lists(module: nn.Module) -> list[list[nn.Module]]:
    lists: list[list[nn.Module]] = []
    for child in module.children():
        lists += [list(child)] if isinstance(child, nn.ModuleList) else _outermost_lists(child)
    return lists


def _recomputed(forward: Callable[..., Any], options: dict[str, Any], *, offloads: bool) -> Callable[..., Any]:
    """Wrap a layer's `forward` so that the backward pass computes it again instead of keeping what it computed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with in_host_memory(*args) if offloads else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def no_routers(name: str) -> ConfigError:
    """Return the error that a model has no routers to balance."""
    return ConfigError(
        f"{name} has no routers that report their choices",
        where="model.router_aux_weight",
        fix="model.router_aux_weight=0",
    )
