"""What machines see of the lead's disk, and what a run refuses that needs more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headway.checkpoint.save.fence import Fenced
from headway.config import Config, load_config
from headway.core.coordination.owner import Owner
from headway.core.errors import ConfigError
from headway.run.directory.run_directory import Attempt
from headway.run.supervisor.machines import shared_disk
from headway.run.supervisor.machines.messages import FileSeen, LookForFile
from headway.run.supervisor.machines.node import _make
from headway.run.supervisor.machines.shared_disk import check_answers, look_for_file, marker_file

SEES = FileSeen("", file=True, data=True)


@pytest.fixture
def config(tiny: Callable[..., Path]) -> Config:
    return load_config(tiny())


@pytest.fixture
def with_tier(tiny: Callable[..., Path], tmp_path: Path) -> Config:
    return load_config(tiny(checkpoint={"remote": {"url": f"file://{tmp_path}"}}))


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_disk, "_LOOK_SECONDS", 0.0)


def test_a_machine_says_what_it_sees(with_tier: Config, tmp_path: Path) -> None:
    store = with_tier.data.store
    with marker_file(with_tier) as path:
        message = LookForFile(path, str(store))
        assert look_for_file(message, with_tier, lambda: False) == FileSeen(path, file=True, data=True)
        elsewhere = replace(message, store=str(tmp_path / "none"))
        assert not look_for_file(elsewhere, with_tier, lambda: False).data
        data = with_tier.data.model_copy(update={"remote": "s3://somewhere/store"})
        remote = with_tier.model_copy(update={"data": data})
        assert look_for_file(elsewhere, remote, lambda: False).data, "it is read from there"
    assert not look_for_file(message, with_tier, lambda: False).file
    assert not list(with_tier.runs.iterdir())


def test_machines_with_disks_of_their_own_need_a_remote_tier(config: Config, with_tier: Config) -> None:
    assert check_answers(config, {"machine 1 (b)": SEES}) is False
    apart = {"machine 1 (b)": SEES, "machine 2 (c)": replace(SEES, file=False)}
    assert check_answers(with_tier, apart) is True
    with pytest.raises(ConfigError, match=r"machine 2 \(c\) does not see .* no remote tier") as caught:
        check_answers(config, apart)
    assert "runs=..." in str(caught.value.fix) and "checkpoint.remote.url" in str(caught.value.fix)


def test_copies_in_memory_and_missing_data_are_refused(with_tier: Config) -> None:
    apart = {"machine 1 (b)": replace(SEES, file=False)}
    checkpoint = with_tier.checkpoint.model_copy(update={"memory_every": 1})
    with pytest.raises(ConfigError, match="copies in host memory"):
        check_answers(with_tier.model_copy(update={"checkpoint": checkpoint}), apart)
    lacking = {"machine 1 (b)": replace(SEES, data=False), "machine 2 (c)": replace(SEES, data=False)}
    with pytest.raises(ConfigError, match=r"machine 1 \(b\), machine 2 \(c\) do not have the token store") as caught:
        check_answers(with_tier, lacking)
    assert "data.remote" in str(caught.value.fix) and caught.value.where == str(with_tier.data.store.absolute())


def test_a_machines_own_folder_fences_earlier_attempts(config: Config) -> None:
    first = _make(config, Owner(4, "one", "head", 1, 0.0))
    assert (first.directory / "config.yaml").exists()
    first.assert_current()
    second = _make(config, Owner(5, "two", "head", 1, 0.0))
    second.assert_current()
    assert Attempt.join(config.run_directory, 5, "two").number == 5
    with pytest.raises(Fenced, match="attempt 4 no longer owns this run"):
        first.assert_current()
