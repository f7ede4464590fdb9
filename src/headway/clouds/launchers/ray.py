"""Ray Train places machines, and each of its workers starts the node process of one machine as a process of its own.

Not within the worker: Ray calls its train function off the main thread, where no signal can be caught, and ends the
whole worker when it tears a group down. What Ray learns (metrics, checkpoints) is read from the run directory.

    from headway.clouds.launchers.ray import fit
    result = fit(headway.load_config("config.yaml"), machines=2)
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.clouds.launchers.job import Job, parse_machines, with_sources
from headway.clouds.launchers.ray_run import (
    END_SECONDS,
    POINTER,
    end_process,
    newest_checkpoint,
    newest_metrics,
    own_variables,
    wait_for_owner,
)
from headway.clouds.launchers.ray_trial import trainable as trainable
from headway.config import Config, dump_config, load_config
from headway.core.console import notice, open_streams, say
from headway.core.coordination.launch_variables import LEAD, MACHINES, NODE, SECRET
from headway.core.coordination.outcomes import FINAL_CODES
from headway.core.coordination.preemption_board import Notice, post
from headway.core.errors import ConfigError, HeadwayError, error_with, needing
from headway.core.exposure import free_port
from headway.core.files.atomic import write_json
from headway.core.format import counted
from headway.core.process.command import module_command, tied_command
from headway.core.process.waiting import wait_until
from headway.run.directory.run_directory import newest_attempt

if TYPE_CHECKING:
    from ray.train import Result, RunConfig

_LOOK_SECONDS = 1.0
_LOOK_FOR_ROOM_SECONDS = 2.0
#: A worker of Ray whose answers do not come is lost after so long; Ray's own default is ten minutes.
_HEALTH = {"RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120"}


def fit(
    config: Config,
    *,
    machines: int | str = 1,
    resources: Mapping[str, float] | None = None,
    run_config: RunConfig | None = None,
    placement: str | None = None,
) -> Result:
    """Train a config on a Ray cluster, and return Ray's result.

    Args:
        config: A config, as `load_config` returns it.
        machines: Number of machines, or a range of them as `2:4`, within which Ray places as many as it has.
        resources: What Ray reserves on each machine; its GPUs, or one processor, when not given.
        run_config: Of Ray Train; its failures count machines and node processes that were lost.
        placement: Placement strategy of Ray; each worker on a machine of its own when not given.

    Returns:
        The result, whose metrics are the newest of the run, and whose checkpoint is the newest one of its directory.

    Raises:
        ConfigError: the cluster has no room for the run, and gets none within `launch.ray.wait_seconds`.
        HeadwayError: the run has ended with an error, which has its type and exit code.
    """
    ray_train, trainer_class = _ray()
    fewest, most = parse_machines(str(machines))
    gpus = Job(config).gpus
    needs = dict(resources) if resources is not None else ({"GPU": gpus} if gpus else {"CPU": 1})
    placement = placement or ("STRICT_SPREAD" if most > 1 else "PACK")
    wait_for_room(config.launch.ray.wait_seconds, needs, fewest or most, spread=placement == "STRICT_SPREAD")
    settings = {
        "config": dump_config(with_sources(config)),
        "run": str(config.run_directory.absolute()),
        "folder": str(Path.cwd()),
        "machines": str(machines),
    }
    failures = ray_train.FailureConfig(max_failures=config.launch.ray.max_failures)
    own = run_config or ray_train.RunConfig(
        name=config.name,
        storage_path=config.launch.ray.storage,
        failure_config=failures,
        checkpoint_config=ray_train.CheckpointConfig(num_to_keep=1),
    )
    trainer = trainer_class(
        _train_machine,
        train_loop_config=settings,
        scaling_config=ray_train.ScalingConfig(
            num_workers=most if fewest is None else (fewest, most),
            use_gpu=bool(needs.get("GPU")),
            resources_per_worker=needs,
            placement_strategy=placement,
        ),
        run_config=own,
    )
    try:
        result: Result = trainer.fit()
    except Exception as error:
        if "TrainingFailedError" not in (kind.__name__ for kind in type(error).__mro__):
            raise
        raise HeadwayError(
            f"Ray has given up: {str(error).strip().splitlines()[-1]}",
            where=str(config.run_directory),
            fix="the same command continues; launch.ray.max_failures says how often Ray tries",
        ) from error
    if code := int((result.metrics or {}).get("exit_code", 0)):
        kind = error_with(code) or HeadwayError
        raise kind(
            f"the run has ended with exit code {code}",
            where=str(config.run_directory),
            fix=f"headway runs show {config.run_directory} says why",
        )
    newest = newest_checkpoint(Path(settings["run"]))
    return result if newest is None else replace(result, checkpoint=ray_train.Checkpoint(str(newest)))


def _ray() -> tuple[Any, Any]:
    for name, value in {"RAY_TRAIN_V2_ENABLED": "1", **_HEALTH}.items():
        os.environ.setdefault(name, value)
    with needing("ray", "ray", "training on a Ray cluster"):
        import ray.train
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    return ray.train, DataParallelTrainer


def wait_for_room(seconds: float, needs: Mapping[str, float], machines: int, *, spread: bool) -> None:
    """Connect to the cluster, or start one here, and wait until it has as many places as the run needs.

    Ray itself would wait for ever without a word. Whether others use the places now is left to Ray.

    Args:
        seconds: How long to wait for machines that join.
        needs: What a machine of the run needs.
        machines: Fewest machines of the run.
        spread: Each machine of the run takes a node of its own.

    Raises:
        ConfigError: the places do not exist.
    """
    import ray

    if not ray.is_initialized():
        # No dashboard for a cluster that ends with this process: it would be one more open port.
        ray.init(include_dashboard=False)

    def shortage() -> str | None:
        return _shortage(ray.nodes(), needs, machines, spread=spread)

    missing = shortage()
    if missing is None:
        return
    notice(f"{missing}: waiting {seconds:g} s for machines that join")
    if wait_until(lambda: shortage() is None, seconds, _LOOK_FOR_ROOM_SECONDS):
        return
    where = "machines"
    fix = "start more machines, or train on fewer"
    if needs.get("GPU"):
        where = "train.device, launch.gpus_per_machine"
        fix = "train.device=cpu needs no GPU; launch.gpus_per_machine and parallel.workers say how many a machine has"
    raise ConfigError(missing, where=where, fix=fix)


def _shortage(
    nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float], machines: int, *, spread: bool
) -> str | None:
    """Return what a cluster lacks for a run, in words; None if all its places exist.

    Args:
        nodes: The nodes, as `ray.nodes()` lists them.
        needs: What a machine of the run needs.
        machines: Fewest machines of the run.
        spread: Each machine of the run takes a node of its own.
    """
    alive = [node.get("Resources", {}) for node in nodes if node.get("Alive")]
    asked = {name: amount for name, amount in needs.items() if amount}
    places = 0
    for node in alive:
        fitting = [int(node.get(name, 0) // amount) for name, amount in asked.items()]
        places += min([1 if spread else machines, *fitting])
    if places >= machines:
        return None
    each = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
    has = ", ".join(f"{sum(node.get(name, 0) for node in alive):g} {name}" for name in asked)
    wanted = f"{counted(machines, 'machine')} with {each} each"
    return f"the run needs {wanted}, and the Ray cluster has {has} on {counted(len(alive), 'node')}"


# On each machine ------------------------------------------------------------------------------------------------------


def _train_machine(settings: dict[str, Any]) -> None:
    """Run the node process of this machine to its end, and report what the run directory shows.

    Raises:
        RuntimeError: the node process was lost, or asks to be started again; Ray then starts all machines again.
    """
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank = context.get_world_rank()
    machines = context.get_world_size()
    run = Path(settings["run"])
    leads = rank == 0
    meeting = {"lead": f"{ray.util.get_node_ip_address()}:{free_port()}", "secret": secrets.token_hex(32)}
    meeting = broadcast_from_rank_zero(meeting if leads else None)
    if leads:
        wait_for_owner(run)
    variables = machine_variables(settings["machines"], machines, rank, meeting)
    with tempfile.TemporaryDirectory(prefix="headway-ray-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(settings["config"], encoding="utf-8")
        where = settings["folder"] if Path(settings["folder"]).is_dir() else None
        command = module_command("headway", "train", str(config))
        process = subprocess.Popen(tied_command(command), cwd=where, env=variables)
        try:
            code = _follow(process, run, leads)
        finally:
            end_process(process)
    if code not in (0, *FINAL_CODES):
        raise RuntimeError(f"the node process of machine {rank} ended with exit code {code}")


def machine_variables(asked: str, machines: int, rank: int, meeting: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a node process.

    Args:
        asked: Machines as the user gave them, `2` or `2:4`.
        machines: How many Ray has placed.
        rank: Number of this one.
        meeting: The lead's address, and the secret that they share.
    """
    variables = own_variables()
    if machines > 1:
        # Ray has placed so many machines; of a range the rest may come later.
        fewest, _ = parse_machines(asked)
        count = str(machines) if fewest is None else f"{min(fewest, machines)}:{machines}"
        variables |= {MACHINES: count, NODE: str(rank), LEAD: meeting["lead"], SECRET: meeting["secret"]}
    return variables


