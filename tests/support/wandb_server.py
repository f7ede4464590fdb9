"""The part of a W&B server that `wandb sync` talks to: GraphQL, the stream of files, and a place for uploads.

As the real one does, it tells how many lines of history a run has, and the last of them. The client numbers on from
there.
"""

from __future__ import annotations

import gzip
import json
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.local_server import LocalServer

#: A key of the form that the client accepts.
KEY = "a" * 40
_HISTORY = "wandb-history.jsonl"


class WandbServer:
    """A server with the runs of one user."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[int, str]] = {}
        self.uploads: set[str] = set()
        """Names of uploaded files."""
        self._server = LocalServer(_Handler, store=self)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which the client finds it."""
        return {"WANDB_BASE_URL": self._server.endpoint, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false"}

    def history(self, run: str) -> list[dict[str, Any]]:
        """Return the lines of a run in their order."""
        lines = self._lines.get(run, {})
        assert sorted(lines) == list(range(len(lines))), "no line is missing"
        return [json.loads(lines[number]) for number in sorted(lines)]

    def stream(self, run: str, files: dict[str, Any]) -> None:
        """Take lines of a run, from the number that the client gives them."""
        chunk = files.get(_HISTORY, {"offset": 0, "content": []})
        for number, line in enumerate(chunk["content"], start=chunk["offset"]):
            self._lines.setdefault(run, {})[number] = line

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer a query of GraphQL."""
        name = str(variables.get("name"))
        lines = self._lines.get(name, {})
        project = {"id": "p", "name": variables.get("project") or "headway", "entity": {"id": "e", "name": "me"}}
        if operation == "RunResumeStatus":
            counts = {"logLineCount": 0, "historyLineCount": len(lines), "eventsLineCount": 0}
            tails = {"historyTail": json.dumps([lines[max(lines)]] if lines else []), "eventsTail": "[]"}
            texts = {"config": "{}", "summaryMetrics": "{}", "wandbConfig": '{"t": 1}'}  # `t`: it has been started
            bucket = {"id": "b", "name": name, "displayName": name, "tags": [], **counts, **tails, **texts}
            return {"model": {**project, "bucket": bucket if lines else None}}
        if operation == "UpsertBucket":
            texts = {"displayName": name, "description": "", "config": "{}", "sweepName": None}
            bucket = {"id": "b", "name": name, "project": project, "historyLineCount": len(lines), **texts}
            return {"upsertBucket": {"bucket": bucket, "inserted": not lines}}
        if operation == "CreateRunFiles":
            files = [{"name": one, "uploadUrl": f"{self._server.endpoint}/upload/{one}"} for one in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"}, "serverInfo": {}}

    def close(self) -> None:
        """End it."""
        self._server.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: WandbServer

    def do_GET(self) -> None:
        self._send({})

    def do_PUT(self) -> None:
        self._body()
        self.store.uploads.add(self.path.removeprefix("/upload/"))
        self._send({})

    def do_POST(self) -> None:
        content = json.loads(self._body() or b"{}")
        if self.path.endswith("/graphql"):
            self._send({"data": self.store.answer(content.get("operationName"), content.get("variables") or {})})
            return
        if self.path.endswith("/file_stream"):
            self.store.stream(self.path.split("/")[-2], content.get("files") or {})
        self._send({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _send(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""
