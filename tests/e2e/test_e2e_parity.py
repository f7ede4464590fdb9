"""Our trainer and a plain transformers loop, from the same weights over the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import headway
from support.feeds import plain_feed

STEPS = 50


def test_losses_agree_with_a_plain_transformers_loop(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from headway.data.store import TokenStore
    from headway.models.build import build_model
    from headway.models.huggingface.export import export_model

    config = headway.load_config(
        tiny(
            model={"dropout": 0.0}, train={"steps": STEPS, "micro_batch": 4}, schedule={"name": "constant", "warmup": 0}
        )
    )
    run = headway.train(config)
    _, ours = run.metrics.series("train/loss")

    store = TokenStore.open(config.data.store)
    export_model(build_model(config.model, vocab_size=store.vocab_size, seed=config.seed), tmp_path / "first-weights")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "first-weights")
    model.train()
    feed = plain_feed(store, sequence_length=32, seed=config.seed, lanes=1, micro_batches=1, micro_batch=8)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    theirs = []
    for step in range(STEPS):
        (batch,) = feed.batch(step, 0)
        logits = model(batch["ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    differences = [abs(a - b) for a, b in zip(ours.tolist(), theirs, strict=True)]
    assert max(differences) < 1e-4, differences
    assert theirs[-1] < theirs[0] - 1.5, "the model learns, so agreement means something"
