"""The complete shape of a decoder: a resolved `ModelConfig` with every size filled in."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import ModelConfig
from headway.config.derived.mesh import ffn_groups
from headway.config.sections.architecture import ATTENTION, FULL, MAMBA, SLIDING, pattern_layers
from headway.core.errors import ConfigError

#: Matrix products are faster when their sides are multiples of this.
_VOCAB_MULTIPLE = 64


def embedding_rows(vocab_size: int) -> int:
    """Return the number of embedding rows for a vocabulary, rounded up to a multiple of 64."""
    return -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder of the Llama family, with or without experts, in elements or modules."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    experts: int = 0
    """Routed experts per layer; 0 if all layers are dense."""
    experts_per_token: int = 0
    expert_ffn_dim: int = 0
    shared_ffn_dim: int = 0
    """Combined width of a layer's shared experts; 0 without any."""
    dense_layers: int = 0
    """Leading layers without experts; all layers if the model has no experts."""
    rotary_dim: int = 0
    """Elements of a head that the rotary embedding turns."""
    pattern: str = ""
    """Kinds of layers (`headway.config.sections.architecture`), one letter each; empty if every layer is attention
    followed by feed-forward or experts."""
    attention_pattern: str = ""
    """Kinds of attention, one letter per layer (`headway.config.sections.architecture`)."""

    @classmethod
    def of(cls, config: ModelConfig, vocab_size: int | None = None) -> Shape:
        """Derive the shape from a config.

        Args:
            config: `kv_heads` and `head_dim` may be unset; they then follow from the other sizes.
            vocab_size: Overrides `config.vocab_size`.

        Raises:
            ConfigError: a size is missing, for example because a pretrained checkpoint provides it.
        """
        vocab_size = vocab_size or config.vocab_size
        dim = config.dim
        layers = config.layers
        heads = config.heads
        ffn_dim = config.ffn_dim
        if vocab_size is None or dim is None or layers is None or heads is None or ffn_dim is None:
            raise ConfigError(
                "the model's shape is not complete",
                where="model.vocab_size, model.dim, model.layers, model.heads, model.ffn_dim",
                fix="set model.preset, or pass the config through headway.models.build.complete",
            )
        expert_ffn_dim = config.expert_ffn_dim or ffn_dim
        head_dim = config.head_dim or dim // heads
        mixture = (
            {}
            if config.experts is None
            else {
                "experts": config.experts,
                "experts_per_token": config.experts_per_token,
                "expert_ffn_dim": expert_ffn_dim,
                "shared_ffn_dim": config.shared_experts * expert_ffn_dim,
            }
        )
        return cls(
            vocab_size=vocab_size,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=config.kv_heads or heads,
            head_dim=head_dim,
            rotary_dim=int(head_dim * config.rotary_fraction),
            pattern=config.layer_pattern or "",
            attention_pattern=config.attention_pattern or (FULL if config.sliding_window is None else SLIDING) * layers,
            ffn_dim=ffn_dim,
            dense_layers=layers if config.experts is None else config.dense_layers,
            **mixture,
        )

    @property
    def attention_layers(self) -> list[int]:
        """The layers with attention."""
        return pattern_layers(self.pattern, ATTENTION) if self.pattern else list(range(self.layers))

    @property
    def mamba_layers(self) -> list[int]:
        """The Mamba-2 layers."""
        return pattern_layers(self.pattern, MAMBA)

    @property
    def queries_per_group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def ffn_groups(self) -> int:
        """Groups of gate and linear rows in a feed-forward layer (`headway.config.derived.mesh.ffn_groups`)."""
        return ffn_groups(self.ffn_dim)
