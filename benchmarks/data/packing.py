"""How full rows get, how fast they are packed, and what keeping attention inside documents costs.

Lengths are those of real texts in tokens (of a JSON Lines file, encoded here) and of a log-normal distribution as web
text has it. `best_fit` is compared with documents joined and cut (`concat`), one document per row (`pad`), and plain
first-fit in the order of the text. Steps are forward and backward passes of one model on the same rows with and
without the mask, in turns, so that whatever else the machine does meets all of them. Times are those of the processor
for packing, and for steps with `--threads 1`, so that others on the machine count little; else those of the clock.

    python benchmarks/data/packing.py
    python benchmarks/data/packing.py --texts corpus.jsonl --tokenizer tokenizer.json --output packing.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.config import ModelConfig
from headway.data.feeding.micro_batches import micro_batch_of
from headway.data.feeding.packing import concat_figures, plan_rows, total_figures
from headway.data.feeding.rows import RowBlock
from headway.models import decoder
from headway.models.build import build_model
from headway.models.layers.attention import document_kernel
from headway.training.task import language_model_loss

#: First-fit is written in Python here, so it packs no more than this many.
_FIRST_FIT_DOCUMENTS = 2**15


def text_lengths(texts: Path, tokenizer: Path) -> NDArray[np.int64]:
    """Tokens of each text, with the end of text."""
    from tokenizers import Tokenizer

    encoder, lengths = Tokenizer.from_file(str(tokenizer)), []
    with texts.open("rb") as file:
        while lines := list(islice(file, 256)):
            batch = encoder.encode_batch_fast([json.loads(line)["text"] for line in lines], add_special_tokens=False)
            lengths += [len(encoding.ids) + 1 for encoding in batch]
    return np.array(lengths, dtype=np.int64)


def log_normal_lengths(documents: int) -> NDArray[np.int64]:
    """A median of 400 tokens and a mean of about 820, with a long tail."""
    drawn = np.random.default_rng(0).lognormal(6.0, 1.2, documents)
    return np.maximum(2, drawn).astype(np.int64)


def bounds_of(lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Where documents start, and the end."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)


def first_fit(lengths: NDArray[np.int64], sequence_length: int) -> tuple[float, float]:
    """Padding share and seconds of first-fit: each document into the first row that has room for it.

    Documents longer than a row are cut as `best_fit` cuts them. A tree of the largest rooms finds the row.
    """
    rest = lengths - np.maximum(lengths - 1, 0) // sequence_length * sequence_length
    sizes = rest[rest > 1].tolist()
    capacity, leaves = sequence_length + 1, 1 << max(1, len(sizes)).bit_length()
    rooms = [capacity] * (2 * leaves)
    start, rows = time.process_time(), 0
    for size in sizes:
        node = 1
        while node < leaves:
            node = 2 * node if rooms[2 * node] >= size else 2 * node + 1
        rows = max(rows, node - leaves + 1)
        rooms[node] -= size
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    seconds = time.process_time() - start
    whole = int((np.maximum(lengths - 1, 0) // sequence_length).sum())
    return (rows * capacity - sum(sizes)) / ((rows + whole) * capacity), seconds


def compare_packings(lengths: NDArray[np.int64], sequence_length: int, rounds: int) -> dict[str, Any]:
    """Figures of every packing of some documents."""
    bounds, seconds = bounds_of(lengths), []
    for _ in range(rounds):
        start = time.process_time()
        best_fit = total_figures(figures for _, figures in plan_rows([bounds], sequence_length, "best_fit"))
        seconds.append(time.process_time() - start)
    pad = total_figures(figures for _, figures in plan_rows([bounds], sequence_length, "pad"))
    concat = concat_figures([bounds], int(bounds[-1]), sequence_length)
    some = lengths[:_FIRST_FIT_DOCUMENTS]
    first_fit_padding, first_fit_seconds = first_fit(some, sequence_length)
    some_best_fit = total_figures(figures for _, figures in plan_rows([bounds_of(some)], sequence_length, "best_fit"))
    return {
        "sequence_length": sequence_length,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "longer_than_a_row": float((lengths > sequence_length + 1).mean()),
        "best_fit": {**best_fit.to_json(), "documents_per_second": len(lengths) / min(seconds)},
        "pad": pad.to_json(),
        "concat": concat.to_json(),
        "first_fit": {
            "documents": len(some),
            "padding_share": first_fit_padding,
            "best_fit_padding_share": some_best_fit.padding_share,
            "documents_per_second": len(some) / first_fit_seconds,
        },
    }


def compare_steps(lengths: NDArray[np.int64], arguments: argparse.Namespace, sequence_length: int) -> dict[str, Any]:
    """Seconds of a forward and backward pass over the same rows, without the mask and with it by each kernel."""
    model = build_model(ModelConfig(preset=arguments.preset), vocab_size=arguments.vocab, seed=0)
    model = model.to(arguments.device).train()
    documents = packed_documents(lengths, sequence_length, arguments.rows)
    tokens = np.random.default_rng(0).integers(arguments.vocab, size=documents.shape)
    batches = {
        mask: {k: v.to(arguments.device) for k, v in micro_batch_of(RowBlock(tokens, documents, mask)).items()}
        for mask in (False, True)
    }
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    chosen = document_kernel(torch.device(arguments.device), dtype, model.shape.head_dim)
    seconds: dict[str, list[float]] = {"unmasked": [], **{kernel: [] for kernel in dict.fromkeys((chosen, "mask"))}}
    clock = time.process_time if arguments.device == "cpu" and arguments.threads == 1 else time.perf_counter
    for number in range(arguments.rounds + 1):
        for name, times in seconds.items():
            decoder.document_kernel = lambda *_, name=name: name  # type: ignore[assignment]
            model.zero_grad()
            synchronize(arguments.device)
            start = clock()
            with torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.bf16):
                loss = language_model_loss(model, batches[name != "unmasked"])
            loss.backward()
            synchronize(arguments.device)
            if number:
                times.append(clock() - start)
    decoder.document_kernel = document_kernel
    best = {name: min(times) for name, times in seconds.items()}
    return {
        "sequence_length": sequence_length,
        "rows": arguments.rows,
        "documents": int((documents.max(axis=1) + 1).sum()),
        "kernel": chosen,
        "seconds": best,
        "ratio_to_unmasked": {name: value / best["unmasked"] for name, value in best.items()},
    }


def packed_documents(lengths: NDArray[np.int64], sequence_length: int, rows: int) -> NDArray[np.int32]:
    """Document numbers, as `RowBlock.documents`, of rows of evenly spread places of a plan."""
    plan, _ = next(iter(plan_rows([bounds_of(lengths)], sequence_length, "best_fit")))
    documents = np.full((rows, sequence_length + 1), -1, dtype=np.int32)
    for place in range(rows):
        row = place * (len(plan.rows) - 1) // rows
        pieces = plan.lengths[plan.rows[row] : plan.rows[row + 1]]
        documents[place, : pieces.sum()] = np.repeat(np.arange(len(pieces)), pieces)
    return documents


def synchronize(device: str) -> None:
    """Wait for the device's queue."""
    if device == "cuda":
        torch.cuda.synchronize()


