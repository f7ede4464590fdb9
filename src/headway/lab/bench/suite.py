"""A suite: a matrix of cells, and how each of them is measured."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from headway.config import SHAPES, Config
from headway.config.base import Section, conflict
from headway.config.loading.document import Entry, merged
from headway.config.loading.load import parse_override, read_document, set_entry, validate
from headway.config.strategies import FOR_COPIES, STRATEGIES
from headway.core.errors import ConfigError

#: Stands for a model, and for data, of a task of the user's own.
OWN = "task"
SUITES = Path(__file__).parent / "suites"
#: Added to the description of a suite that uses its `on_cpu` part.
ON_CPU = "shapes for a machine without accelerator"

#: Results may come from untrusted logs, and must not name files in other folders.
FileName = Annotated[str, Field(pattern=r"^[\w.-]+$")]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Scaling = Literal["weak", "strong"]


def _as_list(value: Any) -> Any:
    """Accept `ddp,zero3` and `ddp` as well as `[ddp, zero3]`."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value if isinstance(value, list) else [value]


def _known(names: Iterable[str], choices: Collection[str], kind: str) -> list[str]:
    """Check that a kind of thing has all of these names."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(choices)}"
            raise ValueError(f"there is no {kind} '{name}'; {hint}")
    return names


#: Each value once: the cells of one that appears twice would be measured twice, as one.
_AXIS = (BeforeValidator(_as_list), Field(min_length=1), AfterValidator(lambda values: list(dict.fromkeys(values))))
_STRATEGIES = AfterValidator(lambda names: _known(names, STRATEGIES, "strategy"))
_MODELS = AfterValidator(lambda names: _known(map(str.lower, names), [*SHAPES, OWN], "model"))
Numbers = Annotated[list[PositiveInt], *_AXIS]
Strategy = Annotated[str, AfterValidator(lambda name: _known([name], STRATEGIES, "strategy")[0])]
Model = Annotated[str, AfterValidator(lambda name: _known([name.lower()], SHAPES, "model")[0])]


class CellPattern(Section):
    """A pattern of cells: it matches those that have every given value."""

    strategy: Strategy | None = None
    workers: PositiveInt | None = None
    machines: PositiveInt | None = None
    model: Model | None = None
    precision: Precision | None = None
    micro_batch: PositiveInt | None = None
    sequence_length: PositiveInt | None = None
    scaling: Scaling | None = None

    def fits(self, cell: Cell) -> bool:
        """Return whether the pattern matches a cell."""
        wanted = {key: getattr(self, key) for key in CellPattern.model_fields}
        return all(value is None or getattr(cell, key) == value for key, value in wanted.items())


class Exclusion(CellPattern):
    """Cells that are left out."""

    reason: str
    """Said in the report."""


class FaultOrder(CellPattern):
    """Cells with an injected fault, to show that the matrix continues."""

    order: str
    """As in `HEADWAY_FAULTS`: `kill@step=3`, `crash@backward=4%1`."""


class Cell(Section):
    """One combination of the axes."""

    strategy: FileName
    workers: PositiveInt
    """Worker processes on all machines together."""
    model: FileName
    precision: Precision
    micro_batch: PositiveInt
    sequence_length: PositiveInt
    scaling: Scaling = "weak"
    machines: PositiveInt = 1

    @property
    def name(self) -> str:
        """A short name, unique in its matrix and valid as a file name."""
        parts = [self.strategy, f"w{self.workers}", self.model, self.precision, f"b{self.micro_batch}"]
        parts += [f"t{self.sequence_length}", *(["strong"] if self.scaling == "strong" else [])]
        parts += [f"m{self.machines}"] if self.machines > 1 else []
        return "-".join(parts)


class Suite(Section):
    """A matrix: every combination of the axes is a cell."""

    name: str = Field(default="bench", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the folder of results, when no other is given."""
    description: str = ""
    """One line on what is asked."""
    strategy: Annotated[list[str], *_AXIS, _STRATEGIES] = [FOR_COPIES]
    """Axis: values of `parallel.strategy`."""
    workers: Numbers = [1]
    """Axis: numbers of worker processes, on each machine."""
    machines: Numbers = [1]
    """Axis: numbers of machines, each with as many workers."""
    model: Annotated[list[str], *_AXIS, _MODELS] = ["117m"]
    """Axis: named shapes (`headway models`)."""
    precision: Annotated[list[Precision], *_AXIS] = ["fp32"]
    """Axis: values of `train.precision`."""
    micro_batch: Numbers = [4]
    """Axis: rows of one forward pass."""
    sequence_length: Numbers = [1024]
    """Axis: tokens of a row."""
    scaling: Annotated[list[Scaling], *_AXIS] = ["weak"]
    """Axis: `weak`: every worker has as many rows whatever their number. `strong`: all workers share the rows that the
    largest number of workers has in the weak case."""
    micro_batches: PositiveInt = 1
    """Micro-batches of a worker in a step (in the weak case): gradient accumulation."""
    vocab_size: PositiveInt = 40_512
    """Token ids of synthetic data, and rows of the embedding; that of GPT (40,478), up to a multiple of 64."""
    data: Literal["synthetic", "store", "task"] = "synthetic"
    """`synthetic`: rows computed from the seed, without input or output. `store`: the token store of `config.data`.
    `task`: the dataset of a task of your own, where `config.task` names one."""
    warmup_steps: PositiveInt = 2
    """Steps before the measured ones."""
    steps: PositiveInt = 10
    """Measured steps."""
    profiled_steps: NonNegativeInt = 2
    """Steps after them under PyTorch's profiler, for the share of communication."""
    repeats: PositiveInt = 3
    """How often each cell is measured, each time in processes of its own; all cells take turns."""
    timeout_seconds: PositiveInt = 900
    """One measurement of one cell takes no longer, or it is ended."""
    retries: NonNegativeInt = 0
    """How often a failed measurement is retried."""
    seed: NonNegativeInt = 0
    """Of weights and data."""
    config: dict[str, Any] = {}
    """More keys of the config of every cell, as in a config file."""
    exclude: list[Exclusion] = []
    """Cells to leave out, each with a reason."""
    faults: list[FaultOrder] = []
    """Faults on purpose."""

    @model_validator(mode="before")
    @classmethod
    def _own_task(cls, values: Any) -> Any:
        """Fill in the axes that mean nothing where the config has a task of its own."""
        if not isinstance(values, dict) or not (values.get("config") or {}).get("task"):
            return values
        own = {"model": [OWN], "sequence_length": [1], "data": OWN}
        for key in (key for key, value in own.items() if values.get(key, value) != value):
            raise conflict(f"{key} is for language models, and the config has a task of its own", key)
        return {**values, **own}


