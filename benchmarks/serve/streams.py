"""Tokens a second of the engine of `headway serve` next to `generate` of transformers, for 1, 8 and 32 streams.

One Llama with random weights, in fp32 and in bf16, continues random prompts greedily. transformers gets all streams as
one batch of equal lengths, which needs no padding and is its best case; the engine gets them as requests. "exact" has
the bits of `headway generate`, which `headway serve` promises; "inexact" is `--no-exact`. All take turns in every
round; the median of the rounds counts. Use a machine that does nothing else:

    python benchmarks/serve/streams.py
    python benchmarks/serve/streams.py --dim 768 --layers 12 --dtypes bf16 --rounds 5 --output streams.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headway.config import ModelConfig
from headway.models.build import build_pretrained
from headway.serve.engine import Ended, Engine, Event, Events, Sampling, Sequence, take_all
from headway.training.evaluation.inference import TrainedModel

STREAMS = (1, 8, 32)


def llama(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return a Llama with random weights."""
    torch.manual_seed(0)
    heads = options.dim // 64
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.dim,
        intermediate_size=options.dim * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def prompts(streams: int, options: argparse.Namespace) -> torch.Tensor:
    """Return random prompts, (streams, prompt)."""
    draw = torch.Generator().manual_seed(streams)
    return torch.randint(options.vocabulary, (streams, options.prompt), generator=draw)


def transformers_seconds(network: LlamaForCausalLM, ids: torch.Tensor, tokens: int) -> float:
    """Return the time of a batch."""
    start = time.perf_counter()
    with torch.no_grad():
        network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def engine_seconds(engine: Engine, ids: torch.Tensor, tokens: int) -> tuple[float, list[list[int]]]:
    """Return the time of requests that come at once, and the tokens."""
    steps: queue.SimpleQueue[Events] = queue.SimpleQueue()
    drawn: list[list[int]] = [[] for _ in ids]
    left = len(drawn)
    engine.deliver = steps.put

    def taking(index: int) -> Callable[[Event], None]:
        def take(event: Event) -> None:
            nonlocal left
            if isinstance(event, Ended):
                left -= 1
            else:
                drawn[index].append(event.token)

        return take

    start = time.perf_counter()
    for index, prompt in enumerate(ids.tolist()):
        engine.submit(Sequence(prompt, Sampling(tokens, 0.0, 1.0, 0), frozenset(), taking(index)))
    while left:
        take_all(steps.get())
    return time.perf_counter() - start, drawn


def compare(dtype: torch.dtype, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all in turns."""
    network = llama(options)
    network.save_pretrained(folder)
    network = network.to(dtype)
    engines = {}
    for name in ("exact", "inexact"):
        model = build_pretrained(ModelConfig(from_pretrained=folder)).to(dtype).eval()
        trained = SimpleNamespace(model=model, tokenizer=SimpleNamespace(vocab_size=options.vocabulary))
        engines[name] = Engine(cast(TrainedModel, trained), STREAMS[-1], exact=name == "exact")
        engines[name].start()
    steps = engines["exact"].steps
    assert steps is not None
    found: dict[str, Any] = {"sizes": steps.sizes, "ways": sorted(set(steps.ways.values())), "streams": {}}
    rates: dict[int, dict[str, list[float]]] = {n: {"transformers": [], "exact": [], "inexact": []} for n in STREAMS}
    alone: dict[int, list[int]] = {}
    for number in range(options.rounds + 1):
        for streams in STREAMS:
            ids = prompts(STREAMS[-1], options)[:streams]
            times = {"transformers": transformers_seconds(network, ids, options.tokens)}
            for name, engine in engines.items():
                times[name], drawn = engine_seconds(engine, ids, options.tokens)
                if name == "exact":
                    for stream, tokens in enumerate(drawn):
                        assert alone.setdefault(stream, tokens) == tokens, "a batch has changed the tokens"
            if number:  # the first round warms up
                for name, value in times.items():
                    rates[streams][name].append(streams * options.tokens / value)
        print(f"{dtype}: round {number} of {options.rounds}", file=sys.stderr)
    for engine in engines.values():
        engine.close()
    for streams, of_streams in rates.items():
        medians = {name: statistics.median(values) for name, values in of_streams.items()}
        ratios = {name: medians[name] / medians["transformers"] for name in ("exact", "inexact")}
        found["streams"][streams] = {"tokens_per_second": medians, "ratios": ratios, "rounds": of_streams}
    return found


def main() -> None:
    """Compare, and print the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    with tempfile.TemporaryDirectory(prefix="headway-streams-") as folder:
        results = {name: compare(dtypes[name], Path(folder) / name, options) for name in options.dtypes}
    record = {
        "model": {"dim": options.dim, "layers": options.layers, "vocabulary": options.vocabulary},
        "prompt": options.prompt,
        "tokens": options.tokens,
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "results": results,
    }
    print(json.dumps(record, indent=1))
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    for name, found in results.items():
        for streams, one in found["streams"].items():
            rates = {key: round(value) for key, value in one["tokens_per_second"].items()}
            print(
                f"{name}, {streams} streams: {rates}, exact to transformers {one['ratios']['exact']:.2f}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
