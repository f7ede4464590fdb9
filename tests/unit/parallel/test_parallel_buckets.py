import torch
from torch import nn

from headway.parallel.buckets import make_buckets


def test_gradients_are_views_into_the_buckets() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    buckets = make_buckets(model)
    model(torch.ones(3, 4)).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in reversed(list(model.parameters()))])
    assert torch.equal(torch.cat([bucket.flat for bucket in buckets]), gradients)
    assert gradients.abs().sum() > 0


def test_buckets_respect_their_size_and_dtype() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(4, 4, bias=False)
    )
    assert [len(b.parameters) for b in make_buckets(model)] == [1, 1, 1]  # dtypes differ between neighbours
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    assert [len(b.parameters) for b in make_buckets(model, bucket_bytes=2 * 64)] == [2, 2, 1]


def test_frozen_and_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    assert [p.data_ptr() for b in make_buckets(model) for p in b.parameters] == [model[0].weight.data_ptr()]


def test_gradients_have_the_memory_layout_of_their_parameters() -> None:
    """A fused optimizer walks the memory of both alike; in another layout it would mix up their elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    make_buckets(model)
    model(x).square().sum().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert p.grad.stride() == p.stride()
        torch.testing.assert_close(p.grad, gradient)
