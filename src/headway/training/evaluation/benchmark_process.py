"""The process that runs lm-eval on a model: `python -m headway.training.evaluation.benchmark_process ORDER`.

It is the only place that imports lm-eval. It can run beside a training at low priority; nothing waits for it. It ends
with the process that has started it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headway.config.sections.benchmarks import is_file
from headway.core.errors import HeadwayError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_object

#: What lm-eval adds to a task's metrics.
_NO_METRICS = frozenset(("name", "alias", "sample_len", "sample_count"))
_LOOK_SECONDS = 1.0
#: Most characters of the message of an error of lm-eval.
_MOST_WORDS = 500


def run_tasks(folder: Path, order: dict[str, Any]) -> dict[str, Any]:
    """Run lm-eval's tasks on an exported model.

    Returns:
        `results` by task and metric. If that is asked for, also `items`: of each task the metrics by item, and whether
        higher values are better.
    """
    from lm_eval import simple_evaluate  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, import-untyped, unused-ignore]

    files = [Path(task).resolve() for task in order["tasks"] if is_file(task)]
    # The index of lm-eval's own tasks takes seconds, and is needed for names only.
    manager = TaskManager(
        include_path=sorted({str(path.parent) for path in files}) or None,
        include_defaults=len(files) < len(order["tasks"]),
    )
    names = [_task_name(Path(task)) if is_file(task) else task for task in order["tasks"]]
    model = HFLM(pretrained=str(folder), device=order["device"], batch_size=order["rows"], dtype="float32")
    found = simple_evaluate(
        model=model,
        tasks=names,
        num_fewshot=order["few_shot"],
        limit=order["limit"],
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=bool(order["items"]),
    )
    results = {"results": {task: _metrics(values) for task, values in found["results"].items()}}
    if order["items"]:
        better = found["higher_is_better"]
        results["items"] = {task: _items(samples, better.get(task, {})) for task, samples in found["samples"].items()}
    return results


def _items(samples: list[dict[str, Any]], better: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a task's metrics by item, where a metric is a mean over items."""
    metrics: dict[str, dict[str, float]] = {}
    for sample in samples:
        for name in sample["metrics"]:
            filtered = sample["filter"]
            metric = name if filtered == "none" else f"{name}({filtered})"
            if isinstance(value := sample.get(name), (bool, int, float)):
                metrics.setdefault(metric, {})[str(sample["doc_id"])] = float(value)
    known = {metric: better.get(metric.partition("(")[0]) for metric in metrics}
    return {"metrics": metrics, "higher_is_better": {metric: found is not False for metric, found in known.items()}}


def _task_name(path: Path) -> str:
    """Return the name of the task, or of the group of tasks, that a file defines."""
    import re

    found = re.search(r"^(?:task|group):[ \t]*([^\s#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].strip("\"'") if found else path.stem


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a task; those of another filter than the only one carry its name."""
    found = {}
    for key, value in values.items():
        name, _, filtered = key.partition(",")
        if name not in _NO_METRICS and not name.endswith("_stderr") and isinstance(value, (int, float)):
            found[name if filtered in ("", "none") else f"{name}({filtered})"] = float(value)
    return found


def export_run(model: Path, step: int | None, folder: Path) -> int | None:
    """Write a run's model as a Hugging Face folder, with adapters merged, and return the step of its weights."""
    from headway.training.evaluation.inference import export_trained, load_trained

    trained = load_trained(model, step=step)
    export_trained(trained, folder, merge=trained.has_adapter)
    return trained.step


def main() -> None:
    """Carry out the order, and write the results to the file that it names."""
    order = read_json_object(Path(sys.argv[1]))
    threading.Thread(target=_end_with, args=(int(order["parent"]),), name="headway-parent", daemon=True).start()
    if order["nice"]:
        os.nice(int(order["nice"]))
        # Have the kernel end this process, and not the training beside it, when the machine's memory is used up.
        with suppress(OSError):  # not Linux
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    model = Path(order["model"])
    step = order["step"]
    try:
        if (model / "config.json").is_file():
            found = run_tasks(model, order)
        else:
            place = Path(order["place"]) / "model"
            step = export_run(model, step, place)
            found = run_tasks(place, order)
    except Exception as error:
        _explain(error, Path(order["failure"]))
        sys.exit(error.exit_code if isinstance(error, HeadwayError) else 1)
    kept = {key: order[key] for key in ("tasks", "limit", "few_shot")}
    write_json(Path(order["output"]), {"step": step, **found, **kept, "lm_eval": version("lm_eval")})


def _explain(error: Exception, file: Path) -> None:
    """Write the traceback to the log, and for the process that has asked what it says of the failure."""
    traceback.print_exc()
    if isinstance(error, HeadwayError):
        why = {"what": error.what, "where": error.where, "fix": error.fix}
    else:
        words = " ".join(str(error).split())[:_MOST_WORDS]
        why = {"what": f"{type(error).__name__}: {words}" if words else type(error).__name__}
    with suppress(OSError):  # a full disk; the exit code tells of the failure too
        write_json(file, why)


def _end_with(parent: int) -> None:
    """End this process when the one that has started it is gone: no attempt waits for its results any more."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
