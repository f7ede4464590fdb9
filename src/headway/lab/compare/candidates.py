"""What is compared: run directories, folders of exported models, and groups of runs that differ in their seed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.config import Config, load_resolved
from headway.core.console import warning
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.foreign import LISTING_BYTES, read_json_object
from headway.core.files.hashes import fingerprint, sha256_file
from headway.data.tokenizing.begin_of_text import is_same_but_for_template
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.models.hub.folder import is_model_folder
from headway.telemetry.record import is_run
from headway.training.evaluation.inference import load_tokenizer

#: Keys in which the runs of a group may differ.
_OF_SEEDS = ("name", "seed", "runs")
#: What the settings of a Hugging Face model call the longest row.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass(frozen=True)
class Group:
    """One side of a comparison: a model, or several runs of one config with other seeds."""

    name: str
    paths: tuple[Path, ...]

    @property
    def run_paths(self) -> tuple[Path, ...]:
        """The run directories among them."""
        return tuple(path for path in self.paths if is_run(path))


@dataclass(frozen=True)
class Tokens:
    """How a model reads text."""

    tokenizer: Tokenizer
    begin: Mapping[str, int]
    """The tokens that begin every text, with ids."""

    def is_same(self, other: Tokens) -> bool:
        """Return whether both make the same ids of any text."""
        mine = self.tokenizer
        theirs = other.tokenizer
        same = mine.fingerprint == theirs.fingerprint or is_same_but_for_template(mine.content, theirs.content)
        return same and mine.end_of_text_id == theirs.end_of_text_id and list(self.begin) == list(other.begin)


@dataclass(frozen=True)
class Candidate:
    """A model that can be evaluated; its weights are not loaded yet."""

    path: Path
    tokens: Tokens
    sequence_length: int
    """Tokens per row in training, or the most that it takes."""
    identity: str
    """Hash of its weights and their shapes."""
    config: Config | None = None
    """Of a run; None for a folder."""
    checkpoint: CheckpointInfo | None = None
    """Of a run: the newest good one."""

    @property
    def step(self) -> int | None:
        """Training step of the weights, where it is known."""
        return None if self.checkpoint is None else self.checkpoint.step


def find_groups(words: Sequence[str]) -> list[Group]:
    """Find what each word of the command line names: a run, a folder of an exported model, a folder of runs, a pattern.

    Raises:
        CheckpointError: a word names nothing of these.
        ConfigError: there are fewer than two different ones, or one is given twice.
    """
    groups = [_group(word) for word in words]
    paths = [path.resolve() for group in groups for path in group.paths]
    if len(groups) < 2 or len(set(paths)) < len(paths):
        raise ConfigError(
            "a comparison needs two or more different runs or models",
            where=" ".join(words),
            fix="headway compare BASELINE MODEL...",
        )
    names = [Path(word).resolve().name for word in words]
    if len(set(names)) < len(names):
        names = list(words)
    return [Group(name, group.paths) for name, group in zip(names, groups, strict=True)]


def _group(word: str) -> Group:
    path = Path(word)
    if _is_model(path):
        return Group(word, (path,))
    if path.is_dir():
        found = [below for below in sorted(path.iterdir()) if below.is_dir() and _is_model(below)]
    else:
        found = [below for below in _matching(path) if _is_model(below)]
    if found:
        return Group(word, tuple(found))
    what = "holds no run and no model" if path.is_dir() else "does not exist"
    raise CheckpointError(f"'{word}' {what}", where=str(path.absolute()), fix=_nearest(path))


def _matching(pattern: Path) -> list[Path]:
    """Return the paths that match a pattern, in order."""
    anchor = Path(pattern.anchor or ".")
    try:
        return sorted(anchor.glob(str(pattern.relative_to(pattern.anchor))))
    except (ValueError, OSError):  # `**` within a name, or a folder without permission
        return []


def _is_model(path: Path) -> bool:
    try:
        return is_run(path) or is_model_folder(path)
    except OSError:  # a folder without permission, or a name that is none
        return False


def _nearest(path: Path) -> str:
    """Return what may have been meant by a path that names nothing."""
    if _is_model(Path("runs") / path):  # the run's name alone, where runs are by default
        return f"did you mean {Path('runs') / path}?"
    folder = path.parent
    try:
        there = [below.name for below in folder.iterdir() if below.is_dir()]
    except OSError:
        there = []
    near = difflib.get_close_matches(path.name, there, n=1)
    return f"did you mean {folder / near[0]}?" if near else f"headway runs list {folder} shows the runs there"


def differing_keys(group: Group, differences: Mapping[str, object]) -> list[str]:
    """Return the config keys besides the seed in which the runs of a group differ."""
    return [] if len(group.paths) == 1 else [key for key in differences if key not in _OF_SEEDS]


def open_candidate(path: Path) -> Candidate:
    """Open a run's newest good checkpoint, or a Hugging Face folder, without its weights.

    Raises:
        CheckpointError: there is none that verifies, or its tokenizer is not there.
        ConfigError: the run trained a module of the user's own.
    """
    if not is_run(path):
        tokenizer, begin = load_tokenizer(path, None)
        files = sorted([*path.glob("*.safetensors"), *path.glob("*config.json")])
        identity = fingerprint({file.name: sha256_file(file) for file in files})
        return Candidate(path, Tokens(tokenizer, begin), _longest_row(path), identity)
    config = load_resolved(path / "config.yaml")
    info = CheckpointStore(path / "checkpoints").newest(warning)
    if info is None:
        raise CheckpointError(
            "the run has no checkpoint yet", where=str(path), fix=f"headway train {path / 'config.yaml'}"
        )
    tokenizer, begin = load_tokenizer(path, info)
    shape = config.model.model_dump(mode="json", exclude={"attention"})
    identity = fingerprint({"state": info.state_sha256, "shape": shape})
    longest = config.train.sequence_length
    return Candidate(path, Tokens(tokenizer, begin), longest, identity, config, info)


def _longest_row(folder: Path) -> int:
    """Return the tokens per row of an exported model: as for `headway eval`, but no more than it takes."""
    usual = Config().train.sequence_length
    try:
        settings = read_json_object(folder / "config.json", LISTING_BYTES)
    except (OSError, ValueError):
        return usual
    known = [value for key in _LENGTHS if type(value := settings.get(key)) is int and value > 0]
    return min([usual, *known])
