"""`headway models`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headway.config import SHAPES, ModelConfig
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import print_line
from headway.core.format import format_bytes, format_count
from headway.models.facts import count_parameters, flops_per_token, kv_bytes_per_token

HELP = """List the named model shapes with their parameters, costs and sizes.

FLOPs are per training token, forward and backward (PaLM, appendix B); the cache is in bf16. Active parameters exclude
the experts to which a token is not routed.

[bold]Examples[/bold]

headway models
headway models --vocab 128256 --sequence-length 8192
headway models --json
"""


def models(
    vocab: Annotated[int, typer.Option("--vocab", min=1, help="Size of the vocabulary.")] = 32_000,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", min=1, help="Tokens in a row, for the cost of attention.")
    ] = 2048,
    as_json: JsonOption = False,
) -> None:
    """Run `headway models`."""
    rows = [_facts(name, vocab, sequence_length) for name in SHAPES]
    if as_json:
        print_json({"vocab_size": vocab, "sequence_length": sequence_length, "models": rows})
    else:
        _print_table(rows, vocab, sequence_length)


def _facts(name: str, vocab: int, sequence_length: int) -> dict[str, Any]:
    config = ModelConfig(preset=name, vocab_size=vocab)
    counts = count_parameters(config)
    return {
        "preset": name,
        "parameters": counts.total,
        "active_parameters": counts.active,
        "embedding_parameters": counts.embedding,
        "dim": config.dim,
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "ffn_dim": config.ffn_dim,
        "experts": config.experts,
        "tie_embeddings": config.tie_embeddings,
        "max_sequence_length": config.max_sequence_length,
        "flops_per_token": flops_per_token(config, sequence_length),
        "kv_bytes_per_token": kv_bytes_per_token(config),
    }


def _print_table(rows: list[dict[str, Any]], vocab: int, sequence_length: int) -> None:
    print_line(f"vocabulary {vocab:,}, sequences of {sequence_length:,} tokens")
    headers = [
        "PRESET",
        "PARAMETERS",
        "ACTIVE",
        "IN EMBEDDINGS",
        "WIDTH",
        "LAYERS",
        "HEADS",
        "FLOPS/TOKEN",
        "CACHE/TOKEN",
    ]
    lines = [
        [
            row["preset"],
            format_count(row["parameters"]),
            format_count(row["active_parameters"]),
            f"{row['embedding_parameters'] / row['parameters']:.0%}",
            str(row["dim"]),
            str(row["layers"]),
            f"{row['heads']}/{row['kv_heads']}",
            format_count(row["flops_per_token"]),
            format_bytes(row["kv_bytes_per_token"]),
        ]
        for row in rows
    ]
    print_table(headers, lines, numeric=range(1, len(headers)))
