"""Models to serve, and `headway serve` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headway
from headway.config import Config
from headway.core.process.waiting import wait_until
from support.chat import chat_tokenizer, conversation, write_records
from support.runs import config_values
from support.waits import LONG

if TYPE_CHECKING:
    import httpx
    import openai

KEY = "a-key-of-tests-0123456789"
_URL = re.compile(r"(https?://\S+)/v1")


def train_chat(folder: Path, seed: int = 3, steps: int = 60) -> None:
    """Train a model on four conversations, below a folder; its run directory is `runs/tiny` there."""
    write_records(folder / "chats.jsonl", [{"messages": conversation(number, turns=1)} for number in range(4)] * 4)
    values = config_values(
        folder,
        data={
            "sources": [{"path": str(folder / "chats.jsonl"), "format": "chat"}],
            "tokenizer": {"path": str(chat_tokenizer(folder / "tokenizer"))},
            "packing": "pad",
            "validation": 0.0,
        },
        model={"dropout": 0.0, "max_sequence_length": 256},
        train={"steps": steps, "sequence_length": 64},
        checkpoint={"every": f"{steps} steps"},
    )
    headway.train(Config.model_validate({**values, "seed": seed}))


class Server:
    """A server that answers."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        assert wait_until(lambda: _URL.search(self.log) or process.poll() is not None, LONG)
        found = _URL.search(self.log)
        assert found is not None, self.log
        self.url = found[1]

    @property
    def log(self) -> str:
        """What it has said."""
        return self._log.read_text(errors="replace")

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def openai(self, key: str = KEY, **options: Any) -> openai.OpenAI:
        """OpenAI's client of it."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": LONG, **options})

    def http(self, key: str | None = KEY) -> httpx.Client:
        """A client without a form."""
        import httpx

        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=LONG, trust_env=False)

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    def resident_bytes(self) -> int:
        """The memory that it has."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(model: str | Path, log: Path, *options: str | Path, **environment: str) -> Iterator[Server]:
    """Serve a model at a free port, in a process that ends with the block; an empty variable is unset."""
    words = ["serve", str(model), "--port", "0", "--drain-seconds", "0", *map(str, options)]
    variables = {**os.environ, "HEADWAY_API_KEY": KEY, "OMP_NUM_THREADS": "1", **environment}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", *words],
            stdout=subprocess.DEVNULL,
            stderr=file,
            env={name: value for name, value in variables.items() if value},
        )
    try:
        yield Server(process, log)
    finally:
        process.terminate()
        try:
            process.wait(LONG)
        finally:
            process.kill()
