"""Names that users, their scripts and their files rely on, each as a line of text.

A line may be added at any time. None may go: `missing` says which have.
"""

from __future__ import annotations

import inspect
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import headway as package
from net.runs import HERE, VALUES, kept_copy, write_run_config
from support import headway, headway_in_copy

RECORDED_LISTS = HERE / "golden" / "lists.json"

_SOURCES = Path(package.__file__).parent
#: A run that does nearly all that is recorded: experts, a mixture, a schedule of batches, fp16, evaluations, two tiers.
_EVERYTHING = (
    "model={experts: 4, expert_ffn_dim: 16, balance_loss: 0.01}",
    "train={steps: 8, precision: fp16}",
    "checkpoint={memory_every: 1 steps, remote: {url: 'file://remote'}}",
    "evaluation={every: 2 steps}",
    "health={on_nonfinite: rollback, spike_window: 2, watch_seconds: 0.01}",
    "telemetry={usd_per_hour: 1.5, state_hash_every: 4}",
    "schedule.name=wsd",
)
#: What begins the names of metrics.
_METRIC = re.compile(r"\"((?:train|evaluation|checkpoint|health|data|speed|memory|cost|goodput)/[a-z_]+)\"")
_VARIABLE = re.compile(r"\bHEADWAY_[A-Z_]*[A-Z]\b")


def recorded(name: str) -> list[str]:
    """Return a list as it was recorded."""
    lines: list[str] = json.loads(RECORDED_LISTS.read_text())[name]
    assert lines, name
    return lines


def missing(name: str, found: list[str]) -> list[str]:
    """Return the recorded lines that are not found any more."""
    return sorted(set(recorded(name)) - set(found))


def collect(folder: Path) -> dict[str, list[str]]:
    """Return all lists as the code has them now, each sorted."""
    runs = [train_everything(folder / f"everything-{number}") for number in range(3)]
    kept = kept_copy(folder / "kept") / "trained" / "earlier"
    found = {
        "config": config_keys(),
        "verbs": verbs(),
        "python": python_names(),
        "metrics": _in_all(metrics(run) for run in runs),
        "metrics in the source": metrics_in_source(),
        "variables": variables(),
        "files": _in_all(files(run) for run in runs),
        "records": _in_all(records(run, kept) for run in runs),
        "results": results(folder / "kept"),
    }
    return {name: sorted(set(lines)) for name, lines in found.items()}


def _in_all(lists: Iterable[list[str]]) -> list[str]:
    """Return what is in each list: what a run records may depend on how fast it is."""
    return list(set.intersection(*map(set, lists)))


