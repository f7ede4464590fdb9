"""What is fuzzed: for each parser files that are as they should be, and what reads them.

A reader may refuse what it is given by a `HeadwayError`, and do nothing else wrong.
"""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

TEXTS = [f"document {number}: " + "the quick brown fox " * (1 + number % 9) for number in range(40)]


@dataclass(frozen=True)
class Target:
    """One kind of file.

    Attributes:
        name: What it is called on the command line.
        make: Writes sound files into a folder, each case in a folder of its own.
        read: Reads a case.
        edited: Which files of a case are edited, as patterns.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], None]
    edited: Sequence[str] = ("*",)


#: Exit codes of the commands that a reader has run; who runs it clears them.
CODES: list[int] = []


def command(*words: str | Path) -> None:
    """Do what a command line says; it may only end with one of the documented exit codes."""
    from headway.cli.main import _run

    _build_commands_once()
    sys.argv = ["headway", *map(str, words)]
    code = _run()
    if code not in (None, 0, 1, 2, 3, 4, 5, 75):
        raise AssertionError(f"exit code {code}")
    CODES.append(int(code or 0))


@cache
def _build_commands_once() -> None:
    """Keep the commands that a verb has: to build them takes ten times as long as what most of them do."""
    import typer.main

    from headway.cli import application

    application.application = cache(application.application)
    typer.main.get_command = cache(typer.main.get_command)


def _headway(*words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headway", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"sound files cannot be made: {done.stderr}")


def _write_config(folder: Path, **values: Any) -> Path:
    import yaml

    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = {
        "name": "run",
        "runs": str(folder / "runs"),
        "seed": 1,
        "data": {
            "sources": [str(folder / "corpus.jsonl")],
            "store": str(folder / "store"),
            "tokenizer": {"vocab_size": 300},
            "validation": 0.2,
            "workers": 1,
        },
        "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32},
        "train": {"steps": 4, "sequence_length": 16, "global_batch": 4, "micro_batch": 2, "device": "cpu"},
        "checkpoint": {"every": "2 steps"},
        "evaluation": {"rows": 4},
        "parallel": {"threads": 1},
        **values,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _make_store(folder: Path) -> None:
    case = folder / "store"
    case.mkdir()
    _headway("data", "prepare", _write_config(case))


def _read_store(case: Path) -> None:
    from headway.data.store import TokenStore

    command("data", "verify", case / "store")
    command("data", "inspect", case / "store")
    store = TokenStore.open(case / "store")
    for split in store.splits:
        for source in store.sources(split):
            store.read(split, source, 0, min(100, store.tokens(split, source)))


def _make_run(folder: Path) -> None:
    case = folder / "run"
    case.mkdir()
    config = _write_config(case)
    _headway("data", "prepare", config)
    _headway("train", config)


def _read_ledger(case: Path) -> None:
    command("ledger", case / "runs" / "run", "--store", case / "store")


def _read_metrics(case: Path) -> None:
    command("runs", "list", case / "runs")
    command("runs", "show", case / "runs" / "run")


def _read_report(case: Path) -> None:
    command("report", case / "runs" / "run")


def _read_checkpoint(case: Path) -> None:
    command("checkpoints", "list", case / "runs" / "run")
    command("checkpoints", "verify", case / "runs" / "run")


def _make_config(folder: Path) -> None:
    (folder / "config").mkdir()
    _write_config(folder / "config")


def _read_config(case: Path) -> None:
    command("config", "check", case / "config.yaml")
    command("config", "show", case / "config.yaml")


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    for name, model, trainer in (
        ("bpe", models.BPE(), trainers.BpeTrainer),
        ("unigram", models.Unigram(), trainers.UnigramTrainer),
        ("words", models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer),
    ):
        case = folder / name
        case.mkdir()
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        special = {"vocab_size": 120, "special_tokens": ["<|endoftext|>", "[UNK]"], "show_progress": False}
        if name == "unigram":
            special["unk_token"] = "[UNK]"
        backend.train_from_iterator(TEXTS, trainer(**special))
        backend.save(str(case / "tokenizer.json"))
        settings = {"eos_token": "<|endoftext|>", "model_max_length": 100, "tokenizer_class": "PreTrainedTokenizerFast"}
        (case / "tokenizer_config.json").write_text(json.dumps(settings))
        (case / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))


def _read_tokenizer(case: Path) -> None:
    from headway.data.tokenizing.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(case)
    ids = tokenizer.encode_batch(["the quick brown fox", "<|endoftext|> ü \0", ""])
    for numbers in ids:
        tokenizer.decode(numbers)


def _read_sources(case: Path) -> None:
    """Read a file as a preparation does that skips what is malformed, with a small limit and with the usual one."""
    from headway.config.sections.data import MAX_DOCUMENT_BYTES, SourceConfig
    from headway.core.errors import HeadwayError
    from headway.text.reading.readers import read_batches
    from headway.text.reading.sources import find_sources, pieces_of

    refused = None
    for most in (MAX_DOCUMENT_BYTES, 100):
        for template in (None, "{id}: {text}"):
            config = SourceConfig(path=str(next(case.iterdir())), template=template)
            try:
                for piece in pieces_of(find_sources([config], most=most)):
                    for batch in read_batches(piece):
                        for text in batch.texts:
                            text.encode()
            except HeadwayError as error:
                if most == MAX_DOCUMENT_BYTES:
                    refused = error
    if refused is not None:
        raise refused


def _make_tables(kinds: Sequence[str]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        plain = arrow.table({"text": TEXTS, "id": list(range(len(TEXTS)))})
        columns = {
            "plain": plain,
            "large": plain.set_column(0, "text", arrow.chunked_array([arrow.array(TEXTS, arrow.large_string())])),
            "dictionary": plain.set_column(0, "text", arrow.array(TEXTS).dictionary_encode()),
            "view": plain.set_column(0, "text", arrow.array(TEXTS, arrow.string_view())),
            "nulls": plain.set_column(0, "text", arrow.array([None, *TEXTS[1:]])),
        }
        for kind in kinds:
            for name, table in columns.items():
                if kind == "parquet" and name == "view":
                    continue
                for codec in ("none", "zstd"):
                    case = folder / f"{kind}-{name}-{codec}"
                    case.mkdir()
                    if kind == "parquet":
                        for version in ("1.0", "2.0"):
                            place = folder / f"{case.name}-{version}"
                            place.mkdir()
                            parquet.write_table(
                                table, place / "a.parquet", compression=codec, data_page_version=version,
                                row_group_size=15, use_dictionary=name == "dictionary",
                            )  # fmt: skip
                        case.rmdir()
                        continue
                    options = arrow.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
                    writer = arrow.ipc.new_file if kind == "file" else arrow.ipc.new_stream
                    with writer(
                        case / ("a.feather" if kind == "file" else "a.arrow"), table.schema, options=options
                    ) as w:
                        w.write_table(table, max_chunksize=15)

    return make


def _make_csv(folder: Path) -> None:
    lines = ["text,id", *(f'"{text} ""quoted"",\nin two lines",{number}' for number, text in enumerate(TEXTS))]
    _packed(folder, "a.csv", "\r\n".join(lines).encode())


def _make_jsonl(folder: Path) -> None:
    lines = [json.dumps({"text": text, "id": number, "more": {"deep": [1]}}) for number, text in enumerate(TEXTS)]
    _packed(folder, "a.jsonl", "\n".join(lines).encode())


def _make_json(folder: Path) -> None:
    records = [{"text": text, "id": number, "more": {"deep": [1]}} for number, text in enumerate(TEXTS)]
    _packed(folder, "a.json", json.dumps(records, indent=1).encode())


def _make_utf_16(folder: Path) -> None:
    lines = [json.dumps({"text": text, "id": n}, ensure_ascii=False) for n, text in enumerate(TEXTS)]
    _packed(folder, "a.jsonl", "\n".join(lines).encode("utf-16"))


def _packed(folder: Path, name: str, content: bytes) -> None:
    """A file as it is, and packed."""
    import bz2
    import lzma

    import zstandard

    packers: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": lambda data: gzip.compress(data, mtime=0),
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }
    for ending, pack in packers.items():
        case = folder / (ending[1:] or "plain")
        case.mkdir()
        (case / f"{name}{ending}").write_bytes(pack(content))


def _make_imports(folder: Path) -> None:
    import numpy as np

    (folder / "vocabulary").mkdir()
    _make_tokenizer(folder / "vocabulary")
    ids = np.arange(100, dtype="<u2") % 80 + 2
    lengths = np.array([30, 30, 40], dtype="<i4")
    case = folder / "megatron"
    case.mkdir()
    (case / "a.bin").write_bytes(ids.tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 4) + lengths.tobytes()
    index += np.array([0, 60, 120], dtype="<i8").tobytes() + np.array([0, 1, 2, 3], dtype="<i8").tobytes()
    (case / "a.idx").write_bytes(index)
    case = folder / "nanogpt"
    case.mkdir()
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(ids)
    (case / "train.bin").write_bytes(header.tobytes() + ids.tobytes())
    case = folder / "datatrove"
    case.mkdir()
    (case / "a.ds").write_bytes(ids.tobytes())
    (case / "a.ds.index").write_bytes(np.array([30, 60, 100], dtype="<u8").tobytes())
    (case / "a.ds.metadata").write_text("gpt2|2\n100\n0.1 KT")
    for case in (folder / "megatron", folder / "nanogpt", folder / "datatrove"):
        shutil.copy(folder / "vocabulary" / "bpe" / "tokenizer.json", case / "vocabulary.json")
    shutil.rmtree(folder / "vocabulary")


def _read_import(case: Path) -> None:
    from headway.text.importing.store import import_store, plan_import

    output = case.parent / f".{case.name}-store"
    kind = case.name.partition("~")[0]
    path = str(case / "a.ds") if kind == "datatrove" else str(case)
    import_store(plan_import(kind, [path], tokenizer=case / "vocabulary.json"), output, force=True)


_OF_A_RUN = ("runs/run/metrics.jsonl", "runs/run/run.json", "runs/run/attempts/*/attempt.json")

TARGETS = {
    target.name: target
    for target in (
        Target("manifest", _make_store, _read_store,
               ("store/manifest.json", "store/inputs.json", "store/**/*.idx", "store/**/*.bin")),
        Target("ledger", _make_run, _read_ledger, ("runs/run/ledger.jsonl", "store/manifest.json")),
        Target("metrics", _make_run, _read_metrics, _OF_A_RUN),
        Target("report", _make_run, _read_report, _OF_A_RUN),  # to draw charts takes a second
        Target("checkpoint", _make_run, _read_checkpoint, ("runs/run/checkpoints/*/manifest.json",)),
        Target("config", _make_config, _read_config, ("config.yaml",)),
        Target("tokenizer", _make_tokenizer, _read_tokenizer, ("*.json",)),
        Target("arrow", _make_tables(["file", "stream"]), _read_sources),
        Target("parquet", _make_tables(["parquet"]), _read_sources),
        Target("csv", _make_csv, _read_sources),
        Target("jsonl", _make_jsonl, _read_sources),
        Target("json", _make_json, _read_sources),
        Target("utf-16", _make_utf_16, _read_sources),
        Target("imports", _make_imports, _read_import, ("*.bin", "*.idx", "*.ds", "*.index", "*.metadata")),
    )
}  # fmt: skip


def find_target(name: str) -> Target:
    """Return the target of a name; `MODULE:NAME` is one that is defined elsewhere.

    Raises:
        KeyError: there is none.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        return TARGETS[name]
    target: Target = getattr(import_module(module), attribute)
    return target