def show(name: str, packings: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """A table for people."""
    print(f"\n{name}: {packings[0]['documents']:,} documents, {packings[0]['tokens']:,} tokens")
    print(
        "      T | longer | cut: concat  best_fit | padding: best_fit    pad  first-fit (best_fit there) | documents/s"
    )
    for p in packings:
        first = p["first_fit"]
        print(
            f"{p['sequence_length']:7,} | {p['longer_than_a_row']:6.1%} |"
            f" {p['concat']['cut_share']:11.1%} {p['best_fit']['cut_share']:9.1%} |"
            f" {p['best_fit']['padding_share']:17.3%} {p['pad']['padding_share']:6.1%}"
            f" {first['padding_share']:10.3%} ({first['best_fit_padding_share']:.3%}) {'':>6} |"
            f" {p['best_fit']['documents_per_second'] / 1e6:.2f} M"
        )
    for s in steps:
        ratios = ", ".join(f"{k} {v:.2f}" for k, v in s["ratio_to_unmasked"].items())
        print(
            f"step, {s['rows']} rows of {s['sequence_length']:,} with {s['documents']} documents:"
            f" {s['seconds']['unmasked'] * 1e3:,.0f} ms unmasked; ratios: {ratios}"
        )


def main() -> None:
    """Compare on each distribution of lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="JSON Lines with a field `text`")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for --texts")
    parser.add_argument("--documents", type=int, default=2**18, help="of the log-normal distribution")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--step-lengths", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--preset", default="4m", help="model shape (headway models)")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    if (arguments.texts is None) != (arguments.tokenizer is None):
        parser.error("--texts and --tokenizer go together")
    torch.set_num_threads(arguments.threads)
    distributions = {"log-normal": log_normal_lengths(arguments.documents)}
    if arguments.texts:
        distributions[arguments.texts.name] = text_lengths(arguments.texts, arguments.tokenizer)
    results = {}
    for name, lengths in distributions.items():
        packings = [compare_packings(lengths, length, arguments.rounds) for length in arguments.lengths]
        steps = [compare_steps(lengths, arguments, length) for length in arguments.step_lengths]
        show(name, packings, steps)
        results[name] = {"packings": packings, "steps": steps}
    if arguments.output:
        setting = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        arguments.output.write_text(json.dumps({**setting, **machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
