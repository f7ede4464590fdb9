"""Checks of the run directory, the remote tier, keys and data, before training begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headway.checkpoint.format.sealing import key_to_encrypt_with
from headway.checkpoint.format.signing import VARIABLE, key_to_sign_with, signing_key
from headway.checkpoint.remote.acquire import find_tier, resolve_identity
from headway.checkpoint.remote.objects import UnreachableError
from headway.checkpoint.run_identity import run_identity
from headway.checkpoint.store import CheckpointInfo
from headway.config import CheckpointConfig, Config
from headway.config.derived.identity import is_incidental
from headway.core.code_identity import compare, is_source, module_source_hash
from headway.core.console import is_first_worker, notice, warning
from headway.core.coordination.lease import OWNER_FILE
from headway.core.errors import ConfigError, DataError
from headway.core.functions import load_function
from headway.run.directory.ownership import OwnerLock
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import RunOptions, check_changes

#: The part of a checkpoint's context that holds the identities of the user's code.
CODE = "code"
#: Code that reads samples of a dataset: it is often repaired while a run waits, and gives the same ones then.
_REPAIRABLE = ("dataset", "collate")


def check_run(config: Config, options: RunOptions) -> None:
    """Make the checks of `prepare_run_directory` and of taking ownership, without changing anything.

    Raises:
        CheckpointError: the place cannot become a run directory, or the run there is in use.
        ConfigError: the run there was made by another config.
    """
    check_run_directory(config)
    if not options.restart:
        check_changes(RunDirectory(config.run_directory), config, options)


def check_run_directory(config: Config) -> None:
    """Check that an attempt could begin in the run directory, without changing anything.

    Raises:
        CheckpointError: the place cannot become a run directory, or the run there is in use.
    """
    run = RunDirectory(config.run_directory)
    run.check_usable()
    if (run.path / OWNER_FILE).exists():
        OwnerLock.take(run.path).release()


def check_remote_usable(config: Config, options: RunOptions, data: str | None = None) -> None:
    """Check the remote tier for the run's checkpoints, as the run will.

    If it does not answer, only warn: a run that has a local checkpoint, or gets an answer in time, continues.

    Args:
        data: Fingerprint of the data.

    Raises:
        ConfigError: the URL cannot be used, or something that it needs is missing; or the checkpoints there belong to
            another run.
        CheckpointError: the store refuses access.
    """
    if config.checkpoint.remote is None:
        return
    found = run_identity(config, data)
    with _only_warning():
        tier = find_tier(config.checkpoint.remote, found, patience_seconds=5.0)
        if options.restart:
            tier.steps()
        else:
            resolve_identity(tier, found)


def check_remote_reachable(config: Config) -> None:
    """Check that the remote tier can be listed; whose checkpoints are there can be told only with the data.

    Raises:
        ConfigError: the URL cannot be used, or something that it needs is missing.
        CheckpointError: the store refuses access.
    """
    if config.checkpoint.remote is not None:
        with _only_warning():
            find_tier(config.checkpoint.remote, run_identity(config), patience_seconds=5.0).steps()


@contextmanager
def _only_warning() -> Iterator[None]:
    """Report a remote tier that does not answer; a run that has local checkpoints continues without it."""
    try:
        yield
    except UnreachableError as error:
        warning(f"the remote checkpoints cannot be reached now: {error.what}")


def check_keys_present(checkpoint: CheckpointConfig) -> None:
    """Check the keys that checkpoints are signed and encrypted with.

    Otherwise a missing key would show only at the first save. A key that is set but not used would make the run refuse
    its own checkpoints on resume.

    Raises:
        ConfigError: a key is missing or cannot be used, or is set without being used.
    """
    if checkpoint.sign:
        key_to_sign_with()
    elif signing_key() is not None:
        raise ConfigError(
            f"{VARIABLE} is set, so unsigned checkpoints are refused, but this run would save only such",
            where=f"checkpoint.sign, {VARIABLE}",
            fix=f"checkpoint.sign=true, or leave {VARIABLE} unset for this command",
        )
    if checkpoint.encrypt:
        key_to_encrypt_with("checkpoint.encrypt")
    if checkpoint.remote is not None and checkpoint.remote.encrypt:
        key_to_encrypt_with("checkpoint.remote.encrypt")


def check_data(config: Config, fingerprints: Mapping[str, str], start: CheckpointInfo) -> None:
    """Check the fingerprints of data, tokenizer and pretrained model against those of a checkpoint.

    Raises:
        DataError: they differ, and no segment of the run accounts for that.
    """
    known = {segment.data for segment in config.segments}
    for kind, value in fingerprints.items():
        if kind == "loss":
            continue  # code: `check_code` compares it
        before = start.context.get(kind)
        if before in (None, value) or (kind == "data" and before in known):
            continue
        needed = {
            "pretrained": ("pretrained model", config.model.from_pretrained),
            "teacher": ("teacher", config.distill and config.distill.teacher),
        }
        if kind in needed:
            name, place = needed[kind]
            raise DataError(
                f"the {name} has changed: its hash is {value[:12]}, but checkpoint {start.path.name} was made"
                f" from {before[:12]}",
                where=str(place),
                fix="restore what it was made from, or choose another name=... for a new run",
            )
        raise DataError(
            f"the {kind} fingerprint is {value[:12]}, but checkpoint {start.path.name} was made with {before[:12]}",
            where=str(start.path),
            fix="restore the token store it was made with, or choose another name=... for a new run",
        )


def check_code(loss: str | None, code: Mapping[str, str], start: CheckpointInfo, *, accept: bool) -> None:
    """Check the identities of the user's code against those of a checkpoint, and report what cannot be compared.

    Code of keys that do not change what a run computes (callbacks, a strategy) may change, and so may code that reads
    samples; that is reported.

    Args:
        loss: `loss` of the config.
        code: By key, what the run would be trained with (`Task.code`, and the loss).
        accept: Continue with code that has changed.

    Raises:
        DataError: it has changed, and that is not accepted.
    """
    own = start.context.get(CODE)
    known = {**{key: start.context[key] for key in code if key == "loss" and key in start.context}, **(own or {})}
    name = start.path.name
    unknown = [key for key in code if key not in known]
    if own is None and unknown:
        notice(f"{name} does not know the code of {', '.join(unknown)}: it counts from this attempt on")
    for key, now in code.items():
        before = known.get(key, now)
        found = compare(before, now)
        if found == "same":
            continue
        if found == "another Python":
            notice(
                f"the code of {key} was compiled by another version of Python for {name}, so nothing shows whether it"
                " has changed; the run continues"
            )
        elif own is None and _says_as_much(loss, key, before, now):
            notice(
                f"the code of {key} is identified anew: {name} knows the file that started the run or that names the"
                " code; from now on the code itself counts"
            )
        elif accept or may_differ(key):
            if is_first_worker():
                warning(f"the run continues with changed code of {key}")
        else:
            what = "source" if is_source(now) else "code, or a value that it reads,"
            raise DataError(
                f"the {what} of the {key} has changed: its hash is {short_identity(now)}, but checkpoint {name} was"
                f" made from {short_identity(before)}",
                where=str(loss or key) if key == "loss" else key,
                fix="restore what it was made from, or choose another name=... for a new run;"
                " headway.train(..., accept_changes=True) without a supervisor continues with the code as it is",
            )


def _says_as_much(loss: str | None, key: str, before: str, now: str) -> bool:
    """Return whether an identity as Headway once computed it, by the file of the module that the config names, leaves
    open whether the code has changed, or says that it has not."""
    if compare(before, now) == "another kind":
        return True  # of a notebook or `python -c`: it is that of the launcher
    if key != "loss" or loss is None:
        return False
    return before == module_source_hash(load_function(loss, key)[0])


def may_differ(key: str) -> bool:
    """Return whether a run may continue with other code of a key: it changes nothing that the run computes, or reads
    samples."""
    return key in _REPAIRABLE or is_incidental(key.partition(" ")[0])


def short_identity(identity: str) -> str:
    """Return the beginning of an identity of code, for messages."""
    version, _, digest = identity.rpartition(":")
    return f"{version}:{digest[:12]}" if version else digest[:12]
