"""A small Hugging Face Hub for tests: of its HTTP interface, what reading datasets and models needs.

Answers are those that the clients look for, as they do in the Hub's own:

- `GET /api/datasets/REPO[/revision/REV]`: the commit that a revision is;
- `GET /api/datasets/REPO/refs`: its branches;
- `GET /api/datasets/REPO/tree/REV[/FOLDER]`: files and folders, page by page (`Link`);
- `GET`, `HEAD /datasets/REPO/resolve/REV/FILE`: a redirect with the commit, hash and length: to the storage for large
  files, on another host where no token must be sent, and to a cache of the Hub's own for small ones. Both serve ranges;
- models have the same, as `/api/models/REPO` and `/REPO/resolve/REV/FILE`;
- refusals with `X-Error-Code`: a repository that is not there, or private, is 401 without a token and 404 with one; a
  gated one lists its files to everybody, and gives none of them (401, 403);
- a repository that was renamed answers with a redirect (307);
- writing of models: `POST /api/repos/create`, `/api/validate-yaml`, `/api/models/REPO/preupload/REV`,
  `/REPO.git/info/lfs/objects/batch`, `PUT /storage/HASH` (without a token), `/api/models/REPO/commit/REV`; with the
  writer's token only (403).

Not spoken: Xet, and the dataset viewer (`datasets` does without when it is not there).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from support.local_server import LocalServer

#: Tokens that the server knows: of somebody who may read everything, and of somebody who may read what is public.
READER, STRANGER = "hf_reader", "hf_stranger"
#: And of somebody who may write everything.
WRITER = "hf_writer"

_API = re.compile(
    r"/api/(?:datasets|models)/(?P<repo>[^/]+(?:/[^/]+)?)(?:/(?P<verb>revision|tree|refs)(?:/(?P<rest>.+))?)?"
)
_WRITES = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<verb>preupload|commit)/(?P<branch>.+)")
_BATCH = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
_FILE = re.compile(r"/(?:datasets/)?(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<rest>.+)")
_CACHE = re.compile(r"/api/resolve-cache/datasets/(?P<repo>.+)/(?P<commit>[0-9a-f]{40})/(?P<path>.+)")
#: Kept by their hash in a storage, like what is marked so in a repository's `.gitattributes`.
_LARGE = (".parquet", ".arrow", ".gz", ".zst", ".safetensors")
_BLOCK = 2**15


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


@dataclass
class _Repo:
    private: bool
    gated: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What was asked, and how it was answered."""

    method: str
    path: str
    range: str
    token: str
    status: int
    sent: int
    """Bytes of content."""


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: dict[str, str]
    content: bytes = b""


