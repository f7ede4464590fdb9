"""`headway serve` as clients see it: a process, OpenAI's client, and clients that mean no good."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headway.core.errors import ConfigError
from headway.core.process.waiting import wait_until
from headway.models.versions import ModelVersion, Registry, open_registry
from headway.registry.aliases import next_change, put_change
from headway.serve.cli.serve import run as serve
from headway.serve.experiment.split import Split
from headway.training.evaluation.inference import export_trained, load_trained
from support.chat import conversation
from support.registry import add
from support.runs import headway
from support.serve import KEY, Server, serving
from support.waits import LONG

MODEL = "tiny"


@pytest.fixture(scope="module")
def server(chat_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(chat_run, log, "--concurrency", "64", "--body-bytes", "200000", "--batch", "16") as one:
        yield one


def question(number: int) -> dict[str, Any]:
    """A request that differs by number in everything."""
    common = {"model": MODEL, "max_tokens": 4 + number % 13, "temperature": 0.9 if number % 2 else 0.0, "seed": number}
    if number % 3:
        return {**common, "messages": conversation(number % 8)[:1]}
    return {**common, "prompt": f"{number}: how do the", "logprobs": 1}


def ask(client: httpx.Client, body: dict[str, Any]) -> Any:
    """The reply without what differs each time."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return {key: value for key, value in response.json().items() if key not in ("id", "created")}


def test_the_client_of_openai_streams_what_headway_generate_prints(server: Server, chat_run: Path) -> None:
    prompt = "how do the"
    stream = server.openai().completions.create(
        model=MODEL, prompt=prompt, max_tokens=12, temperature=0.7, seed=9, stream=True
    )
    pieces = [event.choices[0].text for event in stream]
    words = ["--max-new-tokens", "12", "--temperature", "0.7", "--top-p", "1", "--seed", "9"]
    printed = headway("generate", chat_run, "--prompt", prompt, *words)
    assert printed.stdout == f"{prompt}{''.join(pieces)}\n"
    assert server.openai().models.list().data[0].id == MODEL


def test_chat_streams_and_ends_where_headway_chat_does(server: Server, chat_run: Path) -> None:
    asked, answer = conversation(1, turns=1)
    stream = server.openai().chat.completions.create(
        model=MODEL, messages=[asked], temperature=0, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    events = list(stream)
    said = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert said == answer["content"]
    assert events[-1].usage.completion_tokens > 0
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "stop"


def test_stop_strings_choices_and_seeds(server: Server) -> None:
    client = server.openai()
    whole = client.chat.completions.create(model=MODEL, messages=conversation(1)[:1], temperature=0)
    text = whole.choices[0].message.content
    stop = text[5:8]
    cut = client.chat.completions.create(model=MODEL, messages=conversation(1)[:1], temperature=0, stop=stop)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (text[: text.find(stop)], "stop")
    replies = [client.completions.create(model=MODEL, prompt="to", temperature=2, n=3, seed=5) for _ in range(2)]
    drawn = [[choice.text for choice in reply.choices] for reply in replies]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1


def test_each_of_64_clients_gets_the_reply_of_a_single_one(server: Server) -> None:
    """Greedy and sampled, chat and completions, of all lengths."""
    with server.http() as client:
        alone = [ask(client, question(number)) for number in range(64)]
    with ThreadPoolExecutor(64) as threads:
        clients = [server.http() for _ in range(64)]
        together = list(threads.map(ask, clients, map(question, range(64))))
    assert together == alone


@pytest.mark.slow
def test_each_of_64_clients_gets_the_reply_of_a_single_one_for_a_minute(server: Server) -> None:
    with server.http() as client:
        alone = [ask(client, question(number)) for number in range(64)]
    end = threading.Event()
    timer = threading.Timer(60, end.set)
    timer.start()

    def repeat(number: int) -> int:
        count = 0
        with server.http() as client:
            while not end.is_set():
                assert ask(client, question(number)) == alone[number]
                count += 1
        return count

    with ThreadPoolExecutor(64) as threads:
        counts = list(threads.map(repeat, range(64)))
    assert min(counts) > 0


def test_errors_have_the_form_of_openai(server: Server) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="how " * 2000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        client.completions.create(model=MODEL, prompt="a", presence_penalty=1.0)
    with pytest.raises(openai.AuthenticationError):
        server.openai("another-key-0123456789").models.list()
    with server.http(None) as none:
        assert none.get("/metrics").status_code == 401
        assert none.get("/healthz").status_code == none.get("/readyz").status_code == 200
        assert none.get("/v1/nothing").json()["error"]["code"] == "unknown_url"


def test_the_page_loads_nothing_from_elsewhere(server: Server) -> None:
    with server.http(None) as client:
        pages = {path: client.get(path) for path in ("/", "/chat.js", "/chat.css")}
    assert all(page.status_code == 200 for page in pages.values())
    assert "default-src 'none'" in pages["/"].headers["content-security-policy"]
    assert not any("//" in page.text.replace("// ", "") for page in (pages["/"], pages["/chat.css"]))


def test_metrics_count_requests_and_tokens(server: Server) -> None:
    with server.http() as client:
        ask(client, question(0))
        text = client.get("/metrics").text
    assert 'headway_serve_requests_total{path="/v1/completions",status="200"}' in text
    assert 'headway_serve_tokens_total{kind="reply"}' in text
    assert "headway_serve_ready 1.0" in text


def raw(server: Server, content: bytes) -> socket.socket:
    """A connection that has sent something."""
    one = socket.create_connection(("127.0.0.1", server.port), timeout=LONG)
    one.sendall(content)
    return one


def head(length: int | str, **headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}"]
    lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def answers(server: Server) -> None:
    """Check that others are answered as ever."""
    with server.http() as client:
        ask(client, question(0))


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"[" * 150_000, 400),
        (b'{"a":' * 30_000, 400),
        (b"{" * 150_000, 400),
        (b"\xff\xfe", 400),
        (b"[1]", 400),
        (b'{"model": "tiny", "model": "tiny"}', 400),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": 1e400}', 400),
        (b'{"model": "tiny", "prompt": [9999999999999999999999]}', 400),
        (b'{"model": "tiny", "prompt": [-1]}', 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 200),
        (b" " * 200_001, 413),
    ],
)
def test_hostile_bodies_are_refused(server: Server, content: bytes, status: int) -> None:
    with server.http() as client:
        response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (status, 400), response.text
    assert status == 200 or "error" in response.json()
    answers(server)


