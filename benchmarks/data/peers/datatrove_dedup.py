"""Deduplication as datatrove does it, in one process: read texts, sign, find; print seconds and what would go.

Run with the Python of an environment that has datatrove:
    python datatrove_dedup.py TEXTS.json exact|minhash
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("LOGURU_LEVEL", "ERROR")
os.environ.setdefault("TQDM_DISABLE", "1")

from datatrove.data import Document
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig


def exact(documents: list[Document], folder: str) -> tuple[float, float]:
    """Processor seconds to sign and to find."""

    def content(document: Document) -> str:
        return document.text

    content.__annotations__["return"] = str
    config = ExactDedupConfig(content_getter=content)
    started = time.process_time()
    ExactDedupSignature(f"{folder}/signatures", config).run(iter(documents))
    signed = time.process_time()
    ExactFindDedups(f"{folder}/signatures", f"{folder}/removed", config).run()
    return signed - started, time.process_time() - signed


def minhash(documents: list[Document], folder: str) -> tuple[float, float]:
    """Processor seconds to sign and to find."""
    config = MinhashConfig()
    step = MinhashDedupSignature(f"{folder}/signatures", config)
    step.get_shingles("load the word tokenizer before the clock starts")
    started = time.process_time()
    step.run(iter(documents))
    signed = time.process_time()
    for rank in range(config.num_buckets):
        MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config).run(
            None, rank, config.num_buckets
        )
    MinhashDedupCluster(f"{folder}/buckets", f"{folder}/removed", config=config).run()
    return signed - started, time.process_time() - signed


def main() -> None:
    """Do it and say how long it took."""
    texts = json.loads(Path(sys.argv[1]).read_bytes())
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        sign, find = (exact if sys.argv[2] == "exact" else minhash)(documents, folder)
        removed = [
            number[0]
            for file in sorted(Path(folder, "removed").rglob("*.remove"))
            for number in struct.iter_unpack("<I", file.read_bytes())
        ]
    print("\n" + json.dumps({"sign": sign, "find": find, "removed": removed}))


main()
