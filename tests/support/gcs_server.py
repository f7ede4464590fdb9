"""A small Google Cloud Storage for tests: of its JSON API, what keeping checkpoints there needs.

Every answer is one that the documentation of the API describes (https://cloud.google.com/storage/docs):

- objects, their fields, and a new generation with every write: `json_api/v1/objects`, `metadata#generation-number`;
- listing by prefix, delimiter and page: `json_api/v1/objects/list`;
- reading all or a range of an object (200, 206): `json_api/v1/objects/get`, `range_header`;
- uploads whole, with metadata (`multipart/related`), and in pieces, of which multiples of 256 KiB are kept and the
  rest is asked for again (308 and `Range`): `json_api/v1/objects/insert`, `performing-resumable-uploads`;
- `ifGenerationMatch`, 0 for "there must be none" (412): `request-preconditions`; and the other refusals (401, 404,
  499): `json_api/v1/status-codes`.

One request at a time touches the objects, as each write there is atomic.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.local_server import LocalServer

_PIECE = 256 * 1024
_WORDS = {
    401: ("required", "Anonymous caller does not have storage.objects.get access to the Google Cloud Storage object."),
    404: ("notFound", "Not Found"),
    412: ("conditionNotMet", "At least one of the pre-conditions you specified did not hold."),
    499: ("clientClosedRequest", "Client Closed Request"),
}


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True)
class _Object:
    content: bytes
    generation: int
    updated: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))


class GcsServer(LocalServer):
    """Serves `bucket` to everybody, `private` to nobody; other buckets are not there."""

    bucket, private = "headway", "private"

    def __init__(self) -> None:
        self.uploads = 0
        """How many were begun."""
        self.ranges: list[str] = []
        """`Range` or `Content-Range` of every request that had one."""
        self._objects: dict[tuple[str, str], _Object] = {}
        self._uploads: dict[str, tuple[tuple[str, str], list[str], bytearray]] = {}
        self._generations, self._lock = count(1_700_000_000_000_000), threading.Lock()
        super().__init__(_Handler, store=self)

    def answer(self, request: _Handler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content for a request."""
        url = urlsplit(request.path)
        ranges = request.headers.get("Range") or request.headers.get("Content-Range") or ""
        found = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", url.path)
        with self._lock:
            self.ranges += [ranges] if ranges else []
            if found is None or found[2] not in (self.bucket, self.private):
                raise _Refused(404)
            if found[2] == self.private:
                raise _Refused(401)
            query, name = parse_qs(url.query), unquote(found[3] or "")
            if found[1] == "/upload":
                return self._upload(request, query, body)
            if name:
                return self._object(request.command, (found[2], name), query, ranges)
            return 200, {}, json.dumps(self._listing(found[2], query)).encode()

    def _object(self, method: str, key: tuple[str, str], query: Any, wanted: str) -> tuple[int, dict[str, str], bytes]:
        if key not in self._objects:
            raise _Refused(404)
        if method == "DELETE":
            del self._objects[key]
            return 204, {}, b""
        if query.get("alt") != ["media"]:
            return 200, {}, json.dumps(self._resource(key)).encode()
        content = self._objects[key].content
        if not wanted:
            return 200, {}, content
        first, last = wanted.removeprefix("bytes=").split("-")
        begin, end = int(first), min(int(last) + 1, len(content)) if last else len(content)
        return 206, {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}, content[begin:end]

    def _listing(self, bucket: str, query: Any) -> dict[str, Any]:
        prefix, delimiter, after = (query.get(name, [""])[0] for name in ("prefix", "delimiter", "pageToken"))
        rows: dict[str, bool] = {}  # what is listed, and whether it stands for all below
        for name in sorted(name for where, name in self._objects if where == bucket and name.startswith(prefix)):
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            rows[name if cut < 0 else name[: cut + 1]] = cut >= 0
        left = [name for name in rows if name > after]
        page = left[: min(int(query.get("maxResults", ["1000"])[0]), 1000)]
        listing: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [self._resource((bucket, name)) for name in page if not rows[name]],
            "prefixes": [name for name in page if rows[name]],
        }
        return {**listing, "nextPageToken": page[-1]} if len(left) > len(page) else listing

    def _upload(self, request: _Handler, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        bucket, condition = request.path.split("/")[5], query.get("ifGenerationMatch", [])
        if "upload_id" in query:
            return self._piece(request, query["upload_id"][0], body)
        self.uploads += 1
        if query["uploadType"] == ["multipart"]:
            mark = re.search('boundary="?([^";]+)', request.headers["Content-Type"])
            assert mark is not None
            _, metadata, media = body.split(b"--" + mark[1].encode(), 2)
            content = re.split(rb"\r?\n\r?\n", media, maxsplit=1)[1].removesuffix(b"--" + mark[1].encode() + b"--")
            name = json.loads(re.split(rb"\r?\n\r?\n", metadata, maxsplit=1)[1])["name"]
            return self._write((bucket, name), condition, content.removesuffix(b"\n").removesuffix(b"\r"))
        key, number = (bucket, query["name"][0]), f"upload-{next(self._generations)}"
        self._check(key, condition)
        self._uploads[number] = (key, condition, bytearray())
        where = f"{self.endpoint}{urlsplit(request.path).path}?uploadType=resumable&upload_id={number}"
        return 200, {"Location": where}, b""

    def _piece(self, request: _Handler, number: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if number not in self._uploads:
            raise _Refused(404)
        key, condition, came = self._uploads[number]
        if request.command == "DELETE":
            del self._uploads[number]
            raise _Refused(499)
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", request.headers["Content-Range"])
        assert span is not None
        if int(span[1]) <= len(came):  # what it has already is passed over
            came += body[len(came) - int(span[1]) :]
        if len(came) == int(span[2]):
            del self._uploads[number]
            return self._write(key, condition, bytes(came))
        del came[len(came) // _PIECE * _PIECE :]
        return 308, {"Range": f"bytes=0-{len(came) - 1}"} if came else {}, b""

    def _check(self, key: tuple[str, str], condition: list[str]) -> None:
        there = self._objects.get(key)
        if condition and int(condition[0]) != (there.generation if there else 0):
            raise _Refused(412)

    def _write(self, key: tuple[str, str], condition: list[str], content: bytes) -> tuple[int, dict[str, str], bytes]:
        self._check(key, condition)
        self._objects[key] = _Object(content, next(self._generations))
        return 200, {}, json.dumps(self._resource(key)).encode()

    def _resource(self, key: tuple[str, str]) -> dict[str, str]:
        it = self._objects[key]
        return {
            "kind": "storage#object",
            "bucket": key[0],
            "name": key[1],
            "generation": str(it.generation),
            "metageneration": "1",
            "size": str(len(it.content)),
            "md5Hash": base64.b64encode(hashlib.md5(it.content).digest()).decode(),
            "etag": base64.b64encode(str(it.generation).encode()).decode(),
            "timeCreated": it.updated,
            "updated": it.updated,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = 65536, True
    store: GcsServer

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, headers, content = self.store.answer(self, body)
        except _Refused as refused:
            reason, words = _WORDS[refused.status]
            error = {"code": refused.status, "message": words, "errors": [{"reason": reason, "message": words}]}
            status, headers, content = refused.status, {}, json.dumps({"error": error}).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = handle_any
