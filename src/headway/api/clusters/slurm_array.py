"""A Slurm job array that processes units of input, through a folder that all machines share.

The folder is that in which the store is built. An element of the array works through a list of units, in a folder of
its own, and moves what is complete to its place. Units that an array leaves unfinished, because elements were killed,
go to the next one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.clouds.launchers.job import Job
from headway.clouds.launchers.slurm import container_options, log_pattern, prepare_options, script_head, submit_script
from headway.clouds.programs import ask_program, try_program
from headway.config import Config
from headway.core.console import notice, open_streams, say
from headway.core.errors import ConfigError, DataError, HeadwayError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_object
from headway.core.format import counted
from headway.core.process.command import module_command
from headway.core.process.signals import defer_signals
from headway.core.process.waiting import VISIBILITY_TIMEOUT, wait_until
from headway.text.preparing.collecting import search_files
from headway.text.preparing.pools import Line, UnitJob
from headway.text.preparing.records import WORK, Records
from headway.text.preparing.tasks import Order, UnitTask, error_from_json, error_json, process, result_files

#: Folder of the arrays in the store that is being built, and the file in it with the number of the last one.
_ARRAYS = f"{WORK}/arrays"
_LAST = "last"
_ORDER = "order.json"
_SCRIPT = "array.sh"
#: Elements when `--tasks` is not given: Slurm takes 1,000 by default, and each costs a start of Python.
_ELEMENTS = 64
#: Arrays in a row that may end without a single finished unit.
_FRUITLESS = 3
_LOOK_SECONDS = 2.0
_END_SECONDS = 120.0
_ORDER_BYTES = 2**26


class SlurmPool:
    """Machines of Slurm.

    Args:
        config: The config; `launch.slurm` has the options of sbatch.
        tasks: Elements of the array.
        workers: Processes of each element.
    """

    def __init__(self, config: Config, *, tasks: int | None, workers: int) -> None:
        self._job = Job(config)
        self._store = config.data.store
        self._tasks = tasks
        self.workers = workers

    def elements(self, units: int) -> int:
        """Return the number of elements of an array for so many units."""
        return min(units, self._tasks or _ELEMENTS)

    def script(self, elements: int, folder: Path) -> str:
        """Return the batch script of an array.

        Args:
            elements: Its elements.
            folder: Folder with its files.
        """
        options = prepare_options(self._job, folder)
        options |= {"array": f"0-{elements - 1}", "output": log_pattern(folder, "%a.log")}
        options.setdefault("cpus-per-task", self.workers)
        slurm = self._job.config.launch.slurm
        words = [__name__, str(folder), str(self.workers)]
        if slurm.container is None:
            command = module_command(*words)
        else:
            command = ["srun", "--ntasks=1", *container_options(slurm), "python", "-P", "-m", *words]
        started = f"touch {shlex.quote(str(folder))}/$SLURM_ARRAY_TASK_ID.started || exit 1"
        return f"{script_head(self._job, options)}\n{started}\nexec {shlex.join(command)}\n"

    def describe(self, units: int) -> str:
        """Return the script of the first array."""
        elements = self.elements(units)
        folder = self._store.absolute().with_name(f".{self._store.name}.preparing") / _ARRAYS / "1"
        return f"{counted(units, 'unit')} in an array of {counted(elements, 'element')}:\n" + self.script(
            elements, folder
        )

    def check(self) -> None:
        """Check that there is Slurm here.

        Raises:
            ConfigError: There is none.
        """
        ask_program(["sbatch", "--version"])

    @contextmanager
    def open(self, order: Order) -> Iterator[Line]:
        """Return a line for the length of a block; at its end no array of it is left.

        Raises:
            ConfigError: An array of an earlier preparation does not end.
        """
        folder = order.folder / _ARRAYS
        _end_last(folder)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            yield _ArrayLine(self, order)
        finally:
            _end_last(folder)


class _ArrayLine:
    """Collects units, and has arrays process them."""

    def __init__(self, pool: SlurmPool, order: Order) -> None:
        self._pool = pool
        self._order = order
        self._jobs: list[UnitJob] = []
        self._arrays = 0

    def submit(self, job: UnitJob) -> None:
        """Keep a unit for the next array."""
        self._jobs.append(job)

    def drain(self) -> None:
        """Submit arrays until all units are recorded.

        Raises:
            ConfigError: Slurm refuses the array, or its machines do not see the folder.
            DataError: A unit failed, or arrays end without finishing any unit.
        """
        # Not by record: equal input of two sources has one, and a shard for each of them.
        left = {job: job.task() for job in self._jobs}
        self._jobs.clear()
        fruitless = 0
        while left:
            before = len(left)
            folder = self._submit(list(left.values()))
            self._follow(folder, left)
            fruitless = fruitless + 1 if len(left) == before else 0
            if left and fruitless == _FRUITLESS:
                raise _unfinished(folder, len(left))
            if left:
                notice(f"the array ended with {counted(len(left), 'unfinished unit')}: another one follows")

    def _submit(self, tasks: Sequence[UnitTask]) -> Path:
        """Write the files of an array and submit it; return their folder."""
        self._arrays += 1
        folder = self._order.folder / _ARRAYS / str(self._arrays)
        folder.mkdir(parents=True)
        elements = self._pool.elements(len(tasks))
        write_json(folder / _ORDER, self._order.to_json())
        for number in range(elements):
            lines = [json.dumps(task.to_json()) + "\n" for task in tasks[number::elements]]
            (folder / f"{number}.jsonl").write_text("".join(lines), "utf-8")
        (folder / _SCRIPT).write_text(self._pool.script(elements, folder), "utf-8")
        with defer_signals():  # an array whose number is not written down could not be ended
            array = submit_script(folder / _SCRIPT)
            (folder.parent / _LAST).write_text(array)
        notice(f"array {array} of {counted(elements, 'element')} has {counted(len(tasks), 'unit')} (squeue -j {array})")
        return folder

    def _follow(self, folder: Path, left: dict[UnitJob, UnitTask]) -> None:
        """Take finished units out of `left` until none is left or the array has ended."""
        number = (folder.parent / _LAST).read_text()
        while left:
            runs = _is_alive(number)  # before the look: what the array finishes last must not be missed
            here = {f"{WORK}/{entry.name}" for entry in os.scandir(self._order.folder / WORK)}
            for job in [job for job, task in left.items() if task.record in here]:
                if job.accept_recorded():
                    del left[job]
            for failed in sorted(folder.glob("*.error.json")):
                raise error_from_json(read_json_object(failed, _ORDER_BYTES))
            if not runs:
                break
            if left:
                time.sleep(_LOOK_SECONDS)
        if left and not wait_until(lambda: any(folder.glob("*.started")), VISIBILITY_TIMEOUT, 1.0):
            raise ConfigError(
                "the array has ended, and none of its machines has found the folder of the store",
                where=str(self._order.folder),
                fix="data.store and the working directory must lie in folders that all machines share",
            )


def _unfinished(folder: Path, units: int) -> DataError:
    """Return the error for units that no array finishes, with what an element has said last."""
    said = ""
    for log in sorted(folder.glob("*.log")):
        with suppress(OSError):
            lines = log.read_text("utf-8", "replace").strip().splitlines()
            said = f": {lines[-1]}" if lines else said
    return DataError(
        f"{counted(_FRUITLESS, 'array')} in a row ended without finishing one of {counted(units, 'unit')}{said}",
        where=str(folder),
        fix="give the elements more memory (launch.slurm.patch: {mem: 16G}) or time (launch.slurm.time), or smaller"
        " units (data.shard_bytes)",
    )


def _is_alive(number: str) -> bool:
    """Return whether an element of an array runs or waits; true when Slurm does not answer."""
    asked = try_program(["squeue", "--noheader", "--jobs", number, "--format=%T"])
    if asked.returncode:
        return "Invalid job id" not in asked.stderr
    return bool(asked.stdout.strip())


def _end_last(folder: Path) -> None:
    """End the last array, and wait until it has ended: a killed preparation leaves one that runs.

    Raises:
        ConfigError: It does not end.
    """
    try:
        number = (folder / _LAST).read_text()
    except OSError:
        return
    if _is_alive(number):
        try_program(["scancel", "--quiet", number])
        if not wait_until(lambda: not _is_alive(number), _END_SECONDS, _LOOK_SECONDS / 4):
            raise ConfigError(
                f"the array {number} of an earlier preparation does not end",
                where=str(folder),
                fix=f"scancel {number}, and wait until squeue does not show it any more",
            )
    (folder / _LAST).unlink(missing_ok=True)


# On each machine ------------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Process the units of an element (`python -m headway.api.clusters.slurm_array FOLDER WORKERS`)."""
    open_streams()
    folder = Path(words[0])
    workers = int(words[1])
    number = os.environ["SLURM_ARRAY_TASK_ID"]
    order = Order.from_json(read_json_object(folder / _ORDER, _ORDER_BYTES))
    with (folder / f"{number}.jsonl").open(encoding="utf-8") as lines:
        tasks = (UnitTask.from_json(json.loads(line)) for line in lines)
        # An element that Slurm has queued again has finished some already.
        missing = (task for task in tasks if not _is_recorded(task, order))
        try:
            process(order, missing, folder, lambda results: _move(results, order.folder), workers=workers)
        except HeadwayError as error:
            write_json(folder / f"{number}.error.json", error_json(error))
            say(error.render())
            return error.exit_code
    return 0


def _is_recorded(task: UnitTask, order: Order) -> bool:
    """Return whether the results of a unit are complete, as the process that prepares judges it."""
    records = Records(order.folder, order.folder, order.width, order.most, fresh=True)
    if task.shards_key is not None:
        return records.shards(task.shards_key, task.name) is not None
    return task.key is not None and records.survey(task.key, search_files(order.recipe)) is not None


def _move(results: Path, folder: Path) -> None:
    for name in result_files(results):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).replace(folder / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
