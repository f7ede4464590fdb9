"""The text of the flow that `launchers.metaflow` writes, with names in place of what a run decides."""

from __future__ import annotations

#: The exit code after which Metaflow does not try a step again (its METAFLOW_EXIT_DISALLOW_RETRY).
NO_RETRY = 202
#: A template of `string.Template`. The flow imports nothing of Headway, so that any environment with the two programs
#: runs it.
FLOW = '''\
"""$run_name: prepare, train, evaluate, export. Written by `headway launch --on metaflow`, which writes it anew.

    python flow.py run                      here
    python flow.py resume                   from the step that failed
    python flow.py argo-workflows create    on a cluster
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from metaflow import FlowSpec, $imports

CONFIG = $config
RUN = Path($run)
WORKDIR = $workdir
MACHINES = $machines
#: GPUs of each of several machines that are processes of this one.
GPUS_HERE = $gpus_here
ENVIRONMENT = $environment
#: The Headway that wrote this flow, for an environment without one; nothing where the flow runs in pods.
LAUNCHED_BY = $launched_by
#: A training is no worker of another launcher.
REMOVED = $removed
#: Exit codes that another attempt would meet again, and the one that keeps Metaflow from trying.
FINAL, NO_RETRY = $final, $no_retry
#: Runs a command that gets SIGTERM, and saves, when this step dies.
DIES_WITH_PARENT = $dies_with_parent
#: How long a training that a dead step has left behind may take to save and end.
OWNER_SECONDS = 120
#: Where the program is; here Metaflow also takes `python` from it for all machines of a step but the first.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def node():
    """Return the number of the machine that this step runs on."""
    return current.parallel.node_index if MACHINES > 1 else 0


def place():
    """Return the variables by which the machines of the step find each other; none where it has one machine."""
    if MACHINES == 1:
        return {}
    found = {
        # Never fewer: Metaflow counts a try without one of them as failed.
        "HEADWAY_MACHINES": "{0}:{0}".format(current.parallel.num_nodes),
        "HEADWAY_NODE": str(node()),
        "HEADWAY_LEAD": current.parallel.main_ip,
        # The machines of a try start together, and meet none of an earlier one.
        "HEADWAY_GANG": f"{current.run_id}.{current.retry_count}",
    }
    if GPUS_HERE:
        given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(MACHINES * GPUS_HERE)))
        own = given.split(",")[node() * GPUS_HERE : (node() + 1) * GPUS_HERE]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return found


def headway(*words, output=None, also=None):
    """Run a command of Headway with the run's config, and return what it printed if `output` asks for it."""
    found = shutil.which("headway")
    program = LAUNCHED_BY if found is None and LAUNCHED_BY and os.path.exists(LAUNCHED_BY[0]) else [found]
    if program[0] is None:
        raise RuntimeError(
            f"there is no program 'headway' beside {sys.executable} or on the PATH: install Headway $version there,"
            " from its folder or its wheel"
        )
    if WORKDIR is not None:
        os.makedirs(WORKDIR, exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if name not in REMOVED}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        given = [str(config) if word is CONFIG else str(word) for word in words]
        done = subprocess.run(
            [sys.executable, "-c", DIES_WITH_PARENT, str(os.getpid()), *program, *given],
            cwd=WORKDIR, env={**variables, **ENVIRONMENT, **(also or {})}, stdout=output, text=True, check=False,
        )
    if done.returncode in FINAL:
        print(f"headway {words[0]} ended with exit code {done.returncode}, which is final", flush=True)
        sys.exit(NO_RETRY)
    if done.returncode:
        raise RuntimeError(f"headway {words[0]} ended with exit code {done.returncode}")
    return done.stdout


def wait_for_owner():
    """Wait until the training of an earlier try, which lost its step, has saved and released the run."""
    end = time.monotonic() + OWNER_SECONDS
    owner = Path(WORKDIR or ".") / RUN / $owner
    while owner.exists():
        with owner.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    return  # the run itself says who has it
        time.sleep(0.2)


class $name(FlowSpec):
    """Prepare, train, evaluate and export $run_name."""

$start_decorator    @step
    def start(self):
        """Begin."""
        self.run_directory = str(RUN)
        self.next(self.prepare)

$prepare_decorator    @retry(times=$retries, minutes_between_retries=$minutes)
    @step
    def prepare(self):
        """Turn text into the token store; what is there already is not done again."""
        if $prepares:
            headway("data", "prepare", CONFIG)
        self.next(self.train$num_parallel)

    @card(type="html")
$train_decorator    @retry(times=$retries, minutes_between_retries=$minutes)
$parallel_decorator    @step
    def train(self):
        """Train, or continue: whatever ended an earlier try, the run goes on from its newest checkpoint."""
        if node() == 0 and (current.retry_count or current.origin_run_id):
            wait_for_owner()
        headway("train", CONFIG, also=place())
        self.html = "<p>The report is on the card of the first machine.</p>"
        if node() == 0:
            self.html = self.report()
        self.next(self.evaluate)

    def report(self):
        """Return the run's report as a page."""
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "report.html"
            headway("report", RUN, "--output", page)
            return page.read_text(encoding="utf-8")

$evaluate_decorator    @retry(times=$retries, minutes_between_retries=$minutes)
    @step
    def evaluate(self$inputs):
        """Compute the loss on the held-out documents."""
$join        self.evaluation = None
        if $evaluates:
            self.evaluation = json.loads(headway("eval", RUN, "--json", output=subprocess.PIPE))
            print(self.evaluation)
        self.next(self.export)

$export_decorator    @retry(times=$retries, minutes_between_retries=$minutes)
    @step
    def export(self):
        """Write the model as a Hugging Face folder."""
        self.exported = str(RUN / "export")
        headway("export", RUN, self.exported)
        self.next(self.end)

$end_decorator    @step
    def end(self):
        """Say what there is."""
        print(f"{self.run_directory}: {self.evaluation}, exported to {self.exported}")


if __name__ == "__main__":
    $name()
'''
