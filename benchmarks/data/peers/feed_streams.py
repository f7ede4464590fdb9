"""Rows of 1,024 tokens and their targets from litdata or MosaicML Streaming, shuffled, in batches of 8.

    python feed_streams.py litdata|mosaicml TOKENS.bin FOLDER BATCHES ROUNDS

Writes the tokens (little-endian uint16) as the library's own data set into FOLDER, unless it is there, then reads it as
its documentation says. Prints one JSON object: seconds from opening the data set (the library is imported before) to
the first batch, and of each round of batches.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

BATCH, LENGTH = 8, 1024


def token_rows(tokens: str, count: int, part: int) -> Iterator[torch.Tensor]:
    """One part of the tokens, for litdata's `optimize`."""
    data = np.fromfile(tokens, dtype="<u2")
    yield torch.from_numpy(data[part * len(data) // count : (part + 1) * len(data) // count].astype(np.int32))


def write_litdata(tokens: str, folder: Path) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        fn=partial(token_rows, tokens, 4),
        inputs=list(range(4)),
        output_dir=str(folder),
        chunk_size=(LENGTH + 1) * 2048,
        item_loader=TokensLoader(block_size=LENGTH + 1),
        num_workers=1,
    )


def open_litdata(folder: Path) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    loader = TokensLoader(block_size=LENGTH + 1)
    data = StreamingDataset(input_dir=str(folder), item_loader=loader, shuffle=True, drop_last=True, seed=1)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=0)


def write_mosaicml(tokens: str, folder: Path) -> None:
    from streaming import MDSWriter

    data = np.fromfile(tokens, dtype="<u2")
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
        for start in range(0, len(data) - LENGTH, LENGTH):
            writer.write({"tokens": data[start : start + LENGTH + 1]})


def open_mosaicml(folder: Path) -> Any:
    from streaming import StreamingDataset

    data = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH, shuffle_seed=1)
    return DataLoader(data, batch_size=BATCH, num_workers=0, drop_last=True)


def batches(loader: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, int64 (8, 1024) each, epoch after epoch."""
    while True:
        for batch in loader:
            rows = (batch["tokens"] if isinstance(batch, dict) else batch).to(torch.int64)
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main(library: str, tokens: str, target: str, count: int, rounds: int) -> None:
    folder = Path(target)
    if not folder.exists():
        globals()[f"write_{library}"](tokens, folder)
    if library == "litdata":
        import litdata  # noqa: F401
    else:
        import streaming

        streaming.base.util.clean_stale_shared_memory()
    start = time.perf_counter()
    stream = batches(globals()[f"open_{library}"](folder))
    inputs, targets = next(stream)
    first = time.perf_counter() - start
    assert inputs.shape == targets.shape == (BATCH, LENGTH) and torch.equal(inputs[:, 1:], targets[:, :-1])
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            next(stream)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"first_batch_seconds": first, "round_seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
