"""What people see, and where it goes."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.core import console
from support.waits import LONG

PRINTS = """
import logging, os, sys, warnings
from headway.core import console
console.open_streams()
print("https://me:first@h.example")
print("https://me:second@h.example", file=sys.stderr)
warnings.warn("password=third")
logging.warning("password=fourth")
console.warning("password=fifth")
with console.exact_results():
    print("a document on https://me:sixth@h.example")
    print("password=seventh", file=sys.stderr)
raise RuntimeError("password=eighth")
"""


def test_whoever_prints_prints_no_credentials() -> None:
    """But documents, which are printed as they are."""
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, check=False)
    assert done.stdout == "https://***@h.example\na document on https://me:sixth@h.example\n"
    found = [
        word for word in ("first", "second", "third", "fourth", "fifth", "seventh", "eighth") if word in done.stderr
    ]
    assert found == [] and done.stderr.count("***") >= 6 and "RuntimeError: password=***" in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def started(clock: Clock, **options: Any) -> console.Progress:
    return console.Progress("reading", **options, _start=clock.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def first_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(console, "_live", "")


def test_results_stay_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    console.notice("hello")
    console.warning("careful")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "hello\nwarning: careful\n"


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])  # a reader, a terminal, a disk
def test_an_onlooker_who_leaves_does_not_end_the_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stderr", Closed())
    with console.log_to(tmp_path / "run.log"):
        console.notice("still here")
    assert (tmp_path / "run.log").read_text() == "still here\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        with console.log_to(Path("/dev/full")):
            console.notice("still here")
        with console.log_to(tmp_path):  # a file that cannot be opened
            console.notice("still here")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # or closing it would fail


@pytest.mark.parametrize("stream", [">&- 2>&-", "2> >(:); sleep 0.2", "2>/dev/full"])
def test_the_exit_code_arrives_though_nobody_reads_the_error(stream: str) -> None:
    """Schedulers go by it: 75 is to be started again, 2 is not."""
    if "full" in stream and not Path("/dev/full").exists():
        pytest.skip("Linux has this device")
    command = [sys.executable, "-m", "headway", "config", "show", "no-such-config"]
    done = subprocess.run(["bash", "-c", f'exec {stream}; "$@"', "bash", *command], check=False, timeout=LONG)
    assert done.returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--version"], ["config", "schema"], ["--help"]])
def test_a_result_that_cannot_be_written_is_an_error(words: list[str], unbuffered: str) -> None:
    """When it is printed, or at the end, if it is short enough to wait until then."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "headway", *words]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "error: the result cannot be written: No space left on device\n"
        "  where: standard output\n"
        "  fix:   free space where the output goes, and run the same command again\n"
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_result_of_which_a_part_is_written_is_one_too(unbuffered: str, tmp_path: Path) -> None:
    command = f"ulimit -f 1; exec {sys.executable} -m headway config schema > {tmp_path}/result"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (tmp_path / "result").stat().st_size > 0
    assert done.returncode == 1
    assert done.stderr.startswith("error: the result cannot be written: File too large\n  where: standard output\n")
    assert "ulimit -f" in done.stderr


def test_only_the_first_worker_talks_but_all_may_warn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    console.notice("hello")
    console.warning("careful")
    assert capsys.readouterr().err == "warning: careful\n"
    monkeypatch.delenv("WORLD_SIZE")  # a rank that is left over from somewhere makes nobody one of several workers
    console.notice("alone")
    assert capsys.readouterr().err == "alone\n"


def test_the_log_file_gets_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logs" / "run.log"
    with console.log_to(path):
        console.notice("one")
        console.write_log("only here")
    console.notice("after")
    console.write_log("nowhere")
    with console.log_to(path):
        console.notice("two")
    assert path.read_text() == "one\nonly here\ntwo\n"
    assert "only here" not in capsys.readouterr().err


