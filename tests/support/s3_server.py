"""A small S3 for tests, in this process: of its API, what Headway's checkpoints, stores and sources need.

Every answer is one that the documentation of the API describes (https://docs.aws.amazon.com/AmazonS3/latest/API):

- objects, whole or a range (200, 206), their ETag, and the condition that there be none (`If-None-Match: *`, 412);
- `ListObjectsV2` by prefix, delimiter and page; `DeleteObjects`; buckets that are made;
- uploads in parts, of which nothing is to be seen until they are completed;
- requests signed with the one key that there is (Signature Version 4), and who has another is not let in (403).

One request at a time touches the objects, as each write there is atomic. What only a real server can show (its own
limits, pages, crashes) is shown by one: the same tests run with SeaweedFS in `make test-parts`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from itertools import count
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from support.local_server import LocalServer

_STATUS = {
    "AccessDenied": 403,
    "InvalidAccessKeyId": 403,
    "InvalidRange": 416,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "PreconditionFailed": 412,
    "SignatureDoesNotMatch": 403,
}
_MOST_KEYS = 1000

Answer = tuple[int, dict[str, str], bytes]


class _Refused(Exception):
    """With the code of an error."""


@dataclass(frozen=True)
class _Object:
    content: bytes
    etag: str
    written: datetime = field(default_factory=lambda: datetime.now(UTC))

    def headers(self) -> dict[str, str]:
        return {"ETag": self.etag, "Last-Modified": format_datetime(self.written, usegmt=True)}


@dataclass
class Buckets:
    """What a server keeps; it outlives it, as a disk does."""

    objects: dict[str, dict[str, _Object]] = field(default_factory=dict)
    """By bucket and key."""
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=lambda: count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)


class EmulatedS3(LocalServer):
    """Serves until it is closed.

    Args:
        buckets: What it begins with, and keeps.
        access_key: Of the one who is let in.
        secret_key: Likewise.
        port: Where; a free one when it is 0.
    """

    def __init__(self, buckets: Buckets, access_key: str, secret_key: str, port: int = 0) -> None:
        self._buckets, self._access_key, self._secret_key = buckets, access_key, secret_key
        self.closed = False
        super().__init__(_Handler, port=port, store=self)

    def close(self) -> None:
        """End it, in the middle of what it does."""
        self.closed = True
        super().close()

    def answer(self, request: _Handler, body: bytes) -> Answer:
        """Status, headers and content for a request."""
        self._let_in(request)
        url = urlsplit(request.path)
        _, bucket, *rest = unquote(url.path).split("/", 2)
        key, query = "".join(rest), dict(parse_qsl(url.query, keep_blank_values=True))
        with self._buckets.lock:
            if not key and request.command == "PUT":
                self._buckets.objects.setdefault(bucket, {})
                return 200, {}, b""
            objects = self._buckets.objects.get(bucket)
            if objects is None:
                raise _Refused("NoSuchBucket")
            if "uploads" in query or "uploadId" in query:
                return self._upload(request, objects, key, query, body)
            if key:
                return self._object(request, objects, key, body)
            if "delete" in query:
                for found in re.findall(rb"<Key>(.*?)</Key>", body, re.DOTALL):
                    objects.pop(unescape(found.decode()), None)
                return 200, {}, b"<DeleteResult></DeleteResult>"
            return 200, {}, b"" if request.command == "HEAD" else _listing(bucket, objects, query)

    def _let_in(self, request: _Handler) -> None:
        """Signature Version 4 (`sig-v4-header-based-auth`)."""
        said = request.headers.get("Authorization", "")
        found = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=([^,]+), ?SignedHeaders=([^,]+), ?Signature=(\w+)", said)
        if found is None:
            raise _Refused("AccessDenied")
        key, *scope = found[1].split("/")
        if key != self._access_key:
            raise _Refused("InvalidAccessKeyId")
        path, _, query = request.path.partition("?")
        pairs = sorted(tuple((*part.split("="), "")[:2]) for part in query.split("&") if part)
        signed = [f"{name}:{' '.join(request.headers[name].split())}\n" for name in found[2].split(";")]
        asked = "\n".join((
            request.command, path, "&".join("=".join(pair) for pair in pairs),
            "".join(signed), found[2], request.headers["X-Amz-Content-SHA256"],
        ))  # fmt: skip
        text = "\n".join((
            "AWS4-HMAC-SHA256", request.headers["X-Amz-Date"], "/".join(scope), _sha256(asked.encode())
        ))  # fmt: skip
        secret = f"AWS4{self._secret_key}".encode()
        for part in (*scope, text):
            secret = hmac.digest(secret, part.encode(), "sha256")
        if secret.hex() != found[3]:
            raise _Refused("SignatureDoesNotMatch")

    def _object(self, request: _Handler, objects: dict[str, _Object], key: str, body: bytes) -> Answer:
        if request.command == "PUT":
            return 200, {"ETag": self._write(request, objects, key, body, f'"{_md5(body)}"')}, b""
        if request.command == "DELETE":
            objects.pop(key, None)
            return 204, {}, b""
        if key not in objects:
            raise _Refused("NoSuchKey")
        found, wanted = objects[key], request.headers.get("Range")
        if not wanted:
            return 200, found.headers(), found.content
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        size = len(found.content)
        begin = int(first) if first else max(0, size - int(last))
        end = min(int(last) + 1, size) if first and last else size
        if begin >= size:
            raise _Refused("InvalidRange")
        return 206, {**found.headers(), "Content-Range": f"bytes {begin}-{end - 1}/{size}"}, found.content[begin:end]

    def _write(self, request: _Handler, objects: dict[str, _Object], key: str, content: bytes, etag: str) -> str:
        if request.headers.get("If-None-Match") == "*" and key in objects:
            raise _Refused("PreconditionFailed")
        objects[key] = _Object(content, etag)
        return etag

    def _upload(
        self, request: _Handler, objects: dict[str, _Object], key: str, query: dict[str, str], body: bytes
    ) -> Answer:
        """An object in parts."""
        if "uploads" in query:
            number = f"upload-{next(self._buckets.numbers)}"
            self._buckets.uploads[number] = {}
            return (
                200,
                {},
                f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        number = query["uploadId"]
        if number not in self._buckets.uploads:
            raise _Refused("NoSuchUpload")
        parts = self._buckets.uploads[number]
        if request.command == "PUT":
            parts[int(query["partNumber"])] = body
            return 200, {"ETag": f'"{_md5(body)}"'}, b""
        if request.command == "DELETE":
            del self._buckets.uploads[number]
            return 204, {}, b""
        wanted = [parts[int(part)] for part in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        digests = b"".join(hashlib.md5(part).digest() for part in wanted)
        etag = self._write(request, objects, key, b"".join(wanted), f'"{_md5(digests)}-{len(wanted)}"')
        del self._buckets.uploads[number]
        return (
            200,
            {},
            f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>".encode(),
        )


def _listing(bucket: str, objects: dict[str, _Object], query: dict[str, str]) -> bytes:
    """`ListObjectsV2`."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    rows: dict[str, bool] = {}  # what is listed, and whether it stands for all below
    for name in sorted(name for name in objects if name.startswith(prefix)):
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        rows[name if cut < 0 else name[: cut + 1]] = cut >= 0
    left = [name for name in rows if name > after]
    page = left[: min(int(query.get("max-keys", _MOST_KEYS)), _MOST_KEYS)]
    more = len(left) > len(page)
    told = [f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"]
    told.append(f"<MaxKeys>{_MOST_KEYS}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>")
    if more:
        told.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
    for name in page:
        if rows[name]:
            told.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            continue
        it = objects[name]
        told.append(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{it.written:%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
            f"<ETag>{escape(it.etag)}</ETag><Size>{len(it.content)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    return (
        f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(told)}</ListBucketResult>'.encode()
    )


def _md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _decoded(body: bytes) -> bytes:
    """What was sent in chunks with a checksum at the end (`aws-chunked`)."""
    parts = []
    while body:
        head, _, body = body.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        if not size:
            break
        parts.append(body[:size])
        body = body[size + 2 :]
    return b"".join(parts)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = 65536, True
    store: EmulatedS3

    def log_message(self, *_: Any) -> None:
        pass

    def handle_expect_100(self) -> bool:
        went = super().handle_expect_100()
        self.wfile.flush()
        return went

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = _decoded(body)
        try:
            status, headers, content = self.store.answer(self, body)
        except _Refused as refused:
            code = str(refused)
            status, headers = _STATUS[code], {}
            content = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        if self.store.closed:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any
