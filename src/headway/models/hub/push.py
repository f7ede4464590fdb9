"""Upload of an exported folder to the Hugging Face Hub, by its own client, in one commit."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.credentials.secrets import redact
from headway.core.errors import ConfigError, causes, in_one_line, needing
from headway.core.hub import hub_error_kinds
from headway.models.hub.folder import ADAPTER, open_folder
from headway.models.huggingface.folder import MARKER

#: The environment variable with the token. A token that was saved on this machine is not used.
TOKEN = "HF_TOKEN"
CARD = "README.md"
#: Files that a model consists of. Others that happen to lie there, such as a `.env`, are never sent.
_WANTED = (
    "*.safetensors", "*.safetensors.index.json", "*.jinja", "*.model", "*.py", "LICENSE*", CARD,
    "config.json", ADAPTER, "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_REPOSITORY = re.compile(r"[\w][\w.-]{0,95}/[\w][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class Upload:
    """What is sent to a repository of models."""

    repository: str
    """`organisation/name`."""
    files: Sequence[Path]
    left_out: Sequence[str]
    """Names of other files of the folder."""
    card: str | None
    """The model card; None keeps that of the folder."""

    @classmethod
    def of(cls, folder: Path, repository: str, card: str | None) -> Upload:
        """Find what is sent of a folder.

        Raises:
            ConfigError: the folder holds no model, or the repository's name is none.
            CheckpointError: the weights are pickled.
        """
        if not _REPOSITORY.fullmatch(repository):
            raise ConfigError(
                "a repository of the Hub is named organisation/name",
                where=repository,
                fix="headway push FOLDER me/model",
            )
        wanted, others = model_files(folder)
        if card is not None:
            wanted = [path for path in wanted if path.name != CARD]
        others = sorted(set(others) - {CARD, MARKER})
        return cls(repository, wanted, others, card)

    @property
    def sizes(self) -> dict[str, int]:
        """Names and bytes of the files, with the card."""
        sizes = {path.name: path.stat().st_size for path in self.files}
        return sizes if self.card is None else {**sizes, CARD: len(self.card.encode())}


def model_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files of a folder that a model consists of, and the names of the others, both sorted.

    Raises:
        ConfigError: the folder holds no model.
        CheckpointError: the weights are pickled.
    """
    open_folder(folder)
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER)):
        raise ConfigError(
            "the folder holds no exported model: there is no config.json",
            where=str(folder),
            fix="give a folder that `headway export` has written, or a run",
        )
    wanted = {path for pattern in _WANTED for path in folder.glob(pattern) if path.is_file()}
    others = {path.name for path in folder.iterdir()} - {path.name for path in wanted}
    return sorted(wanted), sorted(others)


def push(upload: Upload, *, private: bool) -> str:
    """Send a model to its repository, which is created if there is none, and return the address of the commit.

    All files arrive in one commit. Weights and configs of earlier ones that are not among them are removed in it.

    Raises:
        ConfigError: there is no token, the Hub refuses it or cannot be reached, or the repository is public although
            the model is to be private.
    """
    token = os.environ.get(TOKEN, "").strip()  # a token that was read from a file ends with a newline
    if not token:
        raise ConfigError(
            "there is no token for the Hugging Face Hub",
            where=TOKEN,
            fix=f"export {TOKEN}=... with a token that may write, from https://huggingface.co/settings/tokens",
        )
    with needing("huggingface_hub", "hf", "headway push"):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    api = HfApi(token=token)
    try:
        api.create_repo(upload.repository, private=private, exist_ok=True)
        found = api.repo_info(upload.repository)
        if private and not found.private:
            raise ConfigError(
                "the repository exists and is public, so the model would not be private",
                where=upload.repository,
                fix="--public, or another name",
            )
        operations: list[Any] = [CommitOperationAdd(path.name, path) for path in upload.files]
        if upload.card is not None:
            operations.append(CommitOperationAdd(CARD, upload.card.encode()))
        earlier = {file.rfilename for file in found.siblings or () if _is_of_model(file.rfilename)}
        operations += [CommitOperationDelete(name) for name in sorted(earlier - upload.sizes.keys())]
        commit = api.create_commit(upload.repository, operations, commit_message="Upload by headway push")
    except ConfigError:
        raise
    except Exception as error:
        raise _explained(upload.repository, error) from error
    return str(commit.commit_url)


def _is_of_model(name: str) -> bool:
    """Return whether a file of a repository is weights, or a config that says how they are loaded: a model beside the
    config of an adapter would be taken for that adapter."""
    return "/" not in name and (".safetensors" in name or name in ("config.json", ADAPTER))


def _explained(repository: str, error: Exception) -> ConfigError:
    kinds = hub_error_kinds(error)
    status = next((code for one in causes(error) if (code := _status(one)) is not None), None)
    words = redact(in_one_line(error))
    if status == 401:
        what = "the Hub does not accept the token"
        fix = f"set {TOKEN} to a token that is valid and may write"
    elif status == 403:
        what = f"the token may not write to this repository: {words}"
        fix = f"set {TOKEN} to a token that may write, or name another organisation"
    elif kinds & {"OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutError", "TransportError"}:
        what = f"the Hugging Face Hub cannot be reached: {words}"
        fix = "run the same command again with a network; unset HF_HUB_OFFLINE"
    else:
        what = f"the model was not sent: {words}"
        fix = "run the same command again"
    return ConfigError(what, where=repository, fix=fix)


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
