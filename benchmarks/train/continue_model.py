"""Continued pre-training of a model of transformers, whole or with a LoRA adapter: speed and memory beside two peers.

Headway, the Trainer of Hugging Face, and a plain loop of PyTorch (with peft for adapters) train the same model with
random weights (Qwen3's architecture) on rows of the same size, in bf16 by autocast on a GPU and in fp32 on a CPU, each
in a process of its own. On a GPU all recompute their layers. Speeds are medians over the steps after `--warmup`; memory
is what PyTorch has allocated at most on a GPU, and the largest resident size of the process on a CPU.

    python benchmarks/train/continue_model.py                             # a small shape on the CPU
    python benchmarks/train/continue_model.py --device cuda --shape 8b --kinds lora --rows 16 --sequence-length 4096
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

#: Layers, width, width of the feed-forward, heads, heads of keys and values, width of a head, vocabulary.
SHAPES = {
    "tiny": (2, 64, 128, 4, 2, 16, 1024),
    "30m": (6, 512, 1536, 8, 4, 64, 8192),
    "1.7b": (28, 2048, 6144, 16, 8, 128, 151_936),
    "8b": (36, 4096, 12288, 32, 8, 128, 151_936),
}
CONTENDERS = ("headway", "trainer", "loop")
#: The rank of adapters, on all linear layers but the output projection.
RANK = 16


def write_model(shape: str, folder: Path, device: str) -> None:
    """Write a model with random weights, in bf16 for a GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, width, inner, heads, shared, head, vocabulary = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=head,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)


def write_tokenizer(arguments: argparse.Namespace, data: dict[str, Any]) -> None:
    """Train a tokenizer into the model's folder: Headway continues no model without one."""
    file = arguments.model.parent / "tokenizer.yaml"
    file.write_text(yaml.safe_dump({"data": {**data, "tokenizer": {"vocab_size": 1024}}}))
    command = ["headway", "tokenizer", "train", file, "-o", arguments.model]
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True, capture_output=True)


def peer_model(arguments: argparse.Namespace) -> Any:
    """Load the model as the peers' documentation does: the frozen base in bf16, trained weights in fp32."""
    from transformers import AutoModelForCausalLM

    half = arguments.device == "cuda" and arguments.kind == "lora"
    dtype = torch.bfloat16 if half else torch.float32
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, device_map=arguments.device)
    if arguments.kind == "lora":
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        settings = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
    return model


def result(tokens: int, seconds: list[float], arguments: argparse.Namespace) -> dict[str, Any]:
    """Report the speed of the steps after the warm-up, and the memory."""
    if arguments.device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    speeds = [tokens / one for one in seconds[arguments.warmup :]]
    return {"tokens_per_second": statistics.median(speeds), "peak_gib": peak, "step_seconds": seconds}


