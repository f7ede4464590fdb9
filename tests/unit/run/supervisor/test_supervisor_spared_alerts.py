"""What tells of the end of an attempt does not end with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.alerts import is_alert
from support.waits import LONG

#: With an alert of its own, and one of a worker whose end comes while both are under way. Each waits for what it needs,
#: so that nothing depends on how fast another process is.
SUPERVISOR = """
import json, os, subprocess, sys
from pathlib import Path
from headway.core import alerts
from headway.core.process.waiting import wait_until
from headway.core.process import tree

folder, limit = Path(sys.argv[1]), float(sys.argv[2])
command = f"touch '{folder}'/begun-$$; while [ ! -e '{folder}/go' ]; do sleep 0.05; done; touch '{folder}'/told-$$"
worker = f'''
import time
from pathlib import Path
from headway.core import alerts
alerts.Alerts({command!r}, "run", Path("nowhere/log")).tell("it fails")
time.sleep(600)
'''
tree.adopt_orphans()
tree.LIMIT_SECONDS = limit
alerts._END_SECONDS = 60.0
child = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
own = alerts.Alerts(command, "run", folder / "log")
own.tell("it fails, too")
assert wait_until(lambda: len(list(folder.glob("begun-*"))) == 2, 600.0)
left = tree.end_all([child.pid], os.getpid())
code = child.wait()
(folder / "go").touch()
own.close()
told = wait_until(lambda: len(list(folder.glob("told-*"))) == 2, 600.0 if limit else 0.0)
print(json.dumps([left, code, told]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
@pytest.mark.parametrize("limit", [600.0, 0.0])
def test_alerts_are_spared_within_their_time(tmp_path: Path, limit: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), str(limit)], capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], -9, bool(limit)]
    assert len(list(tmp_path.glob("told-*"))) == (2 if limit else 0)


def test_a_run_that_is_called_like_an_alert_is_none() -> None:
    assert not is_alert(["python", "-m", "headway", "train", "headway-alert"])
    assert not is_alert(["sh", "-c", "true", "headway-alert"])
