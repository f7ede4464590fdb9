"""Documents that share a row know nothing of each other."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.core.types import IGNORE_TARGET
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.layers import attention
from headway.models.layers.attention import PackedDocuments, attend, attention_mask, document_kernel, packed_positions
from headway.models.recompute import selective_contexts

#: Bytes of real text, so that the vocabulary is 256.
TEXT = inspect.getsource(attention).encode()

VARIANTS: list[dict[str, Any]] = [{}, {"kv_heads": 4}, {"kv_heads": 1}, {"qk_norm": True}, {"sliding_window": 5}]
LAYOUTS = [(20, 13, 31), (7, 50, 7), (2, 60, 2), (64,)]

varying = pytest.mark.parametrize("variant", VARIANTS, ids=str)
precisions = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


def model_of(**changes: Any) -> Decoder:
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "max_sequence_length": 64}
    config = ModelConfig(**{**sizes, "init_std": 0.1, **changes})
    return build_model(config, vocab_size=256, seed=0)


def documents_of(lengths: tuple[int, ...], offset: int = 0) -> list[list[int]]:
    """Pieces of text of these lengths, each from another place."""
    return [list(TEXT[offset + 97 * i : offset + 97 * i + length]) for i, length in enumerate(lengths)]


def packed(*rows: list[list[int]]) -> tuple[torch.Tensor, PackedDocuments]:
    """Ids (B, T) of rows of documents, and where the documents are."""
    ids = torch.tensor([[token for document in row for token in document] for row in rows])
    numbers = torch.tensor([[number for number, document in enumerate(row) for _ in document] for row in rows])
    return ids, PackedDocuments.of(numbers)


@pytest.fixture(params=["segments", "mask", "varlen"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way to keep attention inside documents; the one of CUDA with a stand-in for its kernel."""
    name: str = request.param
    monkeypatch.setattr("headway.models.decoder.document_kernel", lambda *_: name)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_on_cpu)
    return name


