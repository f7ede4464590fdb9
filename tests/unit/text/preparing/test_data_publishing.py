"""A finished store takes the place of the one before it: at no moment is there none, and what is not of it stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.core.files.atomic import exchange
from headway.core.process import faults
from headway.data.shards import TOKENS
from headway.data.store import TokenStore
from headway.text.preparing import building
from headway.text.preparing.prepare import prepare

Configs = Callable[..., DataConfig]


@pytest.mark.parametrize(
    ("fault", "exchanges"),
    [
        ("", True),
        ("", False),
        ("crash@data.publish", True),
        ("crash@data.aside", False),
        ("crash@data.published", True),
        ("crash@data.published", False),
    ],
)
def test_what_else_lies_in_the_stores_folder_stays_there(
    tmp_path: Path, config: Configs, twenty_files: Path, monkeypatch: pytest.MonkeyPatch, fault: str, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(building, "exchange", lambda one, other: False)
    prepare(config(twenty_files), workers=1)
    (tmp_path / "store" / "more.txt").write_text("more text")
    (tmp_path / "store" / "report.html").write_text("of the store that is replaced")
    (tmp_path / "store" / "notes").mkdir()
    (tmp_path / "store" / "notes" / "report.html").write_text("mine")
    if fault:
        monkeypatch.setattr(faults, "_passed", Counter())
        monkeypatch.setenv("HEADWAY_FAULTS", fault)
        with pytest.raises(RuntimeError):
            prepare(config(twenty_files, validation=0.2), workers=1)
        monkeypatch.delenv("HEADWAY_FAULTS")
    prepare(config(twenty_files, validation=0.1), workers=1)
    sources = [twenty_files, str(tmp_path / "store" / "*.txt")]
    assert not prepare(config(sources, validation=0.1), workers=1).up_to_date
    assert (tmp_path / "store" / "more.txt").read_text() == "more text"
    assert (tmp_path / "store" / "notes" / "report.html").read_text() == "mine"
    assert not (tmp_path / "store" / "report.html").exists()
    assert prepare(config(sources, validation=0.1), workers=1).up_to_date
    assert not list(tmp_path.glob(".store.*"))


@pytest.fixture
def exchanging(tmp_path: Path) -> None:
    """For what is promised where two folders can be exchanged."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if not exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("folders cannot be exchanged here")


@pytest.mark.usefixtures("exchanging")
def test_the_present_store_never_leaves_its_place(
    tmp_path: Path, config: Configs, twenty_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepare(config(twenty_files), workers=1)
    monkeypatch.setattr(faults, "_passed", Counter())
    monkeypatch.setenv("HEADWAY_FAULTS", "crash@data.aside")
    after = prepare(config(twenty_files, validation=0.2), workers=1)
    assert TokenStore.open(tmp_path / "store").fingerprint == after.fingerprint != before.fingerprint


@pytest.mark.usefixtures("exchanging")
def test_nobody_builds_in_a_store_that_is_being_cleared_away(
    tmp_path: Path, config: Configs, twenty_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it was replaced, the old store's folder has the name of one that is being built in."""
    prepare(config(twenty_files), workers=1)
    remove, refused = building._remove_replaced, []

    def look(old: Path, store: Path) -> None:
        if old.exists():
            with pytest.raises(DataError, match="another process is preparing"), building.building(store):
                pass
            refused.append(old.name)
        remove(old, store)

    monkeypatch.setattr(building, "_remove_replaced", look)
    prepare(config(twenty_files, validation=0.2), workers=1)
    assert refused == [".store.preparing"] and not list(tmp_path.glob(".store.*"))


def test_what_a_kill_left_half_written_is_nobodys(tmp_path: Path, config: Configs, twenty_files: Path) -> None:
    prepare(config(twenty_files), workers=1)
    (tmp_path / ".store.preparing").mkdir()
    (tmp_path / ".store.preparing" / ".manifest.json.123.tmp").write_text("{")
    assert prepare(config(twenty_files), workers=1).up_to_date
    assert not list((tmp_path / "store").glob(".manifest*")) and not list(tmp_path.glob(".store.*"))


def _stop_in_rmtree(path: Path, **_: object) -> None:
    """As a kill in the middle: files of a folder go before the folders in it."""
    for file in [each for each in path.iterdir() if each.is_file()]:
        file.unlink()
    raise KeyboardInterrupt


@pytest.mark.usefixtures("exchanging")
@pytest.mark.parametrize("when", ["exchanged", "being removed"])
@pytest.mark.parametrize("how", ["repair", "force"])
def test_what_was_replaced_is_no_work_to_go_on_from(
    tmp_path: Path, config: Configs, twenty_files: Path, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    """Damage that `--repair` and `--force` have mended would come back otherwise."""
    prepare(config(twenty_files), workers=1)
    (tmp_path / "store" / "train").rename(tmp_path / "disk")
    (tmp_path / "store" / "train").symlink_to(tmp_path / "disk")  # as who has no room for all of it may do
    shard = tmp_path / "store" / "train" / next(tmp_path.glob(f"disk/*/*{TOKENS}")).relative_to(tmp_path / "disk")
    good = shard.read_bytes()
    shard.write_bytes(bytes(len(good)))
    with monkeypatch.context() as patch:
        if when == "exchanged":
            patch.setattr(faults, "_passed", Counter())
            patch.setenv("HEADWAY_FAULTS", "crash@data.published")
        else:
            patch.setattr(building.shutil, "rmtree", _stop_in_rmtree)
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            prepare(config(twenty_files), workers=1, force=how == "force", repair=how == "repair")
    assert shard.read_bytes() == good and (tmp_path / ".store.preparing").exists()
    (tmp_path / "more.txt").write_text("more text")
    prepare(config([twenty_files, tmp_path / "more.txt"]), workers=1, force=how == "force")
    assert TokenStore.open(tmp_path / "store").verify() == [] and not list(tmp_path.glob(".store.*"))
    assert not (tmp_path / "store" / building._MARK).exists()


@pytest.mark.usefixtures("exchanging")
def test_what_was_replaced_and_cannot_be_removed_is_named(
    tmp_path: Path, config: Configs, twenty_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config(twenty_files), workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(building.shutil, "rmtree", lambda path, **_: None)
        prepare(config(twenty_files, validation=0.2), workers=1)
        with pytest.raises(DataError, match="was replaced cannot be removed") as caught:
            prepare(config(twenty_files, validation=0.1), workers=1)
    assert caught.value.where == str(tmp_path / ".store.preparing")
    prepare(config(twenty_files, validation=0.1), workers=1)
    assert not list(tmp_path.glob(".store.*"))
