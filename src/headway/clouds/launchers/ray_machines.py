"""A command of Headway on each of several machines of a Ray cluster, which find each other as in a training.

    python -m headway.clouds.launchers.ray_machines --machines 4 -- bench run suite.yaml --launcher machines

Plain tasks, not Ray Train, which ends all machines when one is lost. Machine 0 leads, and its end is that of all.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from headway.clouds.launchers.ray import machine_variables, wait_for_room
from headway.core.console import notice, open_streams, say
from headway.core.coordination.outcomes import FINAL_CODES
from headway.core.errors import HeadwayError, Preempted, needing
from headway.core.exposure import free_port
from headway.core.process.command import module_command, tied_command

#: Exit codes after which the same command would end in the same way.
_LAST_CODES = (0, 1, *FINAL_CODES)
#: How long the other machines may take to end after the lead.
_END_SECONDS = 60.0


def run_on_machines(words: Sequence[str], machines: int, gpus: int, failures: int, wait_seconds: float) -> int:
    """Run a command of Headway on machines of a Ray cluster until that of machine 0 ends, and return its exit code.

    Args:
        words: Arguments of `headway`.
        machines: Number of machines, each a node of Ray.
        gpus: GPUs of each; none takes a processor instead.
        failures: How often a machine's command is started again that was lost, or asks for it; -1 for always.
        wait_seconds: How long to wait for machines that join.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no room.
        HeadwayError: machine 0 was lost too often.
    """
    # Only before Ray is imported; each machine prints other lines, and none may be left out.
    os.environ["RAY_DEDUP_LOGS"] = "0"
    with needing("ray", "ray", "a suite on a Ray cluster"):
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
    needs = {"GPU": gpus} if gpus else {"CPU": 1}
    wait_for_room(wait_seconds, needs, machines, spread=True)
    group = placement_group([needs] * machines, strategy="STRICT_SPREAD")
    attempts = 1
    try:
        while (code := _attempt(ray, group, needs, words, failures)) not in _LAST_CODES and attempts != failures + 1:
            attempts += 1
        return code
    except ray.exceptions.RayError as error:
        what = (str(error).strip() or type(error).__name__).splitlines()[-1]
        fix = "the same command measures what is missing; launch.ray.max_failures says how often Ray tries"
        raise HeadwayError(f"Ray has given up: {what}", where="machine 0", fix=fix) from error
    finally:
        remove_placement_group(group)


def _attempt(ray: Any, group: Any, needs: Mapping[str, float], words: Sequence[str], failures: int) -> int:
    """Run all machines until the lead ends; 75 if Ray has moved it to a node where the others do not look for it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def on(number: int, function: Any, **amounts: float) -> Any:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        again = {"max_retries": failures, "retry_exceptions": True}
        return ray.remote(function).options(scheduling_strategy=where, **again, **amounts)

    host, port = ray.get(on(0, _address, num_cpus=0).remote())
    meeting = {"lead": f"{host}:{port}", "secret": secrets.token_hex(32)}
    machines = group.bundle_count
    amounts = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0)}
    tasks = [on(n, _run_machine, **amounts).remote([*words], machines, n, meeting) for n in range(machines)]
    try:
        code = int(ray.get(tasks[0]))
        ray.wait(tasks, num_returns=machines, timeout=_END_SECONDS)
    finally:
        for task in tasks:
            ray.cancel(task, force=True)
    return code


# On each machine ------------------------------------------------------------------------------------------------------


def _address() -> tuple[str, int]:
    import ray.util

    return ray.util.get_node_ip_address(), free_port()


def _run_machine(words: list[str], machines: int, number: int, meeting: Mapping[str, str]) -> int:
    """Run the command as one of the machines, and return its exit code.

    Raises:
        RuntimeError: it was lost, or asks to be started again, which Ray does.
    """
    import ray.util

    if number == 0 and not meeting["lead"].startswith(f"{ray.util.get_node_ip_address()}:"):
        return Preempted.exit_code
    command = tied_command(module_command("headway", *words))
    code = subprocess.run(
        command, env=machine_variables(str(machines), machines, number, meeting), check=False
    ).returncode
    if code not in _LAST_CODES:
        raise RuntimeError(f"the command of machine {number} ended with exit code {code}")
    return code


# As a command ---------------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Run a command of Headway on machines of the Ray cluster of this job."""
    parser = argparse.ArgumentParser("python -m headway.clouds.launchers.ray_machines", description=main.__doc__)
    parser.add_argument("words", nargs="+", help="arguments of headway")
    parser.add_argument("--machines", type=int, required=True, help="number of machines")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each")
    parser.add_argument("--failures", type=int, default=3, help="how often a machine that was lost is started again")
    parser.add_argument("--wait-seconds", type=float, default=600.0, help="how long to wait for machines that join")
    given = parser.parse_args(words)
    open_streams()
    try:
        code = run_on_machines(given.words, given.machines, given.gpus, given.failures, given.wait_seconds)
    except HeadwayError as error:
        say(error.render())
        return error.exit_code
    notice(f"machine 0 has ended with exit code {code}")
    return code


if __name__ == "__main__":
    # By its name: Ray would pickle functions of `__main__` by value.
    sys.exit(import_module("headway.clouds.launchers.ray_machines").main(sys.argv[1:]))
