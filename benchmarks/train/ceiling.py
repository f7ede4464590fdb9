"""The best loop that we know how to write by hand for one small decoder on one machine: what Headway is held against.

No frameworks, no options, nothing that a run needs besides its steps: no checkpoints, metrics, data order or
resumption. One file, one model of the Llama family with the weights of `speed.py`, a fixed batch shape. It is a
contender of `speed.py`, which gives it its job; by itself it does nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from workload import Job, Recorder

#: Rows whose logits are alive at a time.
CHUNK_ROWS = 256


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `x @ weight.T`, a chunk of rows at a time, gradients in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """x (N, D), weight (V, D), targets (N,)."""
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        half, scale = weight.to(x.dtype), 1.0 / len(x)
        x_grad, weight_grad, loss = torch.empty_like(x), None, x.new_zeros((), dtype=torch.float32)
        for start in range(0, len(x), CHUNK_ROWS):
            part, chosen = x[start : start + CHUNK_ROWS], targets[start : start + CHUNK_ROWS, None]
            logits = (part @ half.t()).float()
            wanted = logits.gather(1, chosen)
            largest = logits.amax(1, keepdim=True)
            shares = logits.sub_(largest).exp_()
            total = shares.sum(1, keepdim=True)
            loss += (total.log() + largest - wanted).sum()
            shares.mul_(scale / total)
            shares.scatter_add_(1, chosen, torch.full_like(chosen, -scale, dtype=torch.float32))
            shares = shares.to(x.dtype)
            torch.mm(shares, half, out=x_grad[start : start + CHUNK_ROWS])
            if weight_grad is None:
                weight_grad = (shares.t() @ part).float()
            elif x.dtype == torch.float32:
                weight_grad.addmm_(shares.t(), part)
            else:
                weight_grad += shares.t() @ part
        ctx.save_for_backward(x_grad, weight_grad)
        return loss * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The loss is the last thing that is computed: its gradient is 1."""
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad, weight_grad, None


class Layer(nn.Module):
    """Attention and feed-forward, with input projections in one product each."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
        width, inner = shape["hidden_size"], shape["intermediate_size"]
        self.eps = shape["rms_norm_eps"]
        self.norm_1, self.norm_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv) * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x (B, T, D)."""
        rows, length, _ = x.shape
        qkv = self.qkv(F.rms_norm(x, x.shape[-1:], self.norm_1, self.eps))
        qkv = qkv.view(rows, length, -1, self.dim).transpose(1, 2)
        to_turn, v = qkv.split([self.heads + self.kv, self.kv], dim=1)
        turned = (to_turn * cos + to_turn.roll(self.dim // 2, -1) * sin).to(qkv.dtype)
        q, k = turned.split([self.heads, self.kv], dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[-1:], self.norm_2, self.eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """With its loss."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        shape = json.loads((folder / "config.json").read_text())
        self.eps, self.shape = shape["rms_norm_eps"], shape
        self.embedding = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(shape["hidden_size"]))
        tied = shape["tie_word_embeddings"]
        self.head = self.embedding.weight if tied else nn.Parameter(torch.empty_like(self.embedding.weight))
        self.load(folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Weights from Hugging Face's format."""
        weights = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        self.embedding.weight.copy_(weights["model.embed_tokens.weight"])
        self.norm.copy_(weights["model.norm.weight"])
        if not self.shape["tie_word_embeddings"]:
            self.head.copy_(weights["lm_head.weight"])
        for index, layer in enumerate(self.layers):
            own = {name.removeprefix(f"model.layers.{index}."): t for name, t in weights.items()}
            layer.norm_1.copy_(own["input_layernorm.weight"])
            layer.norm_2.copy_(own["post_attention_layernorm.weight"])
            layer.qkv.weight.copy_(torch.cat([own[f"self_attn.{name}_proj.weight"] for name in "qkv"]))
            layer.out.weight.copy_(own["self_attn.o_proj.weight"])
            layer.gate_up.weight.copy_(torch.cat([own[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]))
            layer.down.weight.copy_(own["mlp.down_proj.weight"])

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the rotary embedding, with the first half of the sines negated."""
        dim, theta = self.shape["head_dim"], self.shape.get("rope_theta") or self.shape["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(length), 1.0 / theta ** (torch.arange(0, dim, 2) / dim))
        return torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)

    def hidden(self, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """All but the loss."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.rms_norm(x, x.shape[-1:], self.norm, self.eps).flatten(0, 1)


def multiply_fast() -> None:
    """fp32 by oneDNN where MKL leaves AVX-512 unused. "medium" lets it round to bf16, which it does with AMX only."""
    processor = Path("/proc/cpuinfo").read_text()
    if "AuthenticAMD" in processor and " avx512f " in processor and " amx_" not in processor:
        torch.set_float32_matmul_precision("medium")


def main() -> None:
    """Train."""
    multiply_fast()
    job, recorder = Job.given(), Recorder()
    model = Llama(Path(job.model))
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, job.betas, weight_decay=0.0, fused=True)
    parameters = list(model.parameters())
    rows, total = job.load_rows(), 0.0
    cos, sin = model.tables(rows.shape[2] - 1)
    hidden = torch.compile(model.hidden) if job.compile else model.hidden
    for batch in rows:
        tokens = torch.from_numpy(batch.astype(np.int64))
        with job.autocast():
            x = hidden(tokens[:, :-1].contiguous(), cos, sin)
            loss = LinearCrossEntropy.apply(x, model.head, tokens[:, 1:].flatten())
        loss.backward()
        gradients = [p.grad for p in parameters]
        norm = torch.nn.utils.get_total_norm(gradients)
        if norm > job.max_grad_norm:
            torch._foreach_mul_(gradients, job.max_grad_norm / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        recorder.step()
    recorder.write(job, total / len(rows))


if __name__ == "__main__":
    main()