def train_everything(folder: Path) -> Path:
    """Train a run that records nearly everything, killed once; returns its folder."""
    (folder / "remote").mkdir(parents=True)
    config = write_run_config(folder, "everything")
    overrides = [words.replace("file://", f"file://{folder}/") for words in _EVERYTHING]
    done = headway("train", config.name, *_dotted(overrides), faults="nan@gradient=3,kill@step=5", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs" / "everything"


def _dotted(overrides: list[str]) -> Iterator[str]:
    """Name every key of `section={key: value}` by itself, so that the section keeps its other keys."""
    import yaml

    for words in overrides:
        section, _, text = words.partition("=")
        value = yaml.safe_load(text)
        if isinstance(value, dict):
            for key, inner in value.items():
                yield f"{section}.{key}={json.dumps(inner)}"
        else:
            yield words


def config_keys() -> list[str]:
    """List every key of a config with its types, its choices and its default, from `headway config schema`."""
    code, printed = headway_in_copy("config", "schema")
    assert code == 0, printed
    schema = json.loads(printed)
    lines: list[str] = []

    def enter(key: str, node: Mapping[str, Any], inside: tuple[str, ...]) -> None:
        if "default" in node and not isinstance(node["default"], dict):
            lines.append(f"{key} = {json.dumps(node['default'])}")
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            if name in inside:
                return
            node, inside = schema["$defs"][name], (*inside, name)
        for branch in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
            enter(key, {**branch}, inside)
        kinds = node.get("type", [])
        lines.extend(f"{key} is {kind}" for kind in ([kinds] if isinstance(kinds, str) else kinds))
        choices = node.get("enum", [node["const"]] if "const" in node else [])
        lines.extend(f"{key} may be {json.dumps(choice)}" for choice in choices)
        if isinstance(node.get("items"), dict):
            enter(f"{key}[]", node["items"], inside)
        for name, inner in node.get("properties", {}).items():
            enter(f"{key}.{name}" if key else name, inner, inside)

    enter("", schema, ())
    return lines


def without_aliases(lines: list[str], found: list[str], folder: Path) -> list[str]:
    """Leave out lines of keys that are gone from the schema and still understood: aliases."""
    known, config = {line.split(" ")[0] for line in found}, write_run_config(folder, values=VALUES)
    understood = {}
    for line in lines:
        key, relation, value = line.split(" ", 2)
        if key not in known and relation == "=":
            code, _ = headway_in_copy("config", "show", config, f"{key}={value}")
            understood[key] = code == 0
    return [line for line in lines if not understood.get(line.split(" ")[0])]


def verbs() -> list[str]:
    """List every verb with its options and the words it takes, as the command line understands them."""
    import typer

    def tell(application: typer.Typer) -> None:
        lines: list[str] = []
        _enter_verb("headway", typer.main.get_command(application), lines)
        print(json.dumps(lines))

    with mock.patch.object(typer.Typer, "__call__", tell):
        code, printed = headway_in_copy()
    assert code == 0, printed
    return list(json.loads(printed))


def _enter_verb(name: str, command: Any, lines: list[str]) -> None:
    lines.append(name)
    place = 0
    for parameter in command.params:
        if not parameter.opts[0].startswith("-"):
            place += 1
            kind = "required" if parameter.required else "optional"
            lines.append(f"{name}: word {place} is {kind}{', several' if parameter.nargs == -1 else ''}")
            continue
        value = "" if parameter.is_flag else " VALUE"
        lines.extend(f"{name} {option}{value}" for option in (*parameter.opts, *parameter.secondary_opts))
        if parameter.required:
            lines.append(f"{name} {parameter.opts[0]} is required")
    if hasattr(command, "list_commands"):
        for verb in command.commands:
            _enter_verb(f"{name} {verb}", command.commands[verb], lines)


def python_names() -> list[str]:
    """List what `headway` offers in Python: names, what a user calls them with, and what a callback hears."""
    lines = [
        *package.__all__,
        *_parameters("Trainer", package.Trainer),
        *_parameters("Trainer.fit", package.Trainer.fit),
    ]
    for name in ("train", "load_config", "override"):
        lines.extend(_parameters(name, getattr(package, name)))
    lines.extend(f"Run.{name}" for name in dir(package.Run) if not name.startswith("_"))
    lines.extend(f"Run.{name}" for name in getattr(package.Run, "__annotations__", {}))
    lines.extend(f"Config.{name}" for name in ("resolved", "run_directory") if hasattr(package.Config, name))
    error = package.HeadwayError("what", where="where", fix="fix")
    lines.extend(f"HeadwayError.{name}" for name in (*vars(error), "exit_code", "render") if hasattr(error, name))
    for name in dir(package.Callback):
        if not name.startswith("_"):
            count = len(inspect.signature(getattr(package.Callback, name)).parameters) - 1
            lines.append(f"Callback.{name} takes {count}")
    return [line for line in lines if not line.startswith(_UNPROMISED)]


#: For the command line alone, and a copy in memory that nobody but the code hears of.
_UNPROMISED = ("train(own_process)", "Callback.on_hold")


def _parameters(name: str, function: Any) -> Iterator[str]:
    for place, parameter in enumerate(inspect.signature(function).parameters.values(), 1):
        if parameter.name != "self":
            by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            optional = "" if parameter.default is inspect.Parameter.empty else ", optional"
            yield f"{name}({parameter.name}) {'by name' if by_name else f'at place {place}'}{optional}"


def metrics(run: Path) -> list[str]:
    """List the names of metrics that a run has recorded."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [name for line in lines for name in json.loads(line)]


def metrics_in_source() -> list[str]:
    """List the names of metrics that occur in the source: those of GPUs and of failures too."""
    found = [name for file in _SOURCES.rglob("*.py") for name in _METRIC.findall(file.read_text(encoding="utf-8"))]
    return [name for name in found if not name.endswith("_")]  # the beginning of several, in a pattern


def variables() -> list[str]:
    """List the environment variables that users set."""
    found = [name for file in _SOURCES.rglob("*.py") for name in _VARIABLE.findall(file.read_text(encoding="utf-8"))]
    return [name for name in found if re.search("FAULTS|SIGNING|ENCRYPTION", name)]


def files(run: Path) -> list[str]:
    """List what lies in a run directory, numbers and hashes left out."""
    paths = (str(path.relative_to(run)) for path in run.rglob("*"))
    return [re.sub(r"[0-9a-f]{12,}|[0-9]+", "N", path) for path in paths if "/.tmp-" not in f"/{path}"]


def records(*runs: Path) -> list[str]:
    """List the keys of what runs leave: JSON files, lines of the ledger by kind, tables."""
    lines: list[str] = []
    for run in runs:
        lines.extend(f"ledger {line['kind']}.{key}" for line in _json_lines(run / "ledger.jsonl") for key in line)
        lines.extend(f"run.json {key}" for key in _keys(json.loads((run / "run.json").read_text())))
        for file in run.glob("attempts/*/attempt.json"):
            lines.extend(f"attempt.json {key}" for key in json.loads(file.read_text()))
        for file in run.glob("checkpoints/*/manifest.json"):
            manifest = json.loads(file.read_text())
            lines.extend(f"manifest.json {key}" for key in manifest)
            lines.extend(f"manifest.json {part}.{key}" for part in ("cursor", "context") for key in manifest[part])
            lines.extend(f"tensor {re.sub('[0-9]+', 'N', name)}" for name in manifest["tensors"])
        with sqlite3.connect(f"file:{run}/checkpoints.sqlite?mode=ro", uri=True) as index:
            for table, column in index.execute(
                "SELECT m.name, p.name FROM sqlite_master m, pragma_table_info(m.name) p WHERE m.type = 'table'"
            ):
                lines.append(f"checkpoints.sqlite {table}.{column}")
        index.close()
    return lines


def _json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _keys(value: Any, key: str = "") -> Iterator[str]:
    """Name every key inside; those below `_VARYING` differ by machine."""
    if isinstance(value, dict):
        for name, inner in value.items():
            path = f"{key}.{name}" if key else name
            yield path
            if name not in _VARYING:
                yield from _keys(inner, path)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, f"{key}[]")


_VARYING = {"packages", "variables", "git", "hardware", "lost_seconds", "lost_steps", "rows", "context", "metrics"}

#: Commands on the kept run whose result is JSON.
RESULTS = {
    "config check": ("config", "check", "config.yaml"),
    "data inspect": ("data", "inspect", "store"),
    "data preview": ("data", "preview", "config.yaml", "--step", "2", "--rows", "1"),
    "models": ("models",),
    "plan": ("plan", "config.yaml"),
    "eval": ("eval", "trained/earlier"),
    "checkpoints list": ("checkpoints", "list", "trained/earlier"),
    "checkpoints verify": ("checkpoints", "verify", "trained/earlier"),
    "runs list": ("runs", "list", "trained"),
    "runs show": ("runs", "show", "trained/earlier"),
    "ledger": ("ledger", "trained/earlier"),
}


def result(folder: Path, words: tuple[str, ...]) -> Any:
    """Run a command on what is kept and return its result."""
    done = headway(*words, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def results(folder: Path) -> list[str]:
    """List the keys of results that commands print as JSON."""
    return [f"headway {name}: {key}" for name, words in RESULTS.items() for key in _keys(result(folder, words))]