def _follow(process: subprocess.Popen[bytes], run: Path, leads: bool) -> int:
    """Report the run until it ends; return the exit code of this machine's node process.

    Ray's functions are barriers, so all machines walk through the same calls in every round.
    """
    from ray.train.collective import broadcast_from_rank_zero

    reported = -1
    told = False
    while True:
        code = process.poll()
        if code is not None and code not in (0, *FINAL_CODES):
            return int(code)  # the other machines are ended by Ray
        metrics = newest_metrics(run) if leads else {}
        news = {"step": int(metrics.get("step", -1)), "code": code} if leads else None
        news = broadcast_from_rank_zero(news)
        over = news["code"] is not None
        if news["step"] > reported or over:
            reported = news["step"]
            _report({**metrics, **({"exit_code": news["code"]} if over else {})}, run, leads)
        if over:
            return _wait(process)
        told = told or _pass_on_preemption(run, leads)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)


def _report(metrics: dict[str, float], run: Path, leads: bool) -> None:
    """Report metrics with a checkpoint that points to the newest one of the run: a copy would be a second one.

    Ray keeps metrics of checkpoints only.
    """
    import ray.train

    with tempfile.TemporaryDirectory(prefix="headway-ray-") as folder:
        checkpoint = None
        if leads:
            newest = newest_checkpoint(run)
            write_json(Path(folder) / POINTER, {"run": str(run), "checkpoint": None if newest is None else str(newest)})
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def _pass_on_preemption(run: Path, leads: bool) -> bool:
    """Post what Ray knows of machines that will be taken away on the board of the run; say whether there was any."""
    import ray.train

    ask = getattr(ray.train, "get_preemption_info", None)  # newer than the oldest Ray that is supported
    info = None if ask is None else ask()
    if info is None:
        return False
    if leads:
        deadline = None if info.deadline_ms is None else info.deadline_ms / 1000
        what = f"nodes are drained: {', '.join(info.preempted_node_ids)}"
        attempt = newest_attempt(run)
        with suppress(OSError):
            if attempt is not None:
                post(attempt, Notice("ray", what, "stop", deadline))
    return True


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


# As a command ---------------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Train a config on this job's Ray cluster (`ray job submit -- python -m headway.clouds.launchers.ray CONFIG`)."""
    parser = argparse.ArgumentParser("python -m headway.clouds.launchers.ray", description=main.__doc__)
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides")
    parser.add_argument("--machines", default="1", metavar="N or MIN:MAX", help="machines")
    given = parser.parse_args(words)
    open_streams()
    began = time.monotonic()
    try:
        result = fit(load_config(given.config, given.overrides), machines=given.machines)
    except HeadwayError as error:
        say(error.render())
        return error.exit_code
    notice(f"done in {time.monotonic() - began:.0f} s; checkpoint {result.checkpoint}")
    return 0


if __name__ == "__main__":
    # By its name: Ray would pickle functions of `__main__` by value.
    sys.exit(import_module("headway.clouds.launchers.ray").main(sys.argv[1:]))