def built_in_suites() -> list[str]:
    """Return the names of the built-in suites."""
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def load_suite(name: str, overrides: Sequence[str] = (), *, accelerator: bool = True) -> Suite:
    """Read a suite, apply overrides, and check it.

    Args:
        name: A YAML file, or the name of a built-in suite.
        overrides: `key=value` with keys of the suite, or dotted ones of the config (`optimizer.name=muon`).
        accelerator: Whether there is one; otherwise the suite's `on_cpu` part overrides the rest.

    Raises:
        ConfigError: there is no such suite, or something in it is wrong, with the place and the nearest known key.
    """
    tree = _read(_find(name), name)
    on_cpu = tree.value.pop("on_cpu", None)
    variants = [tree] if on_cpu is None else [merged(tree, on_cpu), tree]
    for variant in variants:
        for text in overrides:
            key, value = parse_override(text)
            first, dot, _ = key.partition(".")
            is_of_config = dot and first in Config.model_fields and first != "config"
            set_entry(variant, f"config.{key}" if is_of_config else key, value)
    # Check the part for the other kind of machine, too, or its errors would show only there.
    on_cpu_suite = validate(variants[0], Suite)
    suite = validate(variants[-1], Suite)
    if accelerator or on_cpu is None:
        return suite
    said = [suite.description, ON_CPU] if suite.description else [ON_CPU]
    return on_cpu_suite.model_copy(update={"description": "; ".join(said)})


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    known = built_in_suites()
    if name in known:
        return SUITES / f"{name}.yaml"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        "there is no such suite",
        where=name,
        fix=f"{hint}give a YAML file, or a built-in suite: {', '.join(known)}",
    )


def _read(path: Path, name: str) -> Entry:
    tree = read_document(path, "suite", name)
    if not isinstance(tree.value, dict):
        raise ConfigError(
            "a suite is a mapping of keys to values", where=name, fix=f"begin with `strategy: [{FOR_COPIES}]`"
        )
    tree.value.setdefault("name", Entry(path.stem, name))
    return tree


def flattened(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Return nested mappings as dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
