"""Credentials are planted wherever they can stand, and looked for wherever Headway keeps, prints or sends anything.

Each is a value of its own, so that one that gets out says which way it took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.config import load_config
from headway.core.console import say
from headway.core.errors import ConfigError
from headway.core.process.waiting import wait_until
from support.local_server import LocalServer
from support.otlp import Collector
from support.runs import headway, skip_without, write_config, write_corpus

skip_without("aiohttp")
pytest.importorskip("opentelemetry.proto")

KEY = "a1" * 32
"""For encryption; a credential too."""


def canary(place: str) -> str:
    """A value that is looked for; it is no word, and nothing but its place tells that it is secret."""
    return f"Cnry7{place.title().replace(' ', '')}9x"


def planted(*places: str) -> dict[str, str]:
    return {place: canary(place) for place in places}


def leaks(canaries: Mapping[str, str], texts: Iterable[tuple[str, bytes]]) -> list[str]:
    """Which canaries are in which texts."""
    found = []
    for where, text in texts:
        found += [f"{name} in {where}" for name, value in canaries.items() if value.encode() in text]
    return found


def files_below(*folders: Path, but: str = "") -> Iterator[tuple[str, bytes]]:
    """The bytes of all files, and their names."""
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files, f"nothing to look at in {folder}"
        for path in files:
            yield f"the name of {path}", str(path).encode()
            if path.name != but:
                yield str(path), path.read_bytes()


def output(done: subprocess.CompletedProcess[str]) -> list[tuple[str, bytes]]:
    return [("stdout", done.stdout.encode()), ("stderr", done.stderr.encode())]


class Guarded(BaseHTTPRequestHandler):
    """Gives the corpus to whoever has the header, or the token in the query."""

    corpus: bytes
    header: str
    token: str

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        allowed = self.headers.get("Authorization") == self.header or self.path.endswith(f"?token={self.token}")
        self.send_response(200 if allowed else 403)
        body = self.corpus if allowed else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with uncommitted changes, in which the command is given."""
    folder = tmp_path / "code"
    folder.mkdir()

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    git("init", "-b", "main")
    (folder / "settings.py").write_text("DEBUG = True\n")
    git("add", ".")
    git("commit", "-m", "one")
    (folder / "settings.py").write_text(
        f"word = '{canary('diff')}'\nPASSWORD = '{canary('diff password')}'\n"
        f"url = 'https://me:{canary('diff url')}@example.org'\n"
    )
    return folder


#: A tracker that keeps everything that it gets.
TRACKER = """
class Keeps:
    def __init__(self, path):
        self._path = path

    def open(self, run, state):
        return self._keep(run)

    def describe(self, description):
        return self._keep(description)

    def send(self, batch):
        return self._keep(batch)

    def flush(self):
        return {}

    def set_status(self, status, ended):
        self._keep(status)

    def close(self):
        pass

    def _keep(self, given):
        with open(self._path, "a") as file:
            file.write(f"{given!r}\\n")
        return {}
"""

IN_THE_DIFF = ("diff", "diff password", "diff url")


