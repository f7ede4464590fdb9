"""Metadata services of clouds on a local port: what they refuse, how they wait, what they say when nothing is due."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse


class Cloud:
    """One metadata service; what it says is changed from outside."""

    def __init__(self) -> None:
        self.spot: dict[str, str] | None = None
        self.rebalance: dict[str, str] | None = None
        self.tokens = ["token-1"]
        """Those that are valid; the last one is handed out."""
        self.google = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.events: list[dict[str, Any]] = []
        self.started: list[str] = []
        """Azure's events that were answered."""
        self.nonsense: bytes | None = None
        """Said in place of everything."""
        self.asked: list[str] = []
        self.changed = threading.Condition()
        self.url = ""

    def change_google(self, value: str, to: str) -> None:
        with self.changed:
            self.google[value] = to
            self.changed.notify_all()


def _handler(cloud: Cloud) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if self.path != "/latest/api/token" or not ttl.isdecimal():
                return self.answer(400)
            return self.answer(200, cloud.tokens[-1].encode())

        def do_GET(self) -> None:
            url = urlparse(self.path)
            cloud.asked.append(url.path)
            if cloud.nonsense is not None:
                return self.answer(200, cloud.nonsense)
            if url.path.startswith("/latest/"):
                return self.aws(url.path)
            if url.path.startswith("/computeMetadata/"):
                return self.google(url.path, parse_qs(url.query))
            return self.azure(url.path, parse_qs(url.query))

        def aws(self, path: str) -> None:
            if self.headers.get("X-aws-ec2-metadata-token") not in cloud.tokens:
                return self.answer(401)
            document = {
                "/latest/meta-data/spot/instance-action": cloud.spot,
                "/latest/meta-data/events/recommendations/rebalance": cloud.rebalance,
            }.get(path)
            return self.answer(404) if document is None else self.answer(200, json.dumps(document).encode())

        def google(self, path: str, query: dict[str, list[str]]) -> None:
            if self.headers.get("Metadata-Flavor") != "Google":
                return self.answer(403)
            name = path.rpartition("/")[2]
            with cloud.changed:
                if query.get("wait_for_change") == ["true"]:
                    seconds = float(query["timeout_sec"][0])
                    cloud.changed.wait_for(lambda: [_etag(cloud.google[name])] != query["last_etag"], seconds)
                value = cloud.google[name]
            return self.answer(200, value.encode(), Metadata_Flavor="Google", ETag=_etag(value))

        def azure(self, path: str, query: dict[str, list[str]]) -> None:
            if self.headers.get("Metadata") != "true" or "api-version" not in query:
                return self.answer(400)
            if path == "/metadata/instance/compute/name":
                return self.answer(200, b"trainer_7")
            return self.answer(200, json.dumps({"DocumentIncarnation": 1, "Events": cloud.events}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            cloud.started += [request["EventId"] for request in body["StartRequests"]]
            self.answer(200 if self.headers.get("Metadata") == "true" else 400)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


def _etag(value: str) -> str:
    return f"etag-{value}"


@contextmanager
def metadata_service() -> Iterator[Cloud]:
    cloud = Cloud()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cloud))
    server.daemon_threads = True
    cloud.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        server.shutdown()
        server.server_close()


def utc(seconds_from_now: float) -> str:
    """A time as AWS writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds_from_now))
