"""Corpus, store and checkpoints in Azure: with its emulator Azurite."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.checkpoint.remote.objects import Objects
from headway.core.errors import CheckpointError, ConfigError
from support.object_storage import (
    GLOBS,
    contend_for_an_object,
    find_by_glob,
    lose_a_machine,
    prepare_from_both,
    put_folder,
)
from support.parts_table import AZURITE, program
from support.ports import free_ports

pytestmark = pytest.mark.parts(AZURITE)

#: The account that every Azurite has.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A connection string, of an account with a container."""
    pytest.importorskip("adlfs", reason="there is no client: pip install '.[azure]'")
    server_program = program("azurite-blob")
    if server_program is None:
        pytest.skip("there is no Azurite: npm install --prefix build/parts azurite")
    from azure.core.exceptions import AzureError
    from azure.storage.blob import BlobServiceClient

    (port,), folder = free_ports(1), tmp_path_factory.mktemp("azurite")
    where = f"http://127.0.0.1:{port}/devstoreaccount1"
    found = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={KEY};BlobEndpoint={where};"
    command = [
        server_program,
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--location",
        str(folder),
        "--blobPort",
        str(port),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            for left in reversed(range(600)):
                try:
                    with BlobServiceClient.from_connection_string(found, retry_total=0) as service:
                        service.create_container("headway")
                    break
                except AzureError:
                    assert left and server.poll() is None, "Azurite did not start"
                    time.sleep(0.2)
            yield found
        finally:
            server.terminate()


@pytest.fixture
def container(account: str, monkeypatch: pytest.MonkeyPatch) -> str:
    import adlfs

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", account)
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    return "az://headway"


def test_one_of_many_makes_an_object(container: str, tmp_path: Path) -> None:
    """What fencing rests on."""
    contend_for_an_object(Objects(f"{container}/{tmp_path.name}"))


def test_what_is_wrong_is_said(container: str, account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import adlfs

    with pytest.raises(CheckpointError, match="container does not exist"):
        Objects("az://nothing/x").create("a", b"")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", account.replace("Eby8", "Abc8"))
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    other = Objects(f"{container}/x")
    for ask in (lambda: other.read("a"), other.names, lambda: other.create("a", b"")):
        with pytest.raises(ConfigError, match="denies access"):
            ask()


@pytest.fixture
def bucket(container: str, every_format: Path) -> str:
    """A corpus in the container; returns its URL."""
    url = f"{container}/corpus"
    if not Objects(url).stat("g.txt"):
        put_folder(Objects(url), every_format)
    return url


@pytest.mark.parametrize(("pattern", "names"), GLOBS.items())
def test_globs(bucket: str, every_format: Path, pattern: str, names: list[str]) -> None:
    find_by_glob(bucket, every_format, pattern, names)


def test_a_container_prepares_to_the_same_tokens_as_a_folder(bucket: str, every_format: Path, tmp_path: Path) -> None:
    prepare_from_both(bucket, every_format, tmp_path)


def test_a_run_on_a_machine_that_is_gone_goes_on_from_azure(container: str, tmp_path: Path) -> None:
    lose_a_machine(Objects(f"{container}/{tmp_path.name}"), tmp_path)
