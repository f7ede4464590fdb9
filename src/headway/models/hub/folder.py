"""The folder of a pretrained model: a local one, or a snapshot of a commit on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.config import ModelConfig
from headway.config.sections.losses import DistillConfig
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_or_empty
from headway.core.files.hashes import fingerprint, sha256_file
from headway.core.hub import HUB, is_on_hub, is_pinned, snapshot, split_hub_name

#: Files of a repository that a model consists of; `*.py` only where its code may run.
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")
_CODE = "*.py"
ADAPTER = "adapter_config.json"
#: Hashes that this process, or the one that it is a copy of, knows of a folder; a cache may have no place yet.
_KNOWN: dict[Path, dict[str, dict[str, Any]]] = {}


def open_folder(source: Path | str, *, with_code: bool = False) -> Path:
    """Return the local folder of a source; what is missing of a model of the Hub is downloaded to its cache.

    Raises:
        ConfigError: there is no such model, or the Hub cannot be reached and the cache does not have it.
        CheckpointError: the weights are in a format that is not read.
    """
    folder = _snapshot(source, with_code) if is_on_hub(source) else Path(source)
    _check_format(folder)
    return folder


def settings_folder(source: Path | str, *, with_code: bool = False) -> Path:
    """Return a folder with the settings of a source but not always its weights, for those who ask for sizes only.

    Raises:
        ConfigError, CheckpointError: as `open_folder`.
    """
    if not is_on_hub(source):
        return Path(source)
    return _snapshot(source, with_code, ["*.json", *([_CODE] if with_code else [])])


def base_folder(source: Path | str, *, with_code: bool = False) -> Path:
    """Return the folder of the model itself: for an adapter of peft, of the model that it adapts.

    Raises:
        ConfigError, CheckpointError: as `open_folder`; or the adapter does not name its model.
    """
    folder = open_folder(source, with_code=with_code)
    if not is_adapter(folder):
        return folder
    settings = read_json_or_empty(folder / ADAPTER)
    name = settings.get("base_model_name_or_path")
    revision = settings.get("revision")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "the adapter does not name the model that it adapts",
            where=str(folder / ADAPTER),
            fix="set base_model_name_or_path there",
        )
    if Path(name).is_dir():
        return open_folder(Path(name), with_code=with_code)
    at = f"@{revision}" if isinstance(revision, str) and revision else ""
    return open_folder(f"{HUB}{name}{at}", with_code=with_code)


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder holds a model, or an adapter of peft, as Hugging Face has them."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter of peft instead of a model."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def pinned_source(source: Path | str) -> Path | str:
    """Return the source with the commit that its revision is now; folders stay as they are.

    Raises:
        ConfigError: as `open_folder`.
    """
    if not is_on_hub(source) or is_pinned(source):
        return source
    name, _ = split_hub_name(source)
    # The cache names the folder of a snapshot after its commit.
    return f"{HUB}{name}@{_snapshot(source, False, ['config.json', ADAPTER]).name}"


def _snapshot(source: str, with_code: bool, patterns: list[str] | None = None) -> Path:
    return snapshot(source, patterns or [*_WANTED, *([_CODE] if with_code else [])])


def _check_format(folder: Path) -> None:
    """Check that the weights are safetensors.

    Raises:
        CheckpointError: they are in another format.
    """
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return  # a missing folder is reported by whoever reads its config.json
    if any(folder.glob("*.nemo")) or any(folder.glob("*.distcp")):
        raise CheckpointError(
            "the weights are in NeMo's format, which is not read",
            where=str(folder),
            fix="convert them with NeMo's exporter: llm.export_ckpt(path=OLD, target='hf', output_path=NEW)",
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            "the weights are pickled, and Headway never unpickles: that can run arbitrary code",
            where=str(folder),
            fix="if you trust them, convert them: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)",
        )


def pretrained_fingerprints(model: ModelConfig, distill: DistillConfig | None, run: Path) -> dict[str, str]:
    """Return the fingerprints of the pretrained models that a run needs: the one it continues, and its teacher.

    Args:
        run: The run directory, which remembers them.

    Raises:
        ConfigError, CheckpointError: as `open_folder` and `weights_fingerprint`.
    """
    found = {}
    if model.from_pretrained is not None:
        found["pretrained"] = _fingerprint(model.from_pretrained, model.trust_remote_code, run / "pretrained.json")
    if distill is not None:
        found["teacher"] = _fingerprint(distill.teacher, False, run / "teacher.json")
    return found


def _fingerprint(source: Path | str, with_code: bool, cache: Path) -> str:
    folder = open_folder(source, with_code=with_code)
    found = weights_fingerprint(folder, with_code=with_code, cache=cache)
    if is_adapter(folder):
        base = base_folder(folder, with_code=with_code)
        of_base = weights_fingerprint(base, with_code=with_code, cache=cache.with_name(f"{cache.stem}-base.json"))
        found = fingerprint([found, of_base])
    return found


def weights_fingerprint(folder: Path, *, with_code: bool, cache: Path) -> str:
    """Return the hash of everything in a model's folder that decides what it computes.

    These are the weights, the configs and, where it may run, the code. Files that have not been touched since the last
    call are not read again.

    Args:
        folder: Of the model.
        with_code: Whether code of the folder may run.
        cache: File that holds the hashes between calls.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names = ("*.safetensors", "config.json", ADAPTER, *([_CODE] if with_code else []))
    files = sorted({path for name in names for path in folder.glob(name)})
    kept = read_json_or_empty(cache)
    known = {**_KNOWN.get(folder, {}), **kept}
    found: dict[str, dict[str, Any]] = {}
    try:
        for path in files:
            stamp = _stamp(path)
            before = known.get(path.name)
            if isinstance(before, dict) and before.get("stamp") == stamp:
                found[path.name] = before
            else:
                found[path.name] = {"stamp": stamp, "sha256": sha256_file(path)}
    except OSError as error:
        what = f"a file of the pretrained model cannot be read: {error.strerror or error}"
        raise CheckpointError(what, where=str(error.filename or folder), fix="fetch the model again") from error
    _KNOWN[folder] = found
    if found != kept and cache.parent.is_dir():
        write_json(cache, found)
    return fingerprint({name: entry["sha256"] for name, entry in found.items()})


def _stamp(path: Path) -> list[int]:
    """Return what changes whenever a file is written; its time of change cannot be set by a program."""
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
