"""What `optimizer.projections` does to the loss: `apart` beside `whole`, over several seeds.

A small decoder learns the bytes of the modules of Python's standard library; the last twentieth of them is for
validation. Both ways begin from the same weights and see the same rows, so the difference of a seed is that of the
update alone. Each cell is the mean over seeds and its standard deviation; the last column is the mean difference of a
seed with its standard error.

    python benchmarks/train/projections.py
    python benchmarks/train/projections.py --optimizers muon --steps 1000 --output projections.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.config import ModelConfig, OptimizerConfig
from headway.models.build import build_model
from headway.training.optimizer import build_optimizer, set_learning_rate

RATES = {"muon": 1e-2, "adafactor": 3e-2}
LENGTH, ROWS, BYTES = 64, 16, 2_000_000
SHAPE: dict[str, Any] = {"dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 176}
_VALIDATION_ROWS = 512


def read_text() -> torch.Tensor:
    """Return the bytes of the standard library's modules in order of their names, int64, (BYTES,)."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)[:BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def rows_at(text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets of rows, int64, (rows, LENGTH)."""
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(text: torch.Tensor, optimizer_name: str, projections: str, seed: int, steps: int) -> float:
    """Train one model and return its loss per byte on the rows for validation."""
    border = len(text) * 19 // 20
    model = build_model(ModelConfig(vocab_size=256, max_sequence_length=LENGTH, **SHAPE), vocab_size=256, seed=seed)
    settings = {"name": optimizer_name, "learning_rate": RATES[optimizer_name], "projections": projections}
    optimizer = build_optimizer(
        OptimizerConfig.model_validate(settings), model, torch.device("cpu"), products=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        warm_up, share = min(1.0, (step + 1) / 20), step / steps
        set_learning_rate(optimizer, RATES[optimizer_name] * warm_up * (1 - 0.9 * share))
        ids, targets = rows_at(text, torch.randint(border - LENGTH - 1, (ROWS,), generator=generator))
        model.zero_grad()
        (model(ids, targets) / targets.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    starts = torch.linspace(border, len(text) - LENGTH - 2, _VALIDATION_ROWS).long()
    ids, targets = rows_at(text, starts)
    with torch.no_grad():
        return float(model(ids, targets)) / targets.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = read_text()
    losses: dict[str, dict[str, list[float]]] = {}
    print(f"{'optimizer':10} {'whole':>17} {'apart':>17} {'apart - whole':>19}")
    for name in options.optimizers:
        losses[name] = {
            way: [train(text, name, way, seed, options.steps) for seed in range(options.seeds)]
            for way in ("whole", "apart")
        }
        whole, apart = losses[name]["whole"], losses[name]["apart"]
        gaps = [one - other for one, other in zip(apart, whole, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5
        cells = [f"{statistics.mean(row):.4f} +- {statistics.stdev(row):.4f}" for row in (whole, apart)]
        print(f"{name:10} {cells[0]:>17} {cells[1]:>17} {statistics.mean(gaps):+10.4f} +- {error:.4f}", flush=True)
    if options.output:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "steps": options.steps}
        options.output.write_text(json.dumps({**facts, "losses": losses}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
