"""LitGPT's model and loss under Fabric, in the order of its `pretrain.py`."""

from __future__ import annotations

import json
from pathlib import Path

import lightning
import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy
from llama import build_optimizer
from safetensors.torch import load_file
from workload import Job, Recorder, RowsDataset


def build_model(folder: Path) -> GPT:
    """Of the shape and with the weights of a Llama in Hugging Face's format."""
    shape = json.loads((folder / "config.json").read_text())
    config = Config(
        name="llama",
        block_size=shape["max_position_embeddings"],
        n_layer=shape["num_hidden_layers"],
        n_embd=shape["hidden_size"],
        n_head=shape["num_attention_heads"],
        n_query_groups=shape["num_key_value_heads"],
        head_size=shape["head_dim"],
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        intermediate_size=shape["intermediate_size"],
        norm_eps=shape["rms_norm_eps"],
        rope_base=int(shape.get("rope_theta") or shape["rope_parameters"]["rope_theta"]),
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config)
    weights: dict[str, torch.Tensor] = {}
    source = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    source.setdefault("lm_head.weight", source["model.embed_tokens.weight"])
    copy_weights_hf_llama(config, {}, weights, source)
    model.load_state_dict(weights)
    if shape["tie_word_embeddings"]:
        model.lm_head.weight = model.transformer.wte.weight
    return model


def main() -> None:
    """Train."""
    job, recorder = Job.given(), Recorder()
    rows = RowsDataset(job)
    fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed" if job.precision == "bf16" else "32-true")
    model = build_model(Path(job.model)).train()
    optimizer = build_optimizer(job, model)
    if job.compile:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, rows.batch_size))
    losses = []
    for batch in loader:
        logits = model(batch["input_ids"])
        loss = chunked_cross_entropy(logits, batch["labels"])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        recorder.step()
    recorder.write(job, torch.stack(losses).mean().item())


if __name__ == "__main__":
    main()
