"""Runs Headway against a Hub of the test's own, with the real client libraries in processes of their own: they look at
the environment when they are imported."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.hub_server import HubServer
from support.runs import WORDS, config_values

# Imports what takes a second once, and does each job in a child. Waits are cut short, and attempts are fewer: the
# clients' own patience is minutes.
_JOBS = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import aiohttp, datasets, fastokens, huggingface_hub, tokenizers, torch.utils.data
import headway.text.cli.data, headway.text.preparing.prepare
from headway.cli.main import main
from headway.core.errors import HeadwayError
from headway.text.reading import sources
from support.sources import find, read

wait = time.sleep
time.sleep = lambda seconds: wait(min(seconds, 0.01))
datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 2

def do(job):
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    datasets.config.MAX_SHARD_SIZE, sources.PIECE_BYTES = job["shard"], job["piece"]
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if job["command"] is not None:
        sys.argv = ["headway", *job["command"]]
        main()
    try:
        names = [file.name for file in find(job["path"], **job["values"])[0].files]
        print(json.dumps({"files": names, "texts": read(job["path"], **job["values"]).texts}))
    except HeadwayError as error:
        print(json.dumps({"error": error.what, "where": error.where, "fix": error.fix}))

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            do(json.loads(line))
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def document(number: int) -> str:
    """A text that no other number has, of about 2 kB."""
    return " ".join(f"{WORDS[(number + 7 * place) % len(WORDS)]}-{number * place % 97}" for place in range(200))


def parquet(first: int, last: int) -> bytes:
    """A file with the documents of these numbers, in row groups of 50."""
    import pyarrow as arrow
    from pyarrow import parquet

    out, numbers = io.BytesIO(), range(first, last)
    table = arrow.table({"text": [document(number) for number in numbers], "number": list(numbers)})
    parquet.write_table(table, out, row_group_size=50)
    return out.getvalue()


@dataclass
class Result:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


class HubUser:
    """Somebody with a cache of their own.

    Args:
        hub: Where datasets come from.
        home: Where the client libraries keep their cache.
        environment: What else is in the environment when they are imported.
    """

    def __init__(self, hub: HubServer, home: Path, **environment: str) -> None:
        self.home = home
        names = {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": ""}
        tests = str(Path(__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _JOBS, tests],
            env={**os.environ, **names, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _do(self, folder: Path, token: str = "", small: bool = False, **job: Any) -> Result:
        assert self._process.stdin is not None and self._process.stdout is not None
        names = {name: str(self.home.with_name(f"{self.home.name}-{name}")) for name in ("out", "err")}
        sizes = {"piece": 2**16, "shard": "40KB"} if small else {"piece": 4 * 2**20, "shard": "500MB"}
        job = {"folder": str(folder), "environment": {"HF_TOKEN": token}, "command": None} | names | sizes | job
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Result(code, Path(names["out"]).read_text(), Path(names["err"]).read_text())

    def read(self, path: str, folder: Path | None = None, token: str = "", **values: Any) -> dict[str, Any]:
        """Files and texts of a source, or the three parts of the error."""
        result = self._do(folder or self.home.parent, token, path=path, values=values)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)  # type: ignore[no-any-return]

    def prepare(self, folder: Path, path: str, workers: int = 1, small: bool = False, **source: Any) -> Result:
        """`headway data prepare` with one source, in a folder whose store it fills; `small` cuts all in many parts."""
        folder.mkdir(exist_ok=True)
        values = config_values(folder)["data"] | {"sources": [{"path": path, **source}], "workers": workers}
        values |= {"shard_bytes": "40kB"} if small else {}
        (folder / "config.yaml").write_text(yaml.safe_dump({"data": values}))
        return self._do(folder, small=small, command=["data", "prepare", str(folder / "config.yaml")])


def tokens(store: Path) -> dict[str, bytes]:
    """All token ids of a store by split, in order, however they are cut into shards."""
    splits = json.loads((store / "manifest.json").read_text())["splits"]
    return {
        split: b"".join(
            (store / split / source / shard["file"]).read_bytes()
            for source in sources
            for shard in sources[source]["shards"]
        )
        for split, sources in splits.items()
    }
