"""Megabytes of text per second and core that come out of files, beside other ways to read the same.

All contenders take turns in one process, and each is judged by the processor time (of all threads, the system's share
included) of its best round: what a core gives when files are in memory. All must give the same texts. JSON Lines is
measured with documents as they are and cut to 500 characters; then the same texts as Parquet and as an Arrow stream.
Needs `pip install '.[parquet,datasets]'`.

    python benchmarks/data/readers.py corpus.jsonl
    python benchmarks/data/readers.py corpus.jsonl --rounds 7 --output readers.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import orjson
import pyarrow as arrow
import pyarrow.ipc
import pyarrow.json
import pyarrow.parquet as parquet

from headway.config.sections.data import SourceConfig
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import find_sources, pieces_of

# Documents that loops over lines hand on at a time. Nobody keeps all texts, as nobody could with a large corpus.
_BATCH = 100

Reader = Callable[[Path], Iterable[list[str]]]


def ours(path: Path) -> Iterable[list[str]]:
    """Headway, from the path in the config to texts."""
    for piece in pieces_of(find_sources([SourceConfig(path=str(path))])):
        for batch in read_batches(piece):
            yield batch.texts


def with_template(path: Path) -> Iterable[list[str]]:
    """Headway with a template."""
    for piece in pieces_of(find_sources([SourceConfig(path=str(path), template="{text}")])):
        for batch in read_batches(piece):
            yield batch.texts


def with_json(path: Path) -> Iterable[list[str]]:
    """A loop over lines with the standard library."""
    with path.open("rb") as lines:
        while batch := [json.loads(line)["text"] for line in islice(lines, _BATCH)]:
            yield batch


def with_orjson(path: Path) -> Iterable[list[str]]:
    """The same loop with orjson: what nobody that calls it for each line can beat by much."""
    with path.open("rb") as lines:
        while batch := [orjson.loads(line)["text"] for line in islice(lines, _BATCH)]:
            yield batch


def with_pyarrow_json(path: Path) -> Iterable[list[str]]:
    """pyarrow's JSON reader on one thread, texts taken out of its columns."""
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=2**22)
    with pyarrow.json.open_json(path, read_options=options) as reader:
        for batch in reader:
            yield batch.column("text").to_pylist()


def datasets_reader(kind: str) -> Reader:
    """Hugging Face `datasets`, streaming: nothing is written to its cache."""

    def read(path: Path) -> Iterable[list[str]]:
        stream = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        for batch in stream.select_columns(["text"]).iter(batch_size=1000):
            yield batch["text"]

    return read


def with_pyarrow_parquet(path: Path) -> Iterable[list[str]]:
    """pyarrow's Parquet reader on one thread."""
    for batch in parquet.ParquetFile(path).iter_batches(columns=["text"], use_threads=False):
        yield batch.column(0).to_pylist()


def with_pyarrow_stream(path: Path) -> Iterable[list[str]]:
    """pyarrow's reader of Arrow streams on a mapped file."""
    with pyarrow.ipc.open_stream(arrow.memory_map(str(path))) as reader:
        for batch in reader:
            yield batch.column("text").to_pylist()


LINES: dict[str, Reader] = {
    "headway": ours,
    "headway, template": with_template,
    "loop with orjson": with_orjson,
    "loop with json": with_json,
    "pyarrow.json": with_pyarrow_json,
    "datasets": datasets_reader("json"),
}
PARQUET: dict[str, Reader] = {
    "headway": ours,
    "pyarrow.parquet": with_pyarrow_parquet,
    "datasets": datasets_reader("parquet"),
}
STREAM: dict[str, Reader] = {"headway": ours, "pyarrow.ipc": with_pyarrow_stream, "datasets": datasets_reader("arrow")}


def measure(readers: dict[str, Reader], path: Path, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each round, by contender.

    Raises:
        AssertionError: a contender gives other texts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    digests = {name: digest_of(reader(path)) for name, reader in readers.items()}
    assert len(set(digests.values())) == 1, f"the texts differ: {digests}"
    for _ in range(rounds):
        for name, reader in readers.items():
            start = time.process_time()
            for batch in reader(path):
                del batch
            seconds[name].append(time.process_time() - start)
    return seconds


def digest_of(batches: Iterable[list[str]]) -> str:
    """Hash of all texts, however they are cut into batches."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update("".join(f"{text}\0" for text in batch).encode())
    return digest.hexdigest()


def write_inputs(corpus: Path, folder: Path) -> tuple[dict[str, tuple[Path, dict[str, Reader]]], int]:
    """The corpus as it is, cut into small documents, and in tables; and its bytes of text."""
    texts = [orjson.loads(line)["text"] for line in corpus.open("rb")]
    short = [text[start : start + 500] for text in texts for start in range(0, len(text), 500)]
    paths = {name: folder / name for name in ("whole.jsonl", "short.jsonl", "whole.parquet", "whole.arrow")}
    for name, documents in (("whole", texts), ("short", short)):
        with paths[f"{name}.jsonl"].open("wb") as out:
            out.writelines(orjson.dumps({"id": n, "text": text}) + b"\n" for n, text in enumerate(documents))
    table = arrow.table({"id": range(len(texts)), "text": texts})
    parquet.write_table(table, paths["whole.parquet"], row_group_size=1000)
    with pyarrow.ipc.new_stream(paths["whole.arrow"], table.schema) as out:
        out.write_table(table, max_chunksize=1000)
    mean = sum(map(len, texts)) / len(texts)
    inputs = {
        f"JSON Lines, {mean / 1000:.1f} k characters a document": (paths["whole.jsonl"], LINES),
        "JSON Lines, up to 500 characters a document": (paths["short.jsonl"], LINES),
        "Parquet": (paths["whole.parquet"], PARQUET),
        "Arrow stream": (paths["whole.arrow"], STREAM),
    }
    return inputs, sum(len(text.encode()) for text in texts)


def report(name: str, size: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Print a table and return it as plain data; `size` is in bytes of text."""
    rates = {contender: size / min(times) / 1e6 for contender, times in seconds.items()}
    print(f"\n{name} ({size / 1e6:.1f} MB of text)")
    for contender, rate in rates.items():
        print(f"  {contender:<20} {rate:8.0f} MB/s   headway is {rates['headway'] / rate:5.2f} times as fast")
    return {"input": name, "text_bytes": size, "megabytes_per_second": rates, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="JSON Lines with a field `text`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    arrow.set_cpu_count(1)
    arrow.set_io_thread_count(1)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        inputs, size = write_inputs(arguments.corpus, Path(folder))
        results = [report(n, size, measure(readers, path, arguments.rounds)) for n, (path, readers) in inputs.items()]
    if arguments.output:
        versions = {"python": platform.python_version(), "orjson": orjson.__version__, "pyarrow": arrow.__version__}
        facts = {"versions": versions | {"datasets": datasets.__version__}, "results": results}
        arguments.output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
