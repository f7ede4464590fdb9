"""Which small shape learns most from a given compute: the measurements behind the table of `headway train FOLDER`.

Each variant trains on one folder of text with the steps that its FLOPs per token allow, so a loss does not depend on
the speed of the machine, and vocabularies are compared by the validation loss per byte. Finished variants are kept in
the JSON and not trained again.

    python benchmarks/first_hour/shapes.py my-texts --flops 3e12 1e13 --depths 2 3 4
    python benchmarks/first_hour/shapes.py my-texts --flops 1e13 --depths 2 --vocabularies 2048 4096 8192

The epochs of small folders:

    python benchmarks/first_hour/shapes.py my-texts --limit "200 kB" --epochs 4 8 16 32 --depths 1 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from headway.api.start.recipe.shapes import decoder_of
from headway.config.loading.document import to_yaml
from headway.config.sections.model import ModelConfig
from headway.models.facts import count_parameters, flops_per_token
from headway.telemetry.record import open_run

HEADERS = f"{'variant':58} {'params':>7} {'epochs':>6} {'seconds':>7} {'nats/token':>10} {'nats/byte':>9}"


def main() -> None:
    """Train the variants that the JSON does not have, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flops", type=float, nargs="+", default=[1e13])
    parser.add_argument("--epochs", type=float, nargs="+", default=None, help="lengths in place of --flops")
    parser.add_argument("--depths", type=int, nargs="+", default=[2], help="layers; the width is 64 times as much")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256], help="tokens of a row")
    parser.add_argument("--batches", type=int, nargs="+", default=[2048], help="tokens of a step")
    parser.add_argument("--rates", type=float, nargs="+", default=[8e-3])
    parser.add_argument("--optimizers", nargs="+", default=["muon"])
    parser.add_argument("--limit", default=None, help="text to use of the folder, e.g. '200 kB'")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "headway-shapes")
    parser.add_argument("--output", type=Path, default=None, help="JSON; WORK/shapes.json when not given")
    options = parser.parse_args()
    output = options.output or options.work / "shapes.json"
    options.work.mkdir(parents=True, exist_ok=True)
    results = json.loads(output.read_text()) if output.is_file() else {}
    amounts = [("epochs", n) for n in options.epochs] if options.epochs else [("flops", n) for n in options.flops]
    print(HEADERS)
    for amount, depth, vocabulary, length, batch, rate, optimizer in product(
        amounts,
        options.depths,
        options.vocabularies,
        options.lengths,
        options.batches,
        options.rates,
        options.optimizers,
    ):
        name = f"{amount[0]}={amount[1]:g} depth {depth} v{vocabulary} r{length} b{batch} {optimizer} {rate:g}"
        name += f" {options.limit}" if options.limit else ""
        if name not in results:
            how = {"length": length, "batch": batch, "rate": rate, "optimizer": optimizer}
            results[name] = measure(options, amount, depth, vocabulary, how)
            output.write_text(json.dumps(results, indent=1) + "\n")
        found = results[name]
        print(
            f"{name:58} {found['parameters'] / 1e6:6.2f}M {found['epochs']:6.2f} {found['seconds']:7.1f}"
            f" {found['loss']:10.4f} {found['loss_per_byte']:9.4f}",
            flush=True,
        )


def measure(options: argparse.Namespace, amount: tuple[str, float], depth: int, vocabulary: int, how: dict) -> dict:
    """Train one variant and return its losses, its epochs and its seconds."""
    model = decoder_of(depth)
    store = options.work / f"store-{vocabulary}-{(options.limit or 'all').replace(' ', '')}"
    source = {"path": str(options.folder.resolve()), "also": ["*.py"]}
    if options.limit:
        source["limit"] = options.limit
    data = {"sources": [source], "bad_documents": "skip", "tokenizer": {"vocab_size": vocabulary}, "store": str(store)}
    name = f"variant-{time.time_ns()}"
    config = {
        "name": name,
        "runs": str(options.work / "runs"),
        "data": data,
        "model": model,
        "train": {
            "steps": 10,
            "sequence_length": how["length"],
            "global_batch": how["batch"] // how["length"],
            "precision": "auto",
        },
        "optimizer": {"name": how["optimizer"], "learning_rate": how["rate"]},
        "schedule": {"warmup": 0.04, "min_ratio": 0.02},
        "telemetry": {"report": False, "log_every": 1000},
        "evaluation": {"rows": 512 * 128 // how["length"]},
    }
    file = options.work / "variant.yaml"
    file.write_text(to_yaml(config))
    headway = [sys.executable, "-m", "headway"]
    if not (store / "manifest.json").is_file():
        subprocess.run([*headway, "data", "prepare", str(file)], check=True, capture_output=True)
    manifest = json.loads((store / "manifest.json").read_text())
    source = manifest["sources"][0]
    shaped = ModelConfig.model_validate({**model, "vocab_size": vocabulary})
    train_tokens = source["tokens"] * 0.95
    whole = train_tokens if amount[0] == "epochs" else 1 / flops_per_token(shaped, how["length"])
    tokens = amount[1] * whole
    steps = max(10, round(tokens / how["batch"]))
    started = time.perf_counter()
    subprocess.run([*headway, "train", str(file), f"train.steps={steps}"], check=True, capture_output=True)
    seconds = time.perf_counter() - started
    loss = open_run(options.work / "runs" / name).metrics.last("evaluation/loss")
    return {
        "parameters": count_parameters(shaped).total,
        "steps": steps,
        "epochs": steps * how["batch"] / train_tokens,
        "seconds": seconds,
        "loss": loss,
        "loss_per_byte": loss * source["tokens"] / source["text_bytes"],
    }


if __name__ == "__main__":
    main()
