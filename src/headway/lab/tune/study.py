"""A study's folder: what the study is, its journal, and the runs of its trials."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.config import Config, load_config
from headway.config.derived.identity import changed_values
from headway.config.loading.document import parse, to_yaml
from headway.config.loading.load import CONFIG_BYTES, given_values, validate
from headway.core.coordination.train_command import place
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import write_text
from headway.core.files.foreign import read_text
from headway.core.files.hashes import fingerprint
from headway.core.files.locks import is_locked, lock_file
from headway.data.made_of import made_of
from headway.lab.tune.journal import Journal, TrialRecord, repair
from headway.lab.tune.settings import MAY_CHANGE, StudySettings
from headway.lab.tune.space import Space, parse_space
from headway.telemetry.record import STUDY_FILE, STUDY_RUNS
from headway.telemetry.runs import flat

#: The config as given, of which every trial is a variant.
BASE_FILE = "base.yaml"
LOG_FOLDER = "logs"
STORE_FOLDER = "stores"
STOP_FILE = ".stop"
REPORT_FILE = "report.html"
_LOCK_FILE = ".study"
#: Keys that a study gives each trial itself.
_OWN_KEYS = ("name", "runs", "data.store")


@dataclass(frozen=True)
class Study:
    """A study, as its folder keeps it."""

    folder: Path
    settings: StudySettings
    config: Mapping[str, Any]
    """The config as its file and overrides give it, without defaults."""
    started_in: Path
    """The folder in which it was started: paths in the config are relative to it."""

    @cached_property
    def base(self) -> Config:
        """The config, resolved."""
        return load_config(self.config, self._workers)

    @property
    def _workers(self) -> list[str]:
        """The override that every trial has, if there is one."""
        count = self.settings.workers_per_trial
        return [] if count is None else [f"parallel.workers={count}"]

    @cached_property
    def base_values(self) -> dict[str, Any]:
        """The values of the config by dotted key."""
        return flat(self.base.model_dump(mode="json"))

    @cached_property
    def space(self) -> Space:
        """The space."""
        return parse_space(self.settings.space, self.settings.constraints, self.base_values)

    @property
    def directions(self) -> list[str]:
        """The direction of each objective."""
        return [one.direction for one in self.settings.objective]

    @property
    def runs(self) -> Path:
        """The folder of the run directories."""
        return self.folder / STUDY_RUNS

    def run_of(self, number: int) -> Path:
        """Return the run directory of a trial."""
        return self.runs / name_of(number)

    def log_of(self, number: int) -> Path:
        """Return the file that keeps what a trial's command prints."""
        return self.folder / LOG_FOLDER / f"{name_of(number)}.log"

    def open_journal(self) -> Journal:
        """Open the journal."""
        return Journal(self.folder, self.directions, self.space)

    def words_of(self, values: Mapping[str, Any], number: int) -> list[str]:
        """Return the overrides that make a trial's config from the base file.

        Raises:
            ConfigError: the config is refused.
        """
        words = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        words += self._workers
        config = load_config(self.config, words)
        if config.task is None:
            words.append(f"data.store={json.dumps(str(self.store_of(config)), ensure_ascii=False)}")
        return [*words, *place(name_of(number), self.runs.absolute())]

    def store_of(self, config: Config) -> Path:
        """Return the token store of a trial: the config's own, or one in the study's folder for other data."""
        made = made_of(config.data)
        if made == made_of(self.base.data):
            return self.base.data.store
        return (self.folder / STORE_FOLDER / fingerprint(made)[:12]).absolute()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Own the study for a block, and repair what a killed owner has left.

        Raises:
            CheckpointError: another process owns it.
        """
        try:
            lock = lock_file(self.folder / _LOCK_FILE)
        except BlockingIOError:
            raise CheckpointError(
                "another process works on this study",
                where=str(self.folder),
                fix=f"wait for it, or headway tune stop {self.folder}",
            ) from None
        with lock:
            repair(self.folder)
            yield

    @property
    def is_worked_on(self) -> bool:
        """Whether a process works on the study now, on this machine."""
        return is_locked(self.folder / _LOCK_FILE)

    def save(self) -> None:
        """Write the study's files; the journal comes by itself."""
        for folder in (self.runs, self.folder / LOG_FOLDER):
            folder.mkdir(parents=True, exist_ok=True)
        record = {
            "started_in": str(self.started_in),
            "settings": self.settings.model_dump(mode="json", exclude_none=True),
            "config": dict(self.config),
        }
        for name, values in ((BASE_FILE, dict(self.config)), (STUDY_FILE, record)):
            write_text(self.folder / name, to_yaml(values))


