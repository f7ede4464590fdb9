"""Batches of sequences have the bits of each sequence alone, or are not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.config import ModelConfig
from headway.models.batched import BatchedSteps
from headway.models.build import build_any_model
from headway.models.decoder import Decoder

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "output_bias": True, "ffn_bias": True},
    "qk_norm": {"qk_norm": True},
    "softcap": {"attention_softcap": 20.0, "logit_softcap": 10.0},
    "window": {"sliding_window": 4},
    "tied": {"tie_embeddings": True},
}


def decoder(dtype: torch.dtype = torch.float32, **keys: Any) -> Decoder:
    shape = {"dim": 48, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 80, "max_sequence_length": 64}
    config = ModelConfig.model_validate({**shape, "tie_embeddings": False, **keys})
    model = build_any_model(config, vocab_size=97, seed=5, initialize=True)
    assert isinstance(model, Decoder)
    return model.to(dtype).eval()


def begun(steps: BatchedSteps, model: Decoder, rows: int) -> list[Any]:
    """Caches after prompts of different lengths."""
    caches = [model.new_cache(1, 40) for _ in range(rows)]
    for row, cache in enumerate(caches):
        steps.first_logits([1 + (row * 7 + place) % 90 for place in range(1 + row % 9)], cache)
    return caches


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_has_the_bits_of_each_row_alone(variant: str, dtype: torch.dtype) -> None:
    """Alone means the calls of `generate` on a model that was never prepared for batches."""
    model = decoder(dtype, **VARIANTS[variant])
    plain = decoder(dtype, **VARIANTS[variant])
    steps = BatchedSteps(model, 8)
    assert steps.sizes == (1, 2, 4, 8)
    for rows in (2, 3, 7, 8, 11):
        together = begun(steps, model, rows)
        alone = begun(BatchedSteps(plain, 1), plain, rows)
        for step in range(6):
            tokens = [(row * 5 + step) % 97 for row in range(rows)]
            logits = steps.next_logits(tokens, together)
            with torch.no_grad():
                wanted = [
                    plain.next_logits(torch.tensor([[token]]), cache)[0]
                    for token, cache in zip(tokens, alone, strict=True)
                ]
            assert all(torch.equal(one, other) for one, other in zip(logits, wanted, strict=True))
        assert all(torch.equal(one.keys, other.keys) for one, other in zip(together, alone, strict=True))


def test_a_model_whose_batches_have_other_bits_is_computed_row_by_row() -> None:
    model = decoder()

    def disturb(_: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output if len(output) == 1 else output * (1 + 2**-20)

    model.norm.register_forward_hook(disturb)
    steps = BatchedSteps(model, 8)
    assert steps.sizes == (1,)
    caches = begun(steps, model, 3)
    other = begun(steps, model, 3)
    with torch.no_grad():
        wanted = [model.next_logits(torch.tensor([[7]]), cache)[0] for cache in other]
    assert all(torch.equal(*pair) for pair in zip(steps.next_logits([7] * 3, caches), wanted, strict=True))


def test_experts_and_mamba_layers_are_computed_row_by_row() -> None:
    """Tokens of different rows would meet in the products of experts, whose rows then depend on the batch."""
    model = decoder(experts=4, experts_per_token=2)
    assert BatchedSteps(model, 8).sizes == (1,)


def test_a_full_cache_is_an_error_and_no_wrong_token() -> None:
    model = decoder()
    steps = BatchedSteps(model, 2)
    caches = [model.new_cache(1, 3) for _ in range(2)]
    steps.first_logits([1, 2, 3], caches[0])
    steps.first_logits([1], caches[1])
    with pytest.raises(Exception, match="does not fit"):
        steps.next_logits([1, 1], caches)


def test_inexact_batches_differ_by_rounding_only() -> None:
    model = decoder()
    steps = BatchedSteps(model, 8, exact=False)
    caches = begun(steps, model, 8)
    alone = begun(steps, model, 8)
    logits = torch.stack(steps.next_logits([3] * 8, caches))
    wanted = torch.stack([steps.next_logits([3], [cache])[0] for cache in alone])
    assert torch.allclose(logits, wanted, rtol=1e-4, atol=1e-5)