class HubServer(LocalServer):
    """Serves what is committed to it, on a port of its own."""

    def __init__(self, page: int = 1000) -> None:
        self.requests: list[Request] = []
        self.budget: int | None = None
        """Bytes of large files that go out before every connection is dropped; without end when None."""
        self.refusals: list[int] = []
        """Statuses with which the next requests are answered, whatever they ask for; 0 drops the connection."""
        self.on_request: Callable[[str], None] | None = None
        """Is called with the path of every request before it is answered."""
        self._repos: dict[str, _Repo] = {}
        self._renamed: dict[str, str] = {}
        self._blobs: dict[str, bytes] = {}
        self._page, self._lock = page, threading.Lock()
        super().__init__(_Handler, hub=self)

    def commit(
        self,
        name: str,
        files: dict[str, bytes | str],
        branch: str = "main",
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Put files into a repository, which is made when it is not there; the commit's hash."""
        repo = self._repos.setdefault(name, _Repo(private, gated))
        tree = dict(repo.commits.get(repo.branches.get(branch, ""), {}))
        for path, content in files.items():
            tree[path] = content.encode() if isinstance(content, str) else content
            self._blobs[_sha256(tree[path])] = tree[path]
        commit = hashlib.sha1(repr((name, branch, len(repo.commits), sorted(tree))).encode()).hexdigest()
        repo.commits[commit], repo.branches[branch] = tree, commit
        return commit

    def rename(self, old: str, new: str) -> None:
        """Give a repository another name; the old one leads there."""
        self._repos[new], self._renamed[old] = self._repos.pop(old), new

    def sent(self, part: str = "/storage/") -> int:
        """Bytes of content that went out for URLs with this part since the last `forget`."""
        return sum(request.sent for request in self.requests if part in request.path)

    def forget(self) -> None:
        """Begin a new log of requests."""
        self.requests.clear()

    def answer(self, request: _Handler) -> _Answer:
        """Status, headers and content for a request."""
        if self.on_request is not None:
            self.on_request(request.path)
        if self.refusals:
            raise _Refused(self.refusals.pop(0))
        url, token = urlsplit(request.path), request.token
        wanted = request.headers.get("Range") or ""
        if request.command in ("POST", "PUT"):
            return self._write(request, url.path, token)
        if url.path.startswith("/storage/"):
            if token:
                raise _Refused(400, "", "Only one auth mechanism allowed")
            return _part(self._blobs[url.path.removeprefix("/storage/")], wanted, {})
        if found := _CACHE.fullmatch(url.path):
            commit = found["commit"]
            content = self._repos[found["repo"]].commits[commit][unquote(found["path"])]
            return _part(content, wanted, {"X-Repo-Commit": commit, "ETag": f'"{_git_hash(content)}"'})
        if found := _FILE.fullmatch(url.path):
            return self._resolve(found["repo"], found["rest"], token)
        if found := _API.fullmatch(url.path):
            name = found["repo"]
            if name in self._renamed:
                return _Answer(307, {"Location": request.path.replace(name, self._renamed[name], 1)})
            return self._api(name, found["verb"], found["rest"] or "main", token, parse_qs(url.query))
        raise _Refused(404)

    def _write(self, request: _Handler, path: str, token: str) -> _Answer:
        content = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if path.startswith("/storage/"):
            if token or _sha256(content) != path.removeprefix("/storage/"):
                raise _Refused(400, "", "Only one auth mechanism allowed, and the content that was announced")
            self._blobs[_sha256(content)] = content
            return _Answer(200, {})
        if token not in (WRITER, READER, STRANGER):
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        if token != WRITER:
            raise _Refused(403, "", "You don't have the rights to create a model under this namespace")
        if path == "/api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            made = {"url": f"{self.endpoint}/{name}", "id": name}
            if name in self._repos:
                return replace(_json({**made, "error": "You already created this model repo"}), status=409)
            self.commit(name, {".gitattributes": ""}, private=asked.get("visibility") == "private")
            return _json(made)
        if found := _BATCH.fullmatch(path):
            self._allowed(found["repo"], token)
            objects = [self._wanted(one) for one in json.loads(content)["objects"]]
            return _json({"transfer": "basic", "objects": objects})
        if (found := _WRITES.fullmatch(path)) is None:
            raise _Refused(404)
        repo = self._allowed(found["repo"], token)
        if found["verb"] == "preupload":
            modes = {True: "lfs", False: "regular"}
            paths = [file["path"] for file in json.loads(content)["files"]]
            files = [{"path": p, "uploadMode": modes[p.endswith(_LARGE)], "shouldIgnore": False} for p in paths]
            return _json({"files": files})
        return self._take_commit(found["repo"], repo, found["branch"], content)

    def _wanted(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What to do with a large file: nothing, when its content is there."""
        if asked["oid"] in self._blobs:
            return asked
        storage = f"http://localhost:{self._server.server_address[1]}/storage/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": storage, "header": {}}}}

    def _take_commit(self, name: str, repo: _Repo, branch: str, content: bytes) -> _Answer:
        lines = [json.loads(line) for line in content.splitlines() if line]
        new: dict[str, bytes | str] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                new[value["path"]] = self._blobs[value["oid"]]
        gone = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
        commit = self.commit(name, new, branch)
        for path in gone:
            del repo.commits[commit][path]
        return _json({"success": True, "commitOid": commit, "commitUrl": f"{self.endpoint}/{name}/commit/{commit}"})

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """What a repository holds."""
        repo = self._repos[name]
        return dict(repo.commits[repo.branches[branch]])

    def is_private(self, name: str) -> bool:
        """Whether only those who may read everything see a repository."""
        return self._repos[name].private

    def commits(self, name: str) -> int:
        """How many commits a repository has."""
        return len(self._repos[name].commits)

    def _api(self, name: str, verb: str | None, rest: str, token: str, query: Any) -> _Answer:
        repo = self._allowed(name, token)
        if verb == "refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in repo.branches.items()]
            return _json({"branches": branches, "converts": [], "tags": []})
        revision, _, path = rest.partition("/")
        commit = self._commit_of(repo, unquote(revision))
        tree = repo.commits[commit]
        if verb in (None, "revision"):
            facts = {"id": name, "sha": commit, "private": repo.private, "gated": "auto" if repo.gated else False}
            siblings = [{"rfilename": path} for path in sorted(tree)]
            return _json({"_id": commit[:24], **facts, "disabled": False, "tags": [], "siblings": siblings})
        return self._tree(name, revision, tree, unquote(path), query)

    def _tree(self, name: str, revision: str, tree: dict[str, bytes], folder: str, query: Any) -> _Answer:
        if folder and _entry(tree, folder) is None:
            raise _Refused(404, "EntryNotFound", f"{folder} does not exist on '{revision}'")
        below = f"{folder}/" if folder and folder not in tree else folder
        paths = {path for path in tree if path.startswith(below)}
        paths |= {str(parent) for path in paths for parent in PurePosixPath(path).parents if str(parent) != "."}
        recursive = query.get("recursive") in (["true"], ["True"], ["1"])
        paths = {path for path in paths if path.startswith(below) and (recursive or "/" not in path[len(below) :])}
        start = int(query.get("cursor", ["0"])[0])
        page = sorted(paths)[start : start + self._page]
        headers = {}
        if start + self._page < len(paths):
            where = f"{self.endpoint}/api/datasets/{name}/tree/{revision}/{quote(folder, safe='')}".rstrip("/")
            following = f"{where}?recursive={str(recursive).lower()}&cursor={start + self._page}"
            headers["Link"] = f'<{following}>; rel="next"'
        return _json([_entry(tree, path) for path in page], headers)

    def _resolve(self, name: str, rest: str, token: str) -> _Answer:
        if name in self._renamed:
            return _Answer(307, {"Location": f"/datasets/{self._renamed[name]}/resolve/{rest}"})
        repo = self._allowed(name, token, files=True)
        revision, _, path = rest.partition("/")
        commit, path = self._commit_of(repo, unquote(revision)), unquote(path)
        content = repo.commits[commit].get(path)
        if content is None:
            raise _Refused(404, "EntryNotFound", f"Entry not found, {commit}")
        large = path.endswith(_LARGE)
        etag = _sha256(content) if large else _git_hash(content)
        storage = f"http://localhost:{self._server.server_address[1]}/storage/{_sha256(content)}"
        return _Answer(
            302 if large else 307,
            {
                "Location": storage if large else f"/api/resolve-cache/datasets/{name}/{commit}/{quote(path)}",
                "X-Repo-Commit": commit,
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": f'"{etag}"',
                "Accept-Ranges": "bytes",
            },
        )

    def _allowed(self, name: str, token: str, files: bool = False) -> _Repo:
        if token not in ("", READER, STRANGER, WRITER):
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        repo = self._repos.get(name)
        if repo is None or (repo.private and token not in (READER, WRITER)):
            # Of a Hub at https the clients take any 401 for this.
            words = "Repository not found" if token else "Invalid username or password."
            raise _Refused(404 if token else 401, "RepoNotFound", words)
        if repo.gated and files and token not in (READER, WRITER):
            words = f"Access to dataset {name} is restricted."
            raise _Refused(403 if token else 401, "GatedRepo", words)
        return repo

    def _commit_of(self, repo: _Repo, revision: str) -> str:
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def spend(self, asked: int) -> int:
        """How many bytes of a large file may still go out."""
        with self._lock:
            if self.budget is None:
                return asked
            allowed = min(asked, self.budget)
            self.budget -= allowed
            return allowed


def _json(value: Any, headers: dict[str, str] | None = None) -> _Answer:
    return _Answer(200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())


def _part(content: bytes, wanted: str, headers: dict[str, str]) -> _Answer:
    """All of a file, or the range that is wanted of it."""
    headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
    if found is None:
        return _Answer(200, headers, content)
    start, end = int(found[1]), int(found[2] or len(content) - 1) + 1
    if start >= len(content):
        raise _Refused(416)
    part = content[start:end]
    headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
    return _Answer(206, headers, part)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(tree: dict[str, bytes], path: str) -> dict[str, Any] | None:
    """A file or folder as the Hub lists it; None when there is none."""
    if path not in tree:
        inside = any(name.startswith(f"{path}/") for name in tree)
        return {"type": "directory", "oid": _git_hash(path.encode()), "size": 0, "path": path} if inside else None
    content = tree[path]
    entry = {"type": "file", "oid": _git_hash(content), "size": len(content), "path": path}
    if not path.endswith(_LARGE):
        return entry
    return {**entry, "lfs": {"oid": _sha256(content), "size": len(content), "pointerSize": 130}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubServer

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        try:
            answer = self.hub.answer(self)
        except _Refused as refused:
            if not refused.status:
                self.close_connection = True
                return
            told = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            headers = {name: value for name, value in told.items() if value}
            answer = _Answer(refused.status, headers, json.dumps({"error": refused.message}).encode())
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.content))}.items():
            self.send_header(name, value)
        self.end_headers()
        sent = 0 if self.command == "HEAD" else self._send(answer.content)
        wanted = self.headers.get("Range") or ""
        self.hub.requests.append(Request(self.command, self.path, wanted, self.token, answer.status, sent))

    def _send(self, content: bytes) -> int:
        """Send what may go out, and drop the connection where that is less than all."""
        allowed = self.hub.spend(len(content)) if self.path.startswith("/storage/") else len(content)
        for start in range(0, allowed, _BLOCK):
            try:
                self.wfile.write(content[start : min(start + _BLOCK, allowed)])
            except ConnectionError:  # the client has enough
                self.close_connection = True
                return start
        self.close_connection = self.close_connection or allowed < len(content)
        return allowed

    do_GET = do_HEAD = do_POST = do_PUT = handle_any