def name_of(number: int) -> str:
    """Return the name of a trial's run."""
    return f"{number:04d}"


def open_study(folder: Path) -> Study:
    """Read a study.

    Raises:
        CheckpointError: there is none in the folder.
    """
    path = folder / STUDY_FILE
    try:
        tree = parse(read_text(path, CONFIG_BYTES), str(path))
        settings = tree.child("settings")
        config = tree.child("config")
        if settings is None or config is None:
            raise ValueError("settings or config are missing")
        started_in = Path(str(tree.plain().get("started_in", ".")))
        return Study(folder, validate(settings, StudySettings), config.plain(), started_in)
    except FileNotFoundError:
        raise CheckpointError(
            "there is no study", where=str(folder.absolute()), fix="begin one: headway tune my.yaml space.yaml"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the study cannot be read: {error}", where=str(path), fix="restore it from a copy"
        ) from None


def new_study(config: Path, overrides: Sequence[str], settings: StudySettings, folder: Path | None) -> Study:
    """Return the study of a command line, which continues the one in the folder if there is one.

    Args:
        config: The config file or preset.
        overrides: `key=value` for all trials.
        settings: The study's settings.
        folder: Its folder; `studies/NAME` with the config's name when not given.

    Raises:
        ConfigError: the config is wrong, or the folder holds the study of another one.
    """
    given = given_values(config, overrides)
    base = load_config(given)
    study = Study(folder or Path("studies") / base.name, settings, given, Path.cwd())
    _check_keys(study)
    if not (study.folder / STUDY_FILE).exists():
        return study
    there = open_study(study.folder)
    differing = changed_values(_identity(there), _identity(study))
    if differing:
        raise ConfigError(
            "the folder holds a study of another config or space: " + "; ".join(differing),
            where=str(study.folder),
            fix="--dir another folder, or give what it was begun with",
        )
    return study


def _identity(study: Study) -> dict[str, Any]:
    """Return what stays the same as long as a study is continued."""
    settings = study.settings.model_dump(mode="json", exclude=set(MAY_CHANGE))
    return {**settings, "config": dict(study.config), "started_in": str(study.started_in)}


def _check_keys(study: Study) -> None:
    """Check that the config has every key of the space.

    Raises:
        ConfigError: it has not, or a key is the study's own.
    """
    for key in study.settings.space:
        if key in _OWN_KEYS or (key == "parallel.workers" and study.settings.workers_per_trial is not None):
            raise ConfigError(
                f"a study gives each trial its own {key}", where=f"space: {key}", fix="leave it out of the space"
            )
    for found in study.space.ranges:
        sample: Any = found.low
        if found.kind == "choice":
            sample = found.choices[0]
        elif found.is_whole:
            sample = round(found.low)
        try:
            load_config(study.config, [f"{found.key}={json.dumps(sample)}"])
        except ConfigError as error:
            if error.what.startswith("unknown key"):
                raise ConfigError(error.what, where=f"space: {found.key}", fix=error.fix) from None


def record_line(record: TrialRecord) -> str:
    """Describe a trial's values in one line."""
    return " ".join(f"{key}={short_text(value)}" for key, value in record.values.items())


def short_text(value: Any) -> str:
    """Return a value of a key for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