def test_progress_in_words(clock: Clock) -> None:
    bar = started(clock, total=2000, unit="files")
    clock.now += 10
    bar.advance(500)
    assert bar.describe() == "500 of 2,000 files · 50 files/s · eta 30 s"
    bar.advance(1500)
    assert "eta" not in bar.describe()
    assert bar.finish() == 10


def test_progress_in_bytes_has_their_units(clock: Clock) -> None:
    bar = started(clock, total=3 * 2**20, unit="B")
    clock.now += 1
    bar.advance(1536)
    assert bar.describe() == "1.5 KiB of 3.0 MiB · 1.5 KiB/s · eta 34 m 7 s"


def test_progress_without_an_end_has_no_eta(clock: Clock) -> None:
    bar = started(clock, unit="files")
    clock.now += 2
    bar.advance(10)
    assert bar.describe() == "10 files · 5 files/s"


def test_progress_that_has_not_begun(clock: Clock) -> None:
    assert started(clock, total=5).describe() == "0 of 5 · 0/s"


def test_without_a_terminal_progress_is_a_line_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("reading", 100, "files") as bar:
        bar._start = clock.now
        for _ in range(100):
            clock.now += 0.3
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("reading: ") for line in lines)


def test_quick_work_shows_no_progress(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("reading", 100) as bar:
        bar._start = clock.now
        for _ in range(100):
            clock.now += 0.001
            bar.advance()
    assert capsys.readouterr().err == ""


def test_on_a_terminal_the_line_is_replaced_and_gone_at_the_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with console.progress("reading", 10, "files") as bar:
        bar._start = clock.now
        for _ in range(10):
            clock.now += 1
            bar.advance()
        console.notice("by the way")
    text = terminal.getvalue()
    assert text.count("\n") == 1  # the notice's
    assert re.search(r"by the way\nreading: 10 of 10 files", text)  # the live line is drawn again below it
    assert text.endswith(console._CLEAR)


def test_a_live_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    console.show_live("x" * 50)
    assert terminal.getvalue() == console._CLEAR + "x" * 18 + "…"


NASTY = "a\x1b[31mb\u202ec"
SHOWN = "a\\x1b[31mb\\u202ec"


def test_what_others_have_written_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with console.log_to(tmp_path / "log"):
        console.notice(NASTY)
        console.warning(NASTY)
        console.write_log(NASTY)
    console.print_line(f"{NASTY}\nforged")
    console.print_lines(f"{NASTY}\n\tnot forged")
    out, err = capsys.readouterr()
    assert err == f"{SHOWN}\nwarning: {SHOWN}\n"
    assert (tmp_path / "log").read_text() == f"{SHOWN}\nwarning: {SHOWN}\n{SHOWN}\n"
    assert out == f"{SHOWN}\\nforged\n{SHOWN}\n\tnot forged\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    console.show_live(NASTY)
    assert terminal.getvalue() == f"\r\x1b[2K{SHOWN}"


def test_text_that_is_the_result_is_exact_but_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((io.StringIO(), f"{NASTY}\n"), (Terminal(), f"{SHOWN}\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        console.print_text(f"{NASTY}\n")
        assert stream.getvalue() == shown


def test_any_handler_of_the_logger_hears_notices_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[tuple[int, str]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append((record.levelno, record.getMessage()))

    listener, logger = Listener(), logging.getLogger("headway")
    logger.addHandler(listener)
    try:
        console.notice("step 1 of 100 %")
        console.warning("password=fifth")
    finally:
        logger.removeHandler(listener)
    assert heard == [(logging.INFO, "step 1 of 100 %"), (logging.WARNING, "password=***")]
    assert capsys.readouterr().err == "step 1 of 100 %\nwarning: password=***\n"


def test_the_level_of_the_logger_holds_for_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    logger = console.logger()
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        console.notice("not shown")
        console.warning("shown")
    finally:
        logger.setLevel(before)  # which also empties the cache of levels
    console.notice("shown again")
    assert capsys.readouterr().err == "warning: shown\nshown again\n"