def test_a_body_of_100_megabytes_costs_no_memory(server: Server) -> None:
    """With its length in the head, and in chunks without one."""
    before = server.resident_bytes()
    with raw(server, head(100 * 2**20)) as one:
        assert b" 413 " in one.recv(4096)

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20

    with server.http() as client:
        try:
            response = client.post("/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})
            assert response.status_code == 413
        except httpx.WriteError:
            pass  # the server has closed the connection that the client was still writing to
    assert server.resident_bytes() - before < 30 * 2**20
    answers(server)


def test_other_types_and_names_are_refused(server: Server) -> None:
    """Pages of other sites can send forms without being asked."""
    with server.http() as client:
        assert client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


def is_closed(one: socket.socket) -> bool:
    """Wait for the end of a connection, and leave it."""
    with one:
        try:
            return one.recv(1) == b""
        except ConnectionResetError:
            return True


def test_silent_and_slow_clients_stop_nobody(server: Server) -> None:
    idle = [raw(server, b"") for _ in range(50)]
    halves = [raw(server, b"POST /v1/comp") for _ in range(50)]
    senders = [raw(server, head(1000) + b"{") for _ in range(20)]
    answers(server)
    with server.http() as client:
        assert wait_until(lambda: "headway_serve_requests_running 20" in client.get("/metrics").text, LONG)
        for one in senders:
            one.close()
        assert wait_until(lambda: "headway_serve_requests_running 0" in client.get("/metrics").text, LONG)
    for one in (*idle, *halves):  # those that send no head are cut off
        assert is_closed(one)


def test_a_client_that_goes_away_ends_its_computation(server: Server) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 200, "n": 16, "stream": True}).encode()
    for streams in (body, body.replace(b"true", b"false")):
        for _ in range(3):
            raw(server, head(len(streams)) + streams).close()
    with server.http() as client:
        assert wait_until(lambda: "headway_serve_requests_running 0" in client.get("/metrics").text, LONG)
    answers(server)


def test_too_many_requests_get_429_and_when_to_try_again(chat_run: Path, tmp_path: Path) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    with serving(chat_run, tmp_path / "log", "--concurrency", "2", "--batch", "1") as server, server.http() as client:
        held = [raw(server, head(len(body)) + body[:-1]) for _ in range(2)]
        assert wait_until(lambda: "headway_serve_requests_running 2" in client.get("/metrics").text, LONG)
        refused = client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        for one in held:
            one.sendall(body[-1:])
            assert b" 200 " in one.recv(4096)
            one.close()


class Load:
    """Clients that ask again and again until the server takes no more."""

    def __init__(self, server: Server, clients: int, model: str) -> None:
        self.replies: list[str] = []
        self.lost: list[str] = []
        self.end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server, model)) for _ in range(clients)]
        for one in self._threads:
            one.start()

    def _ask(self, server: Server, model: str) -> None:
        body = {"model": model, "prompt": "how do the", "max_tokens": 40, "temperature": 0, "stream": True}
        with server.http() as client:
            while not self.end.is_set():
                try:
                    response = client.post("/v1/completions", json=body)
                except httpx.ConnectError:
                    return  # the server takes no more
                except httpx.HTTPError as error:
                    self.lost.append(repr(error))
                    return
                text = response.text
                if response.status_code == 503 and "retry-after" in response.headers:
                    return
                if not text.endswith("data: [DONE]\n\n"):
                    self.lost.append(text)
                    return
                events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                self.replies.append("".join(event["choices"][0]["text"] for event in events))

    def join(self) -> None:
        for one in self._threads:
            one.join(LONG)