@pytest.mark.parametrize("encrypt", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_secret_is_kept_printed_or_sent(
    tmp_path: Path, repository: Path, encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path)
    variables = {
        # Credentials by name, ...
        "AWS_SECRET_ACCESS_KEY": canary("aws key"),
        "HF_TOKEN": canary("hub token"),
        "PGPASSWORD": canary("database"),
        "HEADWAY_ENCRYPTION_KEY": KEY,
        # ... by no word that a list of bad words has, with names that say what they are about, ...
        "NCCL_VAULT": canary("nccl vault"),
        "HEADWAY_DEPLOY": canary("deploy"),
        "TORCH_PLUGIN_PW": canary("plugin"),
        "CUDA_LICENCE": canary("licence"),
        # ... one inside of a value that is recorded, ...
        "CUDA_VERSION": f"https://me:{canary('recorded value')}@example.org/12",
        # ... and those that the config names.
        "CORPUS_HEADER": canary("header variable"),
        "CORPUS_QUERY": canary("query variable"),
        "PAGER": canary("alert variable"),
    }
    server = LocalServer(
        Guarded,
        corpus=corpus.read_bytes(),
        header=f"Bearer {variables['CORPUS_HEADER']}",
        token=variables["CORPUS_QUERY"],
    )
    sources = [
        {
            "path": f"{server.endpoint}/by-header/corpus.jsonl",
            "storage_options": {"headers": {"Authorization": "Bearer ${CORPUS_HEADER}"}},
        },
        {"path": f"{server.endpoint}/by-query/more.jsonl?token=${{CORPUS_QUERY}}", "name": "more", "format": "jsonl"},
    ]
    remote = tmp_path / "remote"
    remote.mkdir()
    collector = Collector()
    told, tracked, modules = tmp_path / "told", tmp_path / "tracked", tmp_path / "modules"
    modules.mkdir()
    (modules / "keeps.py").write_text(TRACKER)
    config = write_config(
        tmp_path,
        data={"sources": sources},
        train={"steps": 4},
        track=[
            "tensorboard",
            {"keeps:Keeps": {"path": str(tracked)}},
            {"opentelemetry": {"endpoint": collector.endpoint}},
        ],
        checkpoint={"encrypt": encrypt, "remote": {"url": f"file://{remote}", "encrypt": False}},
        telemetry={
            "report": True,
            # As `curl -v` does, which tells what it sends.
            "alert": f"cat >> '{told}'; echo \"paged $PAGER by $HF_TOKEN, Authorization: Bearer $PAGER\" >&2; exit 3",
        },
    )
    canaries = {
        **planted(*IN_THE_DIFF, "aws key", "hub token", "database", "nccl vault", "deploy", "plugin", "licence"),
        **planted("recorded value", "header variable", "query variable", "alert variable"),
        "encryption key": KEY,
    }
    path = os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    run = tmp_path / "runs" / "tiny"

    def command(*words: str | Path, faults: str = "", code: int = 0) -> list[tuple[str, bytes]]:
        done = subprocess.run(
            [sys.executable, "-m", "headway", *map(str, words)],
            cwd=repository,
            env={**environment, "HEADWAY_FAULTS": faults},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return [(f"{name} of {words[0]} {words[1]}", text) for name, text in output(done)]

    try:
        said = command("data", "prepare", config)
        # The first save finds no room, which is a reason to alert; the next one does.
        said += command("train", config, faults="enospc@checkpoint.shard:1")
    finally:
        server.close()
        collector.close()
    for name, value in variables.items():  # what follows knows them too, and tells nobody
        monkeypatch.setenv(name, value)
    for words in (
        ["report", run],
        ["runs", "show", run, "--json"],
        ["checkpoints", "list", run, "--json"],
        ["config", "show", run / "config.yaml"],
    ):
        done = CliRunner().invoke(application([str(words[0])]), list(map(str, words)))
        assert done.exit_code == 0, done.output
        said.append((f"output of {words[0]}", done.output.encode()))

    assert leaks(canaries, said) == []
    assert leaks(canaries, files_below(run, remote, tmp_path / "store", but="uncommitted.diff")) == []
    sent_texts = [("alert", told.read_bytes()), ("tracker", tracked.read_bytes()), ("collector", collector.content)]
    assert leaks(canaries, sent_texts) == []
    # What was looked at has what it is to have: the search would have found it.
    assert wait_until(lambda: "exit code 3" in (run / "alerts.log").read_text(), 60)
    assert "paged *** by ***" in (run / "alerts.log").read_text() and "no space" in told.read_text().lower()
    # The tracker has the command line, the config, the report, the losses and the end.
    for word in (b"headway.command", b"CORPUS_QUERY", b"report.html", b"train/loss", b"'finished'"):
        assert word in tracked.read_bytes(), word
    for word in (b"headway.command", b"headway.train.loss", b"finished"):
        assert word in collector.content, word
    record = json.loads((run / "run.json").read_text())
    assert record["environment"]["variables"]["CUDA_VERSION"] == "https://***@example.org/12"
    assert record["git"]["changed"] == ["settings.py"] and len(record["git"]["diff_sha256"]) == 64
    kept = run / record["git"]["diff_file"]
    assert leaks(planted(*IN_THE_DIFF), [("the diff", kept.read_bytes())]) == [f"{n} in the diff" for n in IN_THE_DIFF]
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "settings.py" in (run / "report.html").read_text()
    sent = [path for path in remote.rglob("*manifest*") if path.is_file()]
    assert any(record["git"]["diff_sha256"].encode() in path.read_bytes() for path in sent)


REFUSED = {
    "config bucket": "checkpoint.remote.url=s3://AKIAABCDEFGHIJKLMNOP:{}/x+y@bucket/runs",
    "config userinfo": "data.sources.0.path=https://me:{}@example.org/a.jsonl",
    "config user": "data.remote=https://{}@example.org/store",
    "query token": "data.sources.0.path=https://example.org/a.jsonl?token={}",
    "query signature": "data.sources.0.path=https://b.s3.amazonaws.com/a?X-Amz-Date=20260101T000000Z&X-Amz-Signature={}",
    "query credential": "data.sources.0.path=https://b.s3.amazonaws.com/a?X-Amz-Credential={}%2F2026&X-Amz-Expires=60",
    "query session": "data.sources.0.path=https://b.s3.amazonaws.com/a?X-Amz-Security-Token={}",
    "query sas": "data.sources.0.path=https://a.blob.core.windows.net/c/a.jsonl?sv=2024&sig={}",
    "query google": "data.sources.0.path=https://storage.googleapis.com/b/a?X-Goog-Signature={}",
    "option secret": "checkpoint.remote={{url: 's3://bucket/runs', options: {{secret: {}}}}}",
    "option key": "checkpoint.remote={{url: 's3://bucket/runs', options: {{key: {}}}}}",
    "option nested": (
        "checkpoint.remote={{url: 's3://bucket/runs', options: {{client_kwargs: {{aws_secret_access_key: {}}}}}}}"
    ),
    "option header": "data.sources.0.storage_options={{headers: {{X-Whatever: {}}}}}",
    "option bearer": "data.sources.0.storage_options={{client_kwargs: {{headers: {{Authorization: Bearer {}}}}}}}",
    "option account": "data.remote_options={{account_key: {}}}",
    "option connection": "data.remote_options.connection_string=DefaultEndpointsProtocol=https;AccountKey={}==",
    "option dotted": "data.sources.0.storage_options.password={}",
    "option list": "data.sources.0.storage_options={{client_kwargs: {{auth: [me, {}]}}}}",
    "alert bearer": "telemetry.alert=curl -H 'Authorization; Bearer {0}' -H 'Authorization{1} Bearer {0}' https://e.org",
    "alert user": "telemetry.alert=curl -u me:{} https://example.org",
    "alert header": "telemetry.alert=curl -H 'X-Api-Key{1} {0}' https://example.org",
    "alert webhook": "telemetry.alert=curl -d @- https://hooks.slack.com/services/T0/B0/{}",
    "alert query": "telemetry.alert=curl -d @- 'https://example.org/hook?token={}'",
    "alert word": "telemetry.alert=page --routing {}",
    "unknown key": "checkpoint.remote.secret_key={}",
    "not yaml": "data.remote_options={{secret: {}",
}


@pytest.mark.parametrize("place", REFUSED)
def test_a_config_with_a_credential_is_refused_and_not_shown(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = f"{canary(place)}0123456789" if place == "alert word" else canary(place)
    override = REFUSED[place].format(value, ":" if "alert" in place else "")
    config = write_config(tmp_path, checkpoint={"remote": {"url": "s3://bucket/runs"}})
    if place.startswith("alert"):  # for YAML the command is text that has colons in it
        key, _, command = override.partition("=")
        override = f"{key}={json.dumps(command)}"
    with pytest.raises(ConfigError) as refused:
        load_config(config, [override])
    say(refused.value.render())
    assert value not in str(refused.value) + repr(refused.value.__reduce__()) + capsys.readouterr().err
    assert refused.value.exit_code == 2 and "\n  where: " in str(refused.value)
    if place not in ("unknown key", "not yaml"):
        assert "credential" in str(refused.value)
        fix = refused.value.fix or ""
        assert any(way in fix for way in ("AWS_PROFILE", "AZURE_", "GOOGLE_", "${NAME}", "$TOKEN")), fix


def test_all_of_them_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    """By the command itself: it ends before there is a run directory, and says no value."""
    write_corpus(tmp_path)
    canaries = planted("file url", "file option", "file alert", "override")
    config = write_config(
        tmp_path,
        data={"sources": [f"https://me:{canaries['file url']}@example.org/a.jsonl"]},
        checkpoint={"remote": {"url": "s3://bucket/runs", "options": {"secret": canaries["file option"]}}},
        telemetry={"alert": f"curl -H 'Authorization: Bearer {canaries['file alert']}' https://example.org"},
    )
    done = headway("train", config, f"data.remote_options.token={canaries['override']}")
    assert done.returncode == 2 and "4 problems in the config" in done.stderr
    assert leaks(canaries, output(done)) == [] and not (tmp_path / "runs").exists()


def test_options_and_urls_of_the_command_line_have_none_either() -> None:
    canaries = planted("option", "url")
    for words in (
        ["s3://bucket/runs/tiny", "--option", f"key={canaries['option']}"],
        [f"s3://AKIAABCDEFGHIJKLMNOP:{canaries['url']}@bucket/runs/tiny"],
    ):
        done = CliRunner().invoke(application(["checkpoints"]), ["checkpoints", "list", *words])
        assert isinstance(done.exception, ConfigError) and "credential" in done.exception.what
        assert "AWS_PROFILE" in str(done.exception.fix)
        assert leaks(canaries, [("the error", str(done.exception).encode()), ("output", done.output.encode())]) == []


SCRIPT = """
import os, sys
import torch
from headway import Callback, Trainer, load_config

class Fails(Callback):
    def on_step(self, job, step, metrics):
        user, token = os.environ["FIRST"], os.environ["SECOND"]
        raise RuntimeError(f"403 for https://me:{user}@example.org, Authorization: Bearer {token}")

loss = lambda model, batch: model(batch).square().mean()
Trainer(torch.nn.Linear(2, 1), torch.ones(16, 2), loss, load_config(sys.argv[1]), callbacks=[Fails()]).fit()
"""


def test_a_script_and_what_it_raises(tmp_path: Path) -> None:
    """Its command line goes into records of the run, and so does the text of an error of its own."""
    config = write_config(tmp_path, train={"steps": 2})
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    canaries = planted("flag", "assigned", "address", "error url", "error token")
    words = [
        *("--db-password", canaries["flag"], f"password={canaries['assigned']}"),
        f"https://me:{canaries['address']}@example.org",
    ]
    done = subprocess.run(
        [sys.executable, script, config, *words],
        env={**os.environ, "FIRST": canaries["error url"], "SECOND": canaries["error token"]},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    run = tmp_path / "runs" / "tiny"
    assert done.returncode == 1 and "403 for https://" in done.stderr, done.stderr
    shown = "403 for https://***@example.org, Authorization: ***"
    record = json.loads((run / "attempts/001/attempt.json").read_text())
    assert record["outcome"].endswith(shown), record
    assert shown in (run / "attempts/001/traceback.txt").read_text()
    assert leaks(canaries, files_below(run)) == []
    assert "--db-password '***' 'password=***' 'https://***@example.org'" in record["command"]
