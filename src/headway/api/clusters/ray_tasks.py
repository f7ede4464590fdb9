"""Tasks of a Ray cluster that process units of input; the results come back through Ray's object store.

No folder is shared but the input: a task returns its shards, fingerprints and records as bytes, and the process that
prepares writes them. A task that is lost with its machine is run again by Ray.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.clouds.launchers.ray_job import runtime_environment
from headway.config import Config
from headway.core.console import notice, warning
from headway.core.errors import ConfigError, DataError, HeadwayError, needing
from headway.core.files.atomic import atomic_write
from headway.core.format import counted
from headway.core.user_command import suggest
from headway.text.preparing.pools import Line, UnitJob
from headway.text.preparing.tasks import Order, UnitTask, error_from_json, error_json, process, result_files

#: How often Ray runs a task again whose worker or machine was lost.
_RETRIES = 5
#: Tasks per processor that are submitted when `--tasks` is not given: one that runs, and the next one.
_SUBMITTED = 2


class RayPool:
    """Machines of a Ray cluster.

    Args:
        config: The config; `launch.ray` says where the cluster is.
        tasks: Most tasks at a time.
        workers: Processors, and processes, of each task.
    """

    def __init__(self, config: Config, *, tasks: int | None, workers: int) -> None:
        self._launch = config.launch
        self._tasks = tasks
        self._workers = workers

    def describe(self, units: int) -> str:
        """Return how many tasks there will be, and where."""
        at_a_time = (
            "as many at a time as the cluster has room for" if self._tasks is None else f"{self._tasks} at a time"
        )
        address = self._launch.ray.address or os.environ.get("RAY_ADDRESS") or "the cluster of this machine"
        return (
            f"{counted(units, 'unit')}: as many tasks of {counted(self._workers, 'processor')}, {at_a_time}\n"
            f"address: {address}\n"
            f"runtime environment: {json.dumps(runtime_environment(self._launch))}"
        )

    def check(self) -> None:
        """Connect to the cluster; this process stays connected.

        Raises:
            ConfigError: Ray is not installed, or there is no cluster.
        """
        with needing("ray", "ray", "data prepare --on ray"):
            import ray
        if not ray.is_initialized():
            self._connect(ray)

    @contextmanager
    def open(self, order: Order) -> Iterator[Line]:
        """Return a line for the length of a block; at its end no task of it is left."""
        import ray

        line = _RayLine(ray, order, tasks=self._tasks, workers=self._workers)
        try:
            yield line
        finally:
            line.cancel()

    def _connect(self, ray: Any) -> None:
        address = self._launch.ray.address or "auto"
        if address.startswith(("http://", "https://")):
            raise ConfigError(
                "tasks need the cluster itself, and this is the address of its dashboard",
                where="launch.ray.address",
                fix=f"ray job submit --address {address} -- "
                + suggest("data prepare", "--on", "ray", "launch.ray.address=auto"),
            )
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env=runtime_environment(self._launch))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"there is no Ray cluster: {(str(error).strip() or type(error).__name__).splitlines()[0]}",
                where=f"launch.ray.address, RAY_ADDRESS: {address}",
                fix="start one (ray start --head), or give its address",
            ) from error


class _RayLine:
    """Has Ray process units, a limited number at a time."""

    def __init__(self, ray: Any, order: Order, *, tasks: int | None, workers: int) -> None:
        self._ray = ray
        self._folder = order.folder
        processors = int(ray.cluster_resources().get("CPU", 1))
        self._most = tasks or max(1, _SUBMITTED * (processors // workers))
        self._process = ray.remote(num_cpus=workers, max_retries=_RETRIES)(_process_unit)
        vocabulary = order.recipe.tokenizer
        files = (
            {}
            if vocabulary is None
            else {path.name: path.read_bytes() for path in sorted(vocabulary.iterdir()) if path.is_file()}
        )
        self._shared = ray.put((json.dumps(order.to_json()), files, str(Path.cwd()), workers))
        self._running: dict[Any, UnitJob] = {}
        alive = [node for node in ray.nodes() if node["Alive"]]
        largest = max((int(node.get("Resources", {}).get("CPU", 0)) for node in alive), default=0)
        if largest < workers:
            warning(f"no machine of Ray has {counted(workers, 'processor')}: tasks wait until one joins (--workers)")
        notice(f"Ray has {counted(processors, 'processor')} on {counted(len(alive), 'machine')}")

    def submit(self, job: UnitJob) -> None:
        """Submit a unit, when there is room."""
        while len(self._running) >= self._most:
            self._take(None)
        self._running[self._process.remote(self._shared, json.dumps(job.task().to_json()))] = job
        self._take(0)

    def drain(self) -> None:
        """Wait for all units."""
        while self._running:
            self._take(None)

    def cancel(self) -> None:
        """End the tasks that are left."""
        for task in self._running:
            with suppress(Exception):  # the cluster may be gone
                self._ray.cancel(task, force=True)
        self._running.clear()

    def _take(self, seconds: float | None) -> None:
        """Write the results of tasks that have ended; wait for one, at most so many seconds."""
        ended, _ = self._ray.wait(list(self._running), timeout=seconds)
        for task in ended:
            job = self._running.pop(task)
            try:
                result = self._ray.get(task)
            except self._ray.exceptions.RayError as error:
                raise _lost(error) from error
            if "error" in result:
                raise error_from_json(result["error"])
            for name, content in result["files"]:
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self._folder / name) as file:
                    file.write(content.data)
            if not job.accept_recorded():
                raise DataError("the results of a task are not complete", fix="run the same command again")


def _lost(error: Exception) -> HeadwayError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return DataError(
        f"a task was lost {_RETRIES + 1} times, or could not start: {lines[-1].strip()}",
        where=type(error).__name__,
        fix="check that all machines have Headway and enough memory; smaller units (data.shard_bytes) need less",
    )


# On each machine ------------------------------------------------------------------------------------------------------


def _process_unit(shared: tuple[str, dict[str, bytes], str, int], text: str) -> dict[str, Any]:
    """Process a unit; return its files, or the error."""
    order_text, vocabulary, folder, workers = shared
    if Path(folder).is_dir():  # relative paths of the input begin there
        os.chdir(folder)
    found: list[tuple[str, Any]] = []

    def take(results: Path) -> None:
        found.extend((name, np.fromfile(results / name, dtype=np.uint8)) for name in result_files(results))

    with tempfile.TemporaryDirectory(prefix="headway-prepare-") as scratch:
        order = Order.from_json(json.loads(order_text))
        if order.recipe.tokenizer is not None:
            place = Path(scratch) / "tokenizer"
            place.mkdir()
            for name, content in vocabulary.items():
                (place / name).write_bytes(content)
            order = replace(order, recipe=replace(order.recipe, tokenizer=place))
        try:
            process(order, [UnitTask.from_json(json.loads(text))], Path(scratch), take, workers=workers)
        except HeadwayError as error:
            return {"error": error_json(error)}
    return {"files": found}
