"""The secret of the machines of a run stays in the memory of the process that was given it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.coordination.launch_variables import SECRET
from headway.core.credentials.secrets import redact
from headway.core.startup.launch_secret import take_secret

#: Takes the secret, and shows the environments of this process, of a copy and of a program, as the kernel has them.
PROGRAM = """
import json, os, subprocess, sys
from pathlib import Path
from headway.core.startup.launch_secret import take_secret
found = {"taken": [take_secret(), take_secret()], "left": "HEADWAY_SECRET" in os.environ}
show = "from pathlib import Path; print(Path('/proc/self/environ').read_text())"
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, Path("/proc/self/environ").read_bytes())
    os._exit(0)
os.wait()
os.close(writer)
found["copy"] = os.fdopen(reader).read()
found["own"] = Path("/proc/self/environ").read_text()
found["program"] = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True).stdout
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only Linux has /proc")
@pytest.mark.parametrize(
    "given", ["0123456789abcdef", " a secret with \u00e4 and blanks ", ""], ids=["plain", "other", "empty"]
)
def test_no_process_shows_the_secret_that_one_has_taken(given: str) -> None:
    variables = {**os.environ, SECRET: given, "BEFORE_AND_AFTER": "kept"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    found = json.loads(done.stdout)
    assert found["taken"] == [given.strip()] * 2 and found["left"] is False
    for process in ("own", "copy", "program"):
        assert not given or given not in found[process]
        assert "BEFORE_AND_AFTER=kept" in found[process]


def test_another_secret_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.core.startup.launch_secret._taken", "")
    assert take_secret() == ""
    for secret in ("one" * 9, "two" * 9):
        monkeypatch.setenv(SECRET, secret)
        assert take_secret() == take_secret() == secret and SECRET not in os.environ
        assert secret not in redact(f"it is {secret}")