def run_loop(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train by a plain loop."""
    model = peer_model(arguments)
    cuda = arguments.device == "cuda"
    model.config.use_cache = False
    if cuda:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4, fused=True)
    vocabulary = SHAPES[arguments.shape][-1]
    seconds = []
    for _ in range(arguments.warmup + arguments.steps):
        begun = time.perf_counter()
        for _ in range(arguments.rows // arguments.micro_batch):
            size = (arguments.micro_batch, arguments.sequence_length)
            ids = torch.randint(vocabulary, size, device=arguments.device)
            with torch.autocast(arguments.device, torch.bfloat16, enabled=cuda):
                loss = model(input_ids=ids, labels=ids).loss
            (loss * arguments.micro_batch / arguments.rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - begun)
    return result(arguments.rows * arguments.sequence_length, seconds, arguments)


def run_trainer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train by the Trainer of Hugging Face."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    steps, length = arguments.warmup + arguments.steps, arguments.sequence_length
    vocabulary, cuda = SHAPES[arguments.shape][-1], arguments.device == "cuda"
    rows = torch.randint(vocabulary, (steps * arguments.rows, length))
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=arguments.micro_batch,
            gradient_accumulation_steps=arguments.rows // arguments.micro_batch,
            max_steps=steps,
            learning_rate=1e-4,
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=cuda,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model=peer_model(arguments), args=settings, train_dataset=data, callbacks=[Clock()]).train()
    return result(arguments.rows * length, [b - a for a, b in pairwise(times)], arguments)


def run_headway(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train by `headway train`, and read the run's metrics."""
    cuda = arguments.device == "cuda"
    data = {"sources": [{"path": "stdlib:", "limit": "8 MB"}], "bad_documents": "skip"}
    if not (arguments.model / "tokenizer.json").exists():
        write_tokenizer(arguments, data)
    config = {
        "name": arguments.kind,
        "runs": str(folder / "runs"),
        "data": {**data, "store": str(folder / "store")},
        "model": {
            "from_pretrained": str(arguments.model),
            "adapter": {"rank": RANK, "alpha": RANK} if arguments.kind == "lora" else None,
            **({"implementation": arguments.implementation} if arguments.kind == "full" else {}),
        },
        "train": {
            "steps": arguments.warmup + arguments.steps,
            "sequence_length": arguments.sequence_length,
            "global_batch": arguments.rows,
            "micro_batch": arguments.micro_batch,
            "precision": "bf16" if cuda else "fp32",
            "compile": not arguments.eager,
            "activation_checkpointing": "full" if cuda else "none",
            "device": arguments.device,
        },
        "checkpoint": {"every": "1000000 steps"},
        "evaluation": {"every": None},
        "telemetry": {"report": False, "log_every": 1},
    }
    file = folder / f"{arguments.kind}.yaml"
    file.write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "headway", "train", str(file), "--restart"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        return {"n/a": f"exit {done.returncode}: {done.stderr.strip()[-500:]}"}
    lines = (folder / "runs" / arguments.kind / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if "speed/step_seconds" in (record := json.loads(line))]
    seconds = [step["speed/step_seconds"] for step in steps]
    speeds = [arguments.rows * arguments.sequence_length / one for one in seconds[arguments.warmup :]]
    peaks = [step["memory/peak_gib"] for step in steps if "memory/peak_gib" in step]
    peak = max(peaks) if peaks else None
    return {"tokens_per_second": statistics.median(speeds), "peak_gib": peak, "step_seconds": seconds}


def contend(name: str, kind: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one contender of one kind in a process of its own."""
    if name == "headway":
        return run_headway(argparse.Namespace(**{**vars(arguments), "kind": kind}), folder)
    words = [sys.executable, __file__, *sys.argv[1:], "--contender", name, "--kind", kind, "--model", arguments.model]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        return {"n/a": f"exit {done.returncode}: {done.stderr.strip()[-500:]}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def median_round(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the round of the median speed; one that failed if any has."""
    failed = [one for one in rounds if "n/a" in one]
    by_speed = sorted(rounds, key=lambda one: one.get("tokens_per_second", 0.0))
    return failed[0] if failed else by_speed[len(by_speed) // 2]


def ratios_of(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the speeds relative to the fastest peer's; none without a peer."""
    speeds = {name: one["tokens_per_second"] for name, one in found.items() if "n/a" not in one}
    best = max((speed for name, speed in speeds.items() if name != "headway"), default=None)
    return {} if best is None else {name: speed / best for name, speed in speeds.items()}


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print a table for people, with ratios to the fastest peer."""
    print(f"{'kind':6}{'contender':12}{'tok/s':>10}{'peak GiB':>10}{'ratio':>8}")
    for kind, found in results.items():
        ratios = ratios_of(found)
        for name, one in found.items():
            if "n/a" in one:
                print(f"{kind:6}{name:12}  n/a: {one['n/a']}")
                continue
            ratio = f"{ratios[name]:.2f}" if ratios else "n/a"
            peak = f"{one['peak_gib']:.1f}" if one["peak_gib"] is not None else "n/a"
            print(f"{kind:6}{name:12}{one['tokens_per_second']:10,.0f}{peak:>10}{ratio:>8}")


def main() -> None:
    """Run all contenders, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="30m", choices=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--implementation", default="auto", help="of Headway without an adapter")
    parser.add_argument("--eager", action="store_true", help="Headway without torch.compile")
    parser.add_argument("--rows", type=int, default=8, help="per step")
    parser.add_argument("--micro-batch", type=int, default=1, help="rows at a time")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="of all contenders in turns; medians are shown")
    parser.add_argument("--output", type=Path, help="also write everything as JSON")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        run = {"loop": run_loop, "trainer": run_trainer}[arguments.contender]
        print("\n" + json.dumps(run(arguments)))
        return
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments.model = folder / "model"
        write_model(arguments.shape, arguments.model, arguments.device)
        torch.cuda.empty_cache()
        for kind in arguments.kinds:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.contenders}
            for _ in range(arguments.rounds):
                for contender, rounds in found.items():
                    print(f"{kind}: {contender} ...", file=sys.stderr, flush=True)
                    rounds.append(contend(contender, kind, arguments, folder))
            results[kind] = {name: median_round(rounds) for name, rounds in found.items()}
    show(results)
    if arguments.output:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        facts = {"device": device, "torch": torch.__version__, "threads": torch.get_num_threads()}
        setting = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        ratios = {kind: ratios_of(found) for kind, found in results.items()}
        report = {"machine": facts, "settings": setting, "results": results, "ratios": ratios}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
