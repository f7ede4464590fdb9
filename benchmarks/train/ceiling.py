"""The best loop that we know how to write by hand for one small decoder on one machine: what Headway is held against.

No frameworks, no options, nothing that a run needs besides its steps: no checkpoints, metrics, data order or
resumption. One file, one model of the Llama family with the weights of `speed.py`, a fixed batch shape. Operators are
the fastest that we know, which on a CPU are Headway's own: attention, the loss and the gradient of a tied matrix. It is
a contender of `speed.py`, which gives it its job; by itself it does nothing.
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
from torch._functorch import config as partitioner
from torch.nn import functional as F

from headway.core.machine.allocator import keep_freed_memory
from headway.models.layers.attention import Positions, attend
from headway.models.layers.tied import TiedGradient, tied_embedding
from headway.models.loss import linear_cross_entropy
from headway.telemetry.arithmetic import set_fp32_products

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from workload import Job, Recorder


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
        qkv = qkv.view(rows, length, -1, self.dim)
        to_turn, v = qkv.split([self.heads + self.kv, self.kv], dim=2)
        turned = (to_turn * cos + to_turn.roll(self.dim // 2, -1) * sin).to(qkv.dtype)
        q, k = turned.split([self.heads, self.kv], dim=2)
        x = x + self.out(attend(q, k, v, Positions(cos, sin, is_causal=True)).flatten(2))
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
        self.compiled = False
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
        cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
        return cos[:, None], sin[:, None]

    def compile(self) -> None:
        """Layer by layer: one is traced for all, and steps are as fast as those of the whole, or a little faster."""
        partitioner.ban_recompute_materialized_backward = False
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
        self.compiled = True

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Mean loss of ids (B, T)."""
        tied = TiedGradient(self.head) if self.head is self.embedding.weight else None
        x = tied_embedding(ids, self.head, tied) if tied else self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x, targets = F.rms_norm(x, x.shape[-1:], self.norm, self.eps).flatten(0, 1), targets.flatten()
        return linear_cross_entropy(x, self.head, targets, compiled=self.compiled, tied=tied) / len(targets)


def main() -> None:
    """Train."""
    set_fp32_products(torch.device("cpu"))
    keep_freed_memory(of_all_sizes=True)
    job, recorder = Job.given(), Recorder()
    model = Llama(Path(job.model))
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, job.betas, weight_decay=0.0, fused=True)
    parameters = list(model.parameters())
    rows, total = job.load_rows(), 0.0
    cos, sin = model.tables(rows.shape[2] - 1)
    if job.compile:
        model.compile()
    for batch in rows:
        tokens = torch.from_numpy(batch.astype(np.int64))
        with job.autocast():
            loss = model(tokens[:, :-1], tokens[:, 1:].contiguous(), cos, sin)
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