def varlen_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` documents, written out; it wants what the kernel wants."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.ndim == 1
    assert query.ndim == key.ndim == value.ndim == 3 and (enable_gqa or query.shape[1] == key.shape[1])
    left, right = window_size
    assert right == 0
    parts = []
    bounds = cu_seq_q.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(query) and bounds == sorted(bounds)
    for start, end in pairwise(bounds):
        assert end - start <= max_q == max_k
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        near = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if left >= 0:
            near = near.triu(-left)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=near[None], enable_gqa=enable_gqa)
        parts.append(y[0].transpose(0, 1))
    return torch.cat(parts)


GEMMA = {
    "attention_pattern": "SF",
    "sliding_window": 5,
    "local_rope_theta": 50.0,
    "norm": "rmsnorm1p",
    "post_norms": True,
    "embedding_scale": 32**0.5,
}
OLMO = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "projection"}


@pytest.mark.parametrize(
    "variant",
    [GEMMA, {**GEMMA, "attention_softcap": 5.0, "logit_softcap": 4.0}, OLMO, {"attention_pattern": "NF"}],
    ids=["gemma 3", "gemma 2", "olmo 2", "smollm3"],
)
@pytest.mark.parametrize("name", ["segments", "mask"])
def test_layers_of_every_kind_stay_inside_documents(
    variant: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.models.decoder.document_kernel", lambda *_: name)
    model = model_of(**variant).eval()
    row = documents_of((20, 13, 31))
    ids, documents = packed(row)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([document]))[0] for document in row])
        torch.testing.assert_close(model(ids, documents=documents)[0], alone, rtol=0.0, atol=1e-5)
        assert (model(ids)[0] - alone).abs().max() > 0.1


@varying
@precisions
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_are_those_of_the_document_alone(
    variant: dict[str, Any], bf16: bool, layout: tuple[int, ...], kernel: str
) -> None:
    model = model_of(**variant).eval()
    rows = [documents_of(layout), documents_of(layout[::-1], offset=1000)]
    ids, documents = packed(*rows)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        together, unmasked = model(ids, documents=documents).float(), model(ids).float()
        alone = torch.stack([torch.cat([model(torch.tensor([d]))[0].float() for d in row]) for row in rows])
    # Kernels cut a row into tiles, and matrix products go another way for another number of rows.
    tolerance = {"rtol": 0.0, "atol": 0.06} if bf16 else {"rtol": 0.0, "atol": 1e-5}
    torch.testing.assert_close(together, alone, **tolerance)
    if len(layout) > 1:
        assert (unmasked - alone).abs().max() > 0.5, "without the mask the neighbours must show"


@varying
@precisions
def test_neighbours_change_no_bit(variant: dict[str, Any], bf16: bool, kernel: str) -> None:
    """Other texts, other boundaries and other rows: a document that stays where it is has the same logits."""
    model = model_of(**variant).eval()
    middle = documents_of((13,), offset=500)[0]
    before, after = documents_of((20, 31)), documents_of((20, 31), offset=2000)
    rows = [
        [before[0], middle, before[1]],
        [after[0], middle, after[1]],
        [after[0][:3], after[0][3:], middle, after[1][:1], after[1][1:]],
    ]
    others = [documents_of((64,)), documents_of((30, 34)), documents_of((1, 63))]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        inputs = [packed(row, other) for row, other in zip(rows, others, strict=True)]
        logits = [model(ids, documents=documents)[0, 20:33] for ids, documents in inputs]
        unmasked = [model(ids)[0, 20:33] for ids, _ in inputs]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert not torch.equal(unmasked[0], unmasked[1])


@varying
def test_no_gradient_reaches_a_neighbour(variant: dict[str, Any], kernel: str) -> None:
    model = model_of(**variant)
    ids, documents = packed(documents_of((20, 13, 31)))

    def gradient(masked: bool) -> torch.Tensor:
        """Of the middle document's logits, by position."""
        kept: list[torch.Tensor] = []

        def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            kept.append(output)

        handle = model.embedding.register_forward_hook(keep)
        logits = model(ids, documents=documents) if masked else model(ids)
        handle.remove()
        logits[0, 20:33].square().sum().backward()
        assert kept[0].grad is not None
        return kept[0].grad[0]

    inside = gradient(masked=True)
    assert (inside[:20] == 0).all() and (inside[33:] == 0).all()
    assert (inside[20:33].abs().sum(1) > 0).all()
    if "sliding_window" not in variant:
        assert (gradient(masked=False)[:20].abs().sum(1) > 0).all(), "without the mask it must"


@varying
def test_the_loss_and_its_gradient_are_sums_over_documents(variant: dict[str, Any], kernel: str) -> None:
    model, row = model_of(**variant), documents_of((20, 13, 31))
    ids, documents = packed(row)
    targets = torch.cat([torch.tensor([*d[1:], IGNORE_TARGET]) for d in row])[None]
    loss = model(ids, targets, documents=documents)
    loss.backward()
    together = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    alone = [model(torch.tensor([d[:-1]]), torch.tensor([d[1:]])) for d in row]
    total = torch.stack(alone).sum()
    total.backward()
    torch.testing.assert_close(loss, total)
    for ours, p in zip(together, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=1e-4, atol=1e-4)


def test_attention_has_the_very_bits_of_the_document_alone() -> None:
    """Where the CPU computes document by document, only the products of the layers see how many tokens there are."""
    model = model_of(sliding_window=9)
    ids, documents = packed(documents_of((20, 13, 31)), documents_of((1, 40, 23)))
    positions = packed_positions(model.cos, model.sin, documents, 9, "segments")
    q = torch.randn(2, 64, 4, 8, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, 2, 64, 2, 8, generator=torch.Generator().manual_seed(1))
    together = attend(q, k, v, positions)
    for row, start, end in ((0, 0, 20), (0, 20, 33), (0, 33, 64), (1, 0, 1), (1, 1, 41), (1, 41, 64)):
        part = (slice(row, row + 1), slice(start, end))
        mask, is_causal = attention_mask(0, end - start, 9, ids.device)
        alone = attend(q[part], k[part], v[part], attention.Positions(model.cos, model.sin, mask, is_causal))
        assert torch.equal(together[part], alone)


def test_where_documents_are() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, -1], [4, 2, 2, 2, 2, 2]], dtype=torch.int32)
    documents = PackedDocuments.of(numbers)
    assert documents.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    assert documents.bounds.tolist() == [0, 3, 5, 6, 7, 12] and documents.bounds.dtype == torch.int32


def test_bounds_may_end_more_than_once(kernel: str) -> None:
    """Empty segments fill the bounds up, so that compiled code sees few shapes."""
    model = model_of().eval()
    ids, documents = packed(documents_of((20, 13, 31)))
    filled = documents._replace(bounds=F.pad(documents.bounds, (0, 5), value=64))
    with torch.no_grad():
        assert torch.equal(model(ids, documents=filled), model(ids, documents=documents))


def test_the_kernel_goes_by_device_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=device.index))
    old, new, cpu = torch.device("cuda", 7), torch.device("cuda", 8), torch.device("cpu")
    assert document_kernel(new, torch.bfloat16, 64) == "varlen"
    assert document_kernel(new, torch.float32, 64) == "mask"
    assert document_kernel(new, torch.bfloat16, 64, False, True) == "mask"  # no kernel caps scores
    assert document_kernel(new, torch.bfloat16, 60) == document_kernel(new, torch.bfloat16, 264) == "mask"
    assert document_kernel(old, torch.bfloat16, 64) == "mask"
    assert document_kernel(torch.device("mps"), torch.bfloat16, 64) == "mask"
    assert document_kernel(cpu, torch.float32, 64) == "segments"


def test_what_the_cuda_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are shared where the kernel can, else repeated; the window is that of the kernel's own counting."""
    calls: list[dict[str, Any]] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        calls.append({"q": tuple(q.shape), "k": tuple(k.shape), **options})
        return varlen_on_cpu(q, k, *rest, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr("headway.models.decoder.document_kernel", lambda *_: "varlen")
    ids, documents = packed(documents_of((20, 13, 31)), documents_of((64,)))
    outputs, released = [], attention._VARLEN_SHARES_HEADS
    for shares in (True, False):
        monkeypatch.setattr(attention, "_VARLEN_SHARES_HEADS", shares)
        outputs.append(model_of(layers=1, sliding_window=5)(ids, documents=documents))
    assert calls[0] == {"q": (128, 4, 8), "k": (128, 2, 8), "window_size": (-1 + 5, 0), "enable_gqa": True}
    assert calls[1] == {"q": (128, 4, 8), "k": (128, 4, 8), "window_size": (4, 0)}
    torch.testing.assert_close(*outputs)
    # The stand-in takes nothing that the real one does not.
    real = inspect.signature(varlen_attn).parameters
    assert ("enable_gqa" in real) == released
    assert set(inspect.signature(varlen_on_cpu).parameters) <= set(real) | {"enable_gqa"}


def test_activation_checkpointing_gives_the_same_bits(kernel: str) -> None:
    ids, documents = packed(documents_of((20, 13, 31)))
    gradients = []
    for mode in ("none", "selective", "full"):
        model = model_of(dropout=0.2)
        model.set_activation_checkpointing(mode)  # type: ignore[arg-type]
        torch.manual_seed(5)
        model(ids, ids, documents=documents).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients, strict=True))


class Seen(TorchDispatchMode):
    """Names of the operators that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


def test_selective_checkpointing_keeps_what_the_kernel_for_gpus_gives() -> None:
    with FakeTensorMode(), Seen() as seen:
        x = torch.empty(1, 16, 2, 8, dtype=torch.bfloat16, requires_grad=True)
        bounds = torch.empty(3, dtype=torch.int32)
        y = checkpoint(
            lambda x: attention._attend_varlen(x, x, x, bounds, None).square(),
            x,
            use_reentrant=False,
            context_fn=selective_contexts,
        )
        y.sum().backward()
    assert seen.names.count("torch_attn::_varlen_attn") == 1
    assert seen.names.count("torch_attn::_varlen_attn_backward") == 1


@pytest.mark.slow
def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    model = model_of(qk_norm=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for layout in LAYOUTS:
        ids, documents = packed(documents_of(layout))
        gradients = []
        for each in (model, compiled):
            loss = each(ids, ids, documents=documents)
            loss.backward()
            gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_a_cache_and_documents_do_not_go_together() -> None:
    model = model_of()
    ids, documents = packed(documents_of((20, 13)))
    with pytest.raises(ConfigError, match="one document per row"):
        model(ids, cache=model.new_cache(1, 33), documents=documents)


def test_transformers_computes_the_same(tmp_path: Path, kernel: str) -> None:
    """Llama with positions of our counting and a four-dimensional mask of ours."""
    transformers = pytest.importorskip("transformers")
    from headway.models.huggingface.export import export_model

    model = model_of().eval()
    export_model(model, tmp_path / "export")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    ids, documents = packed(documents_of((20, 13, 31)), documents_of((1, 40, 23), offset=300))
    mask = torch.full((2, 1, 64, 64), torch.finfo(torch.float32).min)
    for row in range(2):
        for query in range(64):
            for key in range(query + 1):
                if documents.numbers_BT[row, query] == documents.numbers_BT[row, key]:
                    mask[row, 0, query, key] = 0.0
    with torch.no_grad():
        ours = model(ids, documents=documents)
        expected = theirs(input_ids=ids, position_ids=documents.positions_BT, attention_mask=mask).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


HYBRID = {
    "layers": 4,
    "layer_pattern": "M*M-",
    "mamba": {"heads": 4, "head_dim": 16, "state_dim": 8, "groups": 2, "chunk": 16},
    "activation": "relu2",
    "rotary_fraction": 0,
}
MIXTURE = {"experts": 4, "expert_ffn_dim": 32}


@pytest.mark.parametrize("variant", [{}, GEMMA, HYBRID, MIXTURE], ids=["llama", "gemma 3", "nemotron-h", "mixtral"])
def test_no_bit_and_no_gradient_passes_from_one_document_to_the_next(variant: dict[str, Any]) -> None:
    model = model_of(**variant).eval()
    ids, documents = packed(documents_of((30, 34)))
    leaf = model.embedding(ids).detach().requires_grad_()
    handle = model.embedding.register_forward_hook(lambda *_: leaf)
    (gradient,) = torch.autograd.grad(model(ids, documents=documents)[:, 30:].square().sum(), leaf)
    handle.remove()
    assert not gradient[:, :30].any() and gradient[:, 30:].any(-1).all()
    if variant is MIXTURE:
        return  # how many tokens an expert multiplies may change how their products are rounded
    other = ids.clone()
    other[:, :30] = (other[:, :30] + 1) % 256
    with torch.no_grad():
        first, second = (model(given, documents=documents) for given in (ids, other))
    assert torch.equal(first[:, 30:], second[:, 30:]) and not torch.equal(first[:, :30], second[:, :30])
