"""The exporter: what Prometheus's own parser reads, and who may read it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from headway.core.errors import CheckpointError, ConfigError
from headway.core.exposure import tls_pair
from headway.core.requirements import install_command
from headway.telemetry.catalogue import CATALOGUE
from headway.tracking import exporter
from headway.tracking.exporter import exposition, registry_of, write_textfile
from headway.tracking.exporting import MetricsServer, export
from headway.tracking.http_server import TOKEN_VARIABLE, Address, check_exposure, parse_address
from headway.tracking.runs_folder import RunsFolder
from support.ports import free_ports
from support.tracking import WrittenRun

TOKEN = "t0ken-of-this-test-alone"


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    """A run that trains on two machines."""
    run = WrittenRun(tmp_path / "runs" / 'a "quoted"\nname')
    run.begin(alive=True)
    run.step(1, **{"memory/peak_gib": 2.0, "data/share/web": 0.75, "mine/loss": 4.0, "checkpoint/stall_seconds": 0.5})
    run.step(2, **{"train/loss": "NaN", "checkpoint/stall_seconds": 0.25})
    for machine in ("m1", "m2"):
        readings = {
            "time": 1.0,
            "system/disk_read_gib": 1.0,
            "gpu/utilization_share/0": 0.5,
            "gpu/sm_clock_mhz/1": 1980,
        }
        (run.folder / f"system-{machine}.jsonl").write_text(json.dumps(readings) + "\n")
    return run


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and labels but the run."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in parse(text):
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "run")
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_names_units_and_labels(run: WrittenRun) -> None:
    text = exposition(RunsFolder(run.path.parent)).decode()
    found = samples(text)
    assert found["headway_train_items_total"] == {(): 1024.0}
    assert found["headway_checkpoint_stall_seconds_total"] == {(): 0.75}
    assert found["headway_memory_peak_bytes"] == {(): 2.0 * 2**30}
    assert found["headway_data_share_ratio"] == {("web",): 0.75}
    assert found["headway_system_disk_read_bytes_total"] == {("m1",): 2.0**30, ("m2",): 2.0**30}
    assert found["headway_gpu_utilization_ratio"] == {("0", "m1"): 0.5, ("0", "m2"): 0.5}
    assert found["headway_gpu_sm_clock_hertz"][("1", "m2")] == 1.98e9
    assert found["headway_own_metric"] == {("mine/loss",): 4.0}
    assert found["headway_run_state"][("running",)] == 1.0
    assert found["headway_build_info"] and found["headway_run_info"]
    assert str(found["headway_train_loss"][()]) == "nan"
    names = {sample.labels.get("run") for family in parse(text) for sample in family.samples}
    assert names == {'a "quoted"\nname', None}
    helps = {family.name: family.documentation for family in parse(text)}
    assert helps["headway_train_loss"] == CATALOGUE["train/loss"].help


def test_there_is_no_series_per_rank(run: WrittenRun) -> None:
    text = exposition(RunsFolder(run.path.parent)).decode()
    labels = {name for family in parse(text) for sample in family.samples for name in sample.labels}
    assert labels == {"run", "job", "machine", "gpu", "source", "state", "name", "version"}


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="needs the package 'prometheus-client'") as caught:
        export(tmp_path, serve=":9400", textfile=None, every_seconds=1.0)
    assert caught.value.fix == install_command("prometheus")


@pytest.fixture
def served(run: WrittenRun) -> Iterator[MetricsServer]:
    with MetricsServer(Address("127.0.0.1", 0), registry_of(RunsFolder(run.path.parent))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def get(
    connection: http.client.HTTPConnection, path: str = "/metrics", **headers: str
) -> tuple[int, http.client.HTTPMessage, str]:
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def test_a_scrape_follows_the_run(run: WrittenRun, served: MetricsServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.address.port)
    status, headers, text = get(connection)
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=")
    assert samples(text)["headway_step"] == {(): 2.0}
    run.step(3)
    assert samples(get(connection)[2])["headway_step"] == {(): 3.0}
    assert get(connection, "/")[0] == 404
    connection.request("POST", "/metrics")
    assert connection.getresponse().status == 501


def test_open_metrics_where_the_scraper_wants_them(served: MetricsServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.address.port)
    _, headers, text = get(connection, Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert any(family.name == "headway_train_items" for family in parse_open(text))


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:9400", 200), ("[::1]", 200), ("evil.example", 403), ("", 403)]
)
def test_a_name_that_points_here_is_refused(served: MetricsServer, host: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.address.port)
    found, _, text = get(connection, Host=host)
    assert found == status and ("headway_step" in text) == (status == 200)


def test_an_exporter_that_has_not_read_is_not_there_yet(run: WrittenRun) -> None:
    """Prometheus takes it as down: an answer without runs would end their series, and alerts with them."""
    with MetricsServer(Address("127.0.0.1", 0), None) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.address.port)
        status, headers, text = get(connection)
        assert status == 503 and int(headers["Retry-After"]) > 0 and "headway" not in text
        server.registry = registry_of(RunsFolder(run.path.parent))
        assert get(connection)[0] == 200
        server.shutdown()


def test_the_command_answers_while_it_reads(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, (port,) = [], free_ports(1)

    def read(*_: object) -> None:
        seen.append(get(http.client.HTTPConnection("127.0.0.1", port, timeout=10))[0])
        raise CheckpointError("that is enough")

    monkeypatch.setattr(RunsFolder, "refresh", read)
    with pytest.raises(CheckpointError, match="enough"):
        export(run.path.parent, serve=f":{port}", textfile=None, every_seconds=1.0)
    assert seen == [503]


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        (":9400", "127.0.0.1", 9400, True),
        ("9400", "127.0.0.1", 9400, True),
        ("localhost:9400", "localhost", 9400, True),
        ("[::1]:9400", "::1", 9400, True),
        ("0.0.0.0:9400", "0.0.0.0", 9400, False),
        ("[::]:9400", "::", 9400, False),
        ("node7:80", "node7", 80, False),
    ],
)
def test_addresses(text: str, host: str, port: int, loopback: bool) -> None:
    address = parse_address(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)


@pytest.mark.parametrize("text", ["", "here", "a:b:9400", ":99999", "http://x:1", "::1:9400"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        parse_address(text)


def test_beyond_the_loopback_only_with_token_and_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    everywhere = Address("0.0.0.0", 9400)
    tls = (tmp_path / "cert.pem", tmp_path / "cert.pem")
    with pytest.raises(ConfigError, match="HEADWAY_METRICS_TOKEN is not set"):
        check_exposure(everywhere, tls)
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="fewer than 16") as caught:
        check_exposure(everywhere, tls)
    assert "short" not in caught.value.render()
    for token in ("zwölf-und-vier-zeichen", "two words of a token", "a-token-and-its-line\n"):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with pytest.raises(ConfigError, match="a request cannot carry"):
            check_exposure(everywhere, tls)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with pytest.raises(ConfigError, match="there is no certificate"):
        check_exposure(everywhere, None)
    with pytest.raises(ConfigError, match="a certificate and its key"):
        tls_pair(tls[0], None)
    assert check_exposure(everywhere, tls) == TOKEN
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert check_exposure(Address("127.0.0.1", 9400), None) is None


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
             "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
            check=True, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return cert, key


def test_token_and_tls(run: WrittenRun, certificate: tuple[Path, Path]) -> None:
    registry = registry_of(RunsFolder(run.path.parent))
    with MetricsServer(Address("127.0.0.1", 0), registry, token=TOKEN, tls=certificate) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        # A client that never speaks holds nobody up.
        silent = socket.create_connection(("127.0.0.1", server.address.port))
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        connection = http.client.HTTPSConnection("127.0.0.1", server.address.port, context=trusted, timeout=10)
        for header in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": TOKEN},
            {"Authorization": f"Bearer {TOKEN}x"},
        ):
            status, headers, text = get(connection, **header)
            assert (status, headers["WWW-Authenticate"], "headway_" in text) == (401, "Bearer", False)
        status, _, text = get(connection, Authorization=f"Bearer {TOKEN}")
        assert status == 200 and "headway_train_loss" in text
        plain = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=10)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            get(plain)
        silent.close()
        server.shutdown()


def test_a_port_in_use_and_a_certificate_that_is_none(run: WrittenRun, tmp_path: Path) -> None:
    registry = registry_of(RunsFolder(run.path.parent))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="nothing can be served there: Address already in use") as caught:
            MetricsServer(Address("127.0.0.1", port), registry)
        assert caught.value.where == f"--serve 127.0.0.1:{port}"
    (tmp_path / "none.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match="the certificate cannot be loaded"):
        MetricsServer(Address("127.0.0.1", 0), registry, tls=(tmp_path / "none.pem", tmp_path / "none.pem"))


def test_an_odd_name_does_not_end_the_metrics_of_all_runs(run: WrittenRun) -> None:
    run.step(3, **{"mine/\ud800": 1.0})
    run.path.rename(run.path.parent / os.fsdecode(b"b\xff"))
    found = samples(exposition(RunsFolder(run.path.parent)).decode())
    assert found["headway_step"] == {(): 3.0} and found["headway_own_metric"][("mine/?",)] == 1.0


def test_the_textfile_is_whole_and_readable(run: WrittenRun, tmp_path: Path) -> None:
    target = tmp_path / "textfile"
    target.mkdir()
    path = write_textfile(RunsFolder(run.path.parent), target)
    assert samples(path.read_text())["headway_step"] == {(): 2.0}
    assert path.stat().st_mode & 0o777 == 0o644 and list(target.iterdir()) == [path]
    before = path.read_bytes()
    with pytest.raises(RuntimeError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "exposition", lambda folder: (_ for _ in ()).throw(RuntimeError()))
        write_textfile(RunsFolder(run.path.parent), target)
    assert path.read_bytes() == before and list(target.iterdir()) == [path]


def test_a_folder_for_the_textfile_that_is_not_there(run: WrittenRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        export(run.path.parent, serve=None, textfile=tmp_path / "none", every_seconds=1.0)
