"""Assembles a model with `train.weights: bf16`, and prints the bytes of weights in fp32 and the peak of this process.

    python streaming_peak.py SOURCE IMPLEMENTATION

`SOURCE` is a folder of the Hub's format, or `fresh`.
"""

import re
import sys
from pathlib import Path
from typing import Any, cast

import torch

from headway.config import Config, LaneGrid
from headway.core.types import Feed
from headway.parallel.world import World
from headway.run.session.assemble import assemble
from headway.training.task import decoder_task

SHAPE = {"layers": 6, "dim": 512, "heads": 8, "ffn_dim": 2048, "vocab_size": 16_000, "tie_embeddings": False}


def config(source: str, implementation: str, weights: str, runs: str) -> Config:
    model: dict[str, Any] = (
        SHAPE if source == "fresh" else {"from_pretrained": source, "implementation": implementation}
    )
    train = {"weights": weights, "precision": "bf16", "steps": 1, "sequence_length": 16, "device": "cpu"}
    return Config.model_validate(
        {"model": model, "train": train, "parallel": {"strategy": "single", "threads": 1}, "runs": runs, "seed": 5}
    )


def assembled(asked: Config, vocab_size: int, device: str = "cpu") -> Any:
    sections = (asked.model, asked.train, asked.parallel)
    task = decoder_task(*sections, cast(Feed, None), vocab_size, seed=asked.seed, attention_length=16)
    return assemble(asked, task, World(0, 1, 0, torch.device(device)), LaneGrid(1, 1, 1), 1)


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


if __name__ == "__main__":
    source, implementation, runs = sys.argv[1:]
    asked = config(source, implementation, "bf16", runs)
    small = config("fresh", "native", "bf16", runs)
    assembled(small.model_copy(update={"model": small.model.model_copy(update={"layers": 1, "dim": 64})}), 64)
    if implementation == "transformers":
        import transformers  # noqa: F401 - its memory does not count
    before = peak_bytes()
    made = assembled(asked, SHAPE["vocab_size"])
    whole = sum(p.numel() * 4 for p in made.task.model.parameters())
    print(whole, peak_bytes() - before)