def test_a_drain_under_load_loses_no_request(chat_run: Path, tmp_path: Path) -> None:
    with serving(chat_run, tmp_path / "log", "--drain-seconds", "2", "--batch", "8") as server:
        load = Load(server, 8, MODEL)
        assert wait_until(lambda: len(load.replies) > 16, LONG)
        server.terminate()
        with server.http() as client:
            assert wait_until(lambda: client.get("/readyz").status_code == 503, LONG)
            assert client.get("/healthz").status_code == 200
        asked = len(load.replies)
        assert server.process.wait(LONG) == 0
        load.join()
        assert load.lost == []
        assert len(load.replies) > asked, "requests are taken while balancers learn of the end"
        assert len(set(load.replies)) == 1
        assert "every request has been answered" in server.log


def registered(folder: Path, *runs: Path) -> tuple[Registry, list[ModelVersion]]:
    """A registry with a version of the model `words` for each run."""
    registry = open_registry(folder / "registry")
    versions = []
    for number, run in enumerate(runs):
        export_trained(load_trained(run), folder / f"export-{number}")
        versions.append(add(registry, folder / f"export-{number}", "words"))
    return registry, versions


def test_an_alias_is_switched_under_load_without_a_failed_request(
    chat_run: Path, other_run: Path, tmp_path: Path
) -> None:
    registry, versions = registered(tmp_path, chat_run, other_run)
    put_change(registry, next_change(None, "words", "prod", versions[0]))
    options = ("--registry", tmp_path / "registry", "--follow-seconds", "0.2", "--batch", "8")
    with serving("words@prod", tmp_path / "log", *options) as server:
        load = Load(server, 6, "words")
        assert wait_until(lambda: len(load.replies) > 12, LONG)
        before = set(load.replies)
        put_change(registry, next_change(registry.present("words", "prod"), "words", "prod", versions[1]))
        assert wait_until(lambda: "words@2 answers" in server.log, LONG)
        seen = len(load.replies)
        assert wait_until(lambda: len(load.replies) > seen + 24, LONG)
        after = set(load.replies[-6:])
        load.end.set()
        load.join()
        assert load.lost == []
        assert (len(before), len(after)) == (1, 1)
        assert before != after
        assert set(load.replies) == before | after
        # A version that cannot be loaded leaves the present one in place.
        shutil.rmtree(tmp_path / "registry" / "words" / "files" / versions[0].fingerprint)
        put_change(registry, next_change(registry.present("words", "prod"), "words", "prod", versions[0]))
        assert wait_until(lambda: "the present version continues" in server.log, LONG)
        assert ask(server.http(), {"model": "words", "prompt": "a"})["model"] == "words"


def test_an_experiment_gives_all_requests_to_the_better_version(
    chat_run: Path, other_run: Path, tmp_path: Path
) -> None:
    registry, versions = registered(tmp_path, chat_run, other_run)
    for alias, version in zip(("prod", "candidate"), versions, strict=True):
        put_change(registry, next_change(None, "words", alias, version))
    folder = tmp_path / "one"
    shares = ("--split", "prod=50,candidate=50", "--experiment", folder, "--effect", "0.5", "--batch", "2")
    options = ("--registry", tmp_path / "registry", *shares)
    common = {"model": "words", "prompt": "how do the", "max_tokens": 8, "temperature": 0}

    def reply(client: httpx.Client, user: str) -> tuple[str, str]:
        response = client.post("/v1/completions", json={**common, "user": user})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"], response.headers["x-request-id"]

    with serving("words", tmp_path / "log", *options) as server, server.http() as client:
        texts = {user: reply(client, user)[0] for user in map(str, range(20))}
        assert len(set(texts.values())) == 2
        assert texts == {user: reply(client, user)[0] for user in texts}, "a user keeps the arm"
        for user in map(str, range(400)):
            _, name = reply(client, user)
            split = Split.parse("prod=50,candidate=50")
            success = split.arm_of("words", user) == 0
            posted = client.post("/v1/outcomes", json={"request_id": name, "success": success})
            assert posted.status_code == 200, posted.text
            if posted.json()["winner"] is not None:
                break
        assert posted.json()["winner"] == "prod"
        assert client.post("/v1/outcomes", json={"request_id": name, "success": True}).status_code == 409
        with server.http(None) as none:
            assert none.post("/v1/outcomes", json={"request_id": name, "success": True}).status_code == 401
        assert len({reply(client, user)[0] for user in texts}) == 1
        server.terminate()
        assert server.process.wait(LONG) == 0
    with serving("words", tmp_path / "log", *options) as server, server.http() as client:
        assert len({reply(client, user)[0] for user in texts}) == 1
        assert client.post("/v1/outcomes", json={"request_id": name, "success": True}).status_code == 409
        shown = headway("serve", "report", folder, "--json", "--output", tmp_path / "report.html")
    found = json.loads(shown.stdout)
    assert (found["decision"]["winner"], found["decision"]["stopped"]) == ("prod", "candidate")
    assert {one["version"] for one in found["versions"]} == {"words@1", "words@2"}
    assert "prod answers every request since" in (tmp_path / "report.html").read_text()


