"""One gradient for a matrix that is embedding and projection: the bits of the sum of two, in the memory of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headway.config import Config, override
from headway.models import decoder as decoder_module
from headway.models.decoder import Decoder

VOCABULARY, WIDTH = 300, 16


@pytest.fixture
def model() -> Decoder:
    sizes = ["layers=2", f"dim={WIDTH}", "heads=2", "ffn_dim=32", f"vocab_size={VOCABULARY}", "tie_embeddings=true"]
    model = Decoder(override(Config(), ["train.steps=1", *(f"model.{size}" for size in sizes)]).model)
    model.initialize(3)
    return model


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that repeat: the order of their sums matters."""
    ids = torch.randint(0, 20, (4, 33), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


Gradients = Callable[..., list[torch.Tensor]]


@pytest.fixture
def gradients(model: Decoder, batch: tuple[torch.Tensor, torch.Tensor]) -> Gradients:
    """Of all parameters, of the mean of so many passes."""

    def compute(passes: int = 1, keep: bool = False) -> list[torch.Tensor]:
        model.zero_grad()
        for _ in range(passes):
            loss = model(*batch) / passes
            loss.backward(retain_graph=keep)
            if keep:
                loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    return compute


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "takes_one_gradient", lambda _: False)


@pytest.mark.parametrize("how", [{}, {"passes": 3}, {"keep": True}])
def test_it_has_the_bits_of_two(gradients: Gradients, how: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    one = gradients(**how)
    without(monkeypatch)
    two = gradients(**how)
    assert len(one) == len(two) and all(map(torch.equal, one, two))


def test_it_has_them_in_bf16_too(gradients: Gradients, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        one = gradients()
        without(monkeypatch)
        two = gradients()
    assert all(map(torch.equal, one, two))


def test_bf16_weights_get_it_in_their_dtype(
    model: Decoder, gradients: Gradients, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.bfloat16()
    one = gradients()[0]
    without(monkeypatch)
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one, gradients()[0], rtol=2e-2, atol=2e-2)


def _blocks_of_its_size(compute: Gradients) -> int:
    """How often a pass takes as much memory as the matrix at once."""
    compute()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    inner: Any = profiler.profiler
    sizes = [event.nbytes() for event in inner.kineto_results.events() if event.name() == "[memory]"]
    return sizes.count(4 * VOCABULARY * WIDTH)


def test_a_pass_takes_one_matrix_of_its_size(gradients: Gradients, monkeypatch: pytest.MonkeyPatch) -> None:
    cloned = _blocks_of_its_size(gradients) - 1  # by the fixture itself
    assert cloned == 1
    without(monkeypatch)
    assert _blocks_of_its_size(gradients) - cloned > 1


def test_what_has_no_loss_has_the_embeddings_gradient(model: Decoder, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Somebody may ask for the gradient of something else that a pass has made."""
    tied = decoder_module.TiedGradient(model.embedding.weight)
    x_BTD = decoder_module.tied_embedding(batch[0], model.embedding.weight, tied)
    expected = torch.autograd.grad(model.embedding(batch[0]).square().sum(), model.embedding.weight)
    assert torch.equal(torch.autograd.grad(x_BTD.square().sum(), model.embedding.weight)[0], expected[0])


def test_without_gradients_nothing_is_kept_room_for(model: Decoder, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight = model.embedding.weight
    assert decoder_module.takes_one_gradient(weight)
    with torch.no_grad():
        assert not decoder_module.takes_one_gradient(weight)
    weight.requires_grad_(False)
    assert not decoder_module.takes_one_gradient(weight)
