"""Planned memory of the presets that continue a model, on the shape of Llama 3 8B: the table of the docs.

Each line is that of `headway plan PRESET model.from_pretrained=FOLDER --gpus ...` for the preset as it is, where FOLDER
has nothing but the config.json below. Nothing is run.

    python benchmarks/plan/presets.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headway.config import load_config
from headway.lab.plan.accelerators import parse_machines
from headway.lab.plan.prepare import plan_as_it_is

#: Shape of Llama 3 8B, with the type of its weights (Dubey et al. 2024, table 3).
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

#: Title, preset, machines, and what is overridden.
LINES = (
    ("`cpt-24gb`", "cpt-24gb", "1xRTX-4090", ()),
    ("the same without recomputation", "cpt-24gb", "1xRTX-4090", ("train.activation_checkpointing=none",)),
    ("`cpt-24gb-qlora`", "cpt-24gb-qlora", "1xRTX-4090", ()),
    ("`cpt-24gb-full`", "cpt-24gb-full", "1xRTX-4090", ()),
    ("`cpt-24gb-full-8b`", "cpt-24gb-full-8b", "1xRTX-4090", ()),
    ("the same with moments in bf16", "cpt-24gb-full-8b", "1xRTX-4090", ("optimizer.moments=bf16",)),
    ("`cpt-4x80gb`", "cpt-4x80gb", "4xH100", ()),
    ("`cpt-4x80gb-deepspeed`", "cpt-4x80gb-deepspeed", "4xH100", ()),
)


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| preset | GPUs | weights | gradients | moments | activations | buffers | gathered | peak | fits | host |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        for title, preset, gpus, changes in LINES:
            machines = parse_machines(gpus)
            own = [f"model.from_pretrained={folder}", f"parallel.workers={machines.count}"]
            found = plan_as_it_is(load_config(preset, [*own, *changes]), machines)
            assert found.memory is not None
            parts = [_gib(count) for count in found.memory.peak.parts.values()]
            gib = machines.accelerator.memory_gib
            cards = f"{machines.count} of {gib:.0f} GB" if machines.count > 1 else f"{gib:.0f} GB"
            host = found.memory.host.total * machines.per_node
            cells = [title, cards, *parts, _gib(found.memory.peak_bytes), "yes" if found.fits else "no", _gib(host)]
            yield f"| {' | '.join(cells)} |"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}" if count else "0"


if __name__ == "__main__":
    print("\n".join(table()))