STAND_IN = '''#!{python}
"""A program with the command line and the interface of `vllm serve`."""
import argparse, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("verb")
parser.add_argument("model")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name")
parser.add_argument("--dtype")
asked = parser.parse_args()
assert os.path.exists(os.path.join(asked.model, "config.json")) and asked.dtype == "float32", asked

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, b"", "text/plain")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer " + os.environ["VLLM_API_KEY"]:
            self.reply(401, b"{{}}", "application/json")
        elif body.get("stream"):
            events = [{{"choices": [{{"index": 0, "text": word}}]}} for word in ("one ", "two")]
            lines = ["data: " + json.dumps(event) for event in events] + ["data: [DONE]", ""]
            self.reply(200, "\\n\\n".join(lines).encode(), "text/event-stream")
        elif body["prompt"] == "bad":
            self.reply(400, json.dumps({{"error": {{"message": "bad prompt"}}}}).encode(), "application/json")
        else:
            text = self.headers["X-Request-Id"] + asked.served_model_name
            self.reply(200, json.dumps({{"choices": [{{"index": 0, "text": text}}]}}).encode(), "application/json")

    def reply(self, status, content, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

ThreadingHTTPServer((asked.host, asked.port), Handler).serve_forever()
'''


def test_vllm_answers_behind_the_same_front(chat_run: Path, tmp_path: Path) -> None:
    """vLLM needs a GPU: a program takes its place that speaks as it does. A run is exported for it."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{program.parent}:/usr/bin:/bin"
    with serving(chat_run, tmp_path / "log", "--engine-option=--dtype=float32", PATH=path) as server:
        client = server.openai()
        whole = client.completions.with_raw_response.create(model=MODEL, prompt="a")
        assert whole.parse().choices[0].text == f"{whole.headers['x-request-id']}{MODEL}"
        stream = client.completions.create(model=MODEL, prompt="a", stream=True)
        assert "".join(event.choices[0].text for event in stream) == "one two"
        with pytest.raises(openai.BadRequestError, match="bad prompt"):
            client.completions.create(model=MODEL, prompt="bad")
        with pytest.raises(openai.AuthenticationError):
            server.openai("another-key-0123456789").completions.create(model=MODEL, prompt="a")
        server.terminate()
        assert server.process.wait(LONG) == 0


@pytest.mark.parametrize(
    ("options", "key", "reason"),
    [
        ({"host": "0.0.0.0"}, KEY, "there is no certificate"),
        ({"host": "0.0.0.0", "tls_cert": Path("c.pem"), "tls_key": Path("k.pem")}, None, "is not set"),
        ({"tls_cert": Path("c.pem")}, KEY, "TLS takes a certificate and its key"),
        ({"tls_cert": Path("c.pem"), "tls_key": Path("k.pem")}, KEY, "the certificate cannot be loaded"),
        ({"batch": 3}, KEY, "no power of two"),
        ({}, "short", "fewer than 16 characters"),
        ({"engine": "vllm"}, KEY, "vLLM is not installed"),
        ({"split": "prod=1,candidate=1"}, KEY, "needs shares and a folder"),
        ({"split": "prod=1,candidate=1", "experiment": Path("x")}, None, "whoever posts them needs a key"),
        ({"split": "prod=1,candidate=1", "experiment": Path("x")}, KEY, "a split is between aliases"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_start(
    chat_run: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], key: str | None, reason: str
) -> None:
    monkeypatch.delenv("HEADWAY_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("HEADWAY_API_KEY", key)
    with pytest.raises(ConfigError, match=reason):
        serve(str(chat_run), port=0, **options)


def test_without_a_key_only_this_machine_by_its_own_name_is_answered(chat_run: Path, tmp_path: Path) -> None:
    """A page of another site can let a name of its own point here."""
    with serving(chat_run, tmp_path / "log", "--batch", "1", HEADWAY_API_KEY="") as server, server.http(None) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
