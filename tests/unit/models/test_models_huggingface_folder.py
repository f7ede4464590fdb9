"""Where an export goes, what it replaces, and what of a checkpoint's folder counts."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.huggingface.checkpoint import import_model
from headway.models.huggingface.export import export_model
from headway.models.huggingface.folder import MARKER, published
from support.runs import in_child

SHAPE = {"dim": 32, "layers": 1, "heads": 4, "ffn_dim": 64, "max_sequence_length": 32}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build_model(ModelConfig(**SHAPE), vocab_size=64, seed=1)


def test_weights_trained_further_in_the_folder_are_a_persons_own(model: Decoder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_model(model, out)
    weights = out / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    before = weights.read_bytes()
    with pytest.raises(ConfigError, match="no earlier export wrote") as caught:
        export_model(model, out)
    assert f"{out}: model.safetensors" in str(caught.value) and weights.read_bytes() == before


def test_a_folder_of_an_earlier_version_is_replaced(model: Decoder, tmp_path: Path) -> None:
    """Its list has names alone."""
    out = tmp_path / "out"
    export_model(model, out)
    names = sorted(path.name for path in out.iterdir())
    (out / MARKER).write_text(json.dumps({"files": names}))
    (out / "config.json").write_text("{}")
    export_model(model, out)
    (out / MARKER).write_text("[]")
    with pytest.raises(ConfigError, match="no earlier export wrote"):
        export_model(model, out)


def test_a_mount_point_is_refused_at_once(model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(ConfigError, match="mount point") as caught:
        export_model(model, tmp_path)
    assert f"inside it: {tmp_path / 'export'}" in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["building", "changing places", "removing the former one"])
def test_what_a_killed_export_has_left_goes_with_the_next(model: Decoder, tmp_path: Path, moment: str) -> None:
    out = tmp_path / "out"
    export_model(model, out)
    before = (out / "model.safetensors").read_bytes()

    def killed() -> None:
        with published(out, lambda _: None) as building:
            (building / "model.safetensors").write_bytes(b"new")
            if moment == "building":
                os._exit(9)
            rename = Path.rename

            def once(path: Path, target: Path) -> Path:
                if moment == "changing places" and path == building:
                    os._exit(9)
                return rename(path, target)

            Path.rename = once  # type: ignore[method-assign]
            shutil.rmtree = lambda *_, **__: os._exit(9)  # type: ignore[assignment]

    assert in_child(killed) == 9
    assert len([*tmp_path.iterdir()]) > 1, "it was killed in time"
    with published(out, lambda _: None) as building:
        assert out.is_dir() and ((out / "model.safetensors").read_bytes() == before) == (moment[0] != "r")
        (building / "whole").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/whole"]


def test_others_can_read_the_weights(model: Decoder, tmp_path: Path) -> None:
    """As far as they can read any new file here."""
    out = tmp_path / "out"
    export_model(model, out)
    (tmp_path / "any").touch()
    modes = {file.stat().st_mode for file in (*out.iterdir(), tmp_path / "any")}
    assert len(modes) == 1


@pytest.mark.parametrize("failing", ["new", ".out.before-export"])
def test_a_folder_that_cannot_be_put_in_place_leaves_the_earlier_one(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    out = tmp_path / "out"
    export_model(model, out)
    before, rename, failures = (out / "model.safetensors").read_bytes(), Path.rename, []

    def busy(path: Path, target: Path) -> Any:
        if failing in (path.name, target.name) and not failures:
            failures.append(path)
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(OSError, match="busy"):
        export_model(model, out, dtype="bf16")
    assert failures and (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_export_left_is_not_in_the_way(model: Decoder, tmp_path: Path) -> None:
    (tmp_path / f".out.{os.getpid()}.tmp").mkdir()
    export_model(model, tmp_path / "out")
    mask = os.umask(0o022)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask


def test_a_link_stays_a_link(model: Decoder, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    export_model(model, tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk/config.json").is_file()


def test_the_current_folder_can_be_the_place(model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    export_model(model, Path())
    assert (tmp_path / "out/config.json").is_file()


def test_one_file_of_weights_comes_before_an_index(model: Decoder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_model(build_model(ModelConfig(**SHAPE), vocab_size=64, seed=2), out, max_shard_bytes=10_000)
    assert (out / "model.safetensors.index.json").is_file()
    export_model(model, tmp_path / "single")
    (tmp_path / "single/model.safetensors").rename(out / "model.safetensors")
    _, state = import_model(out)
    assert torch.equal(state["embedding.weight"], model.state_dict()["embedding.weight"])


@pytest.mark.parametrize("kind", ["entries", "list of entries"])
def test_a_special_token_may_be_an_ordinary_entry(model: Decoder, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokens = ["<unk>", "<s>", "</s>", "a"]
    vocab: Any = [[token, -1.0] for token in tokens] if kind != "entries" else {t: i for i, t in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": vocab}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    export_model(model, tmp_path / "out", folder)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, None)
