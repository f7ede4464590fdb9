"""Where a process belongs, from what starts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.config import Config, load_config
from headway.core.coordination.launched import machines_from_environment
from headway.core.errors import ConfigError
from headway.run.supervisor.machines.machine_role import find_role, parse_address

SECRET = {"HEADWAY_SECRET": "0123456789abcdef"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,node-2",
    "SLURM_PROCID": "1",
}


@pytest.fixture
def config(tiny: Callable[..., Path]) -> Config:
    return load_config(tiny(parallel={"machines": 2}))


@pytest.mark.parametrize(
    ("environment", "number", "host", "port"),
    [
        ({"HEADWAY_NODE": "1", "HEADWAY_LEAD": "head:7000"}, 1, "head", 7000),
        ({"HEADWAY_NODE": "0", "HEADWAY_LEAD": "[fd00::1]:7000"}, 0, "fd00::1", 7000),
        ({"HEADWAY_NODE": "1", "HEADWAY_LEAD": "head"}, 1, "head", 29450),
        ({"JOB_COMPLETION_INDEX": "1", "HEADWAY_LEAD": "job-0.job:7000"}, 1, "job-0.job", 7000),
        ({"NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}, 1, "head", 29500),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "23456"}, 1, "head", 23456),
        ({"HEADWAY_NODE": "0", "RANK": "1", "HEADWAY_LEAD": "head", "MASTER_ADDR": "other"}, 0, "head", 29450),
    ],
)
def test_a_place_is_found(config: Config, environment: dict[str, str], number: int, host: str, port: int) -> None:
    variables = {**SECRET, **environment}
    role = find_role(config, variables)
    assert role is not None and (role.number, role.host, role.port) == (number, host, port)
    left = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & variables.keys()
    assert not left, "this process would take itself for a worker"


def test_variables_that_number_machines_are_no_number_of_workers(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="6 workers"):
        load_config(tiny(parallel={"machines": 2, "workers": 3, "pipeline": 2, "tensor": 2}))


def test_one_machine_and_a_worker_of_torchrun_have_no_place(config: Config, tiny: Callable[..., Path]) -> None:
    alone = load_config(tiny())
    assert find_role(alone, {"HEADWAY_NODE": "1"}) is None
    worker = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head"}
    assert find_role(config, worker) is None and "RANK" in worker


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HEADWAY_LEAD": "head", **SECRET}, "no number"),
        ({"HEADWAY_NODE": "2", "HEADWAY_LEAD": "head", **SECRET}, "'2' is no number of a machine"),
        ({"HEADWAY_NODE": "1", **SECRET}, "address of the lead"),
        ({"HEADWAY_NODE": "1", "HEADWAY_LEAD": "head:0", **SECRET}, "is no address"),
        ({"HEADWAY_NODE": "1", "HEADWAY_LEAD": "head:99999", **SECRET}, "is no address"),
        ({"HEADWAY_NODE": "1", "HEADWAY_LEAD": "head"}, "common secret"),
        ({"HEADWAY_NODE": "1", "HEADWAY_LEAD": "head", "HEADWAY_SECRET": "short"}, "could be guessed"),
        ({"HEADWAY_NODE": "1", "HEADWAY_LEAD": "head", "HEADWAY_SECRET_FILE": "/nowhere/secret"}, "cannot be read"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_started(
    config: Config, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        find_role(config, dict(environment))


def test_a_secret_that_others_can_read_is_refused(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    variables = {"HEADWAY_NODE": "1", "HEADWAY_LEAD": "head", "HEADWAY_SECRET_FILE": str(file)}
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read"):
        find_role(config, dict(variables))
    file.chmod(0o600)
    role = find_role(config, dict(variables))
    assert role is not None and role.secret == b"0123456789abcdef"


def test_only_a_step_of_slurm_with_several_tasks_is_several_machines() -> None:
    assert machines_from_environment(STEP) == "2"
    assert machines_from_environment({**STEP, "HEADWAY_MACHINES": "1:2"}) == "1:2"
    assert machines_from_environment({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert machines_from_environment({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}) is None
    assert machines_from_environment({**STEP, "LOCAL_RANK": "0"}) is None, "torchrun within a step"
    assert machines_from_environment({}) is None


def test_the_tasks_of_a_step_agree_on_a_lead_and_a_secret_that_other_steps_do_not_have(config: Config) -> None:
    first, second = (find_role(config, {**STEP, "SLURM_PROCID": task}) for task in "01")
    other = find_role(config, {**STEP, "SLURM_JOB_ID": "8"})
    assert first is not None and second is not None and other is not None
    assert (first.number, second.number) == (0, 1)
    assert not first.is_restarted, "a task that has ended is not started again"
    assert first.listen is None
    numbered = find_role(config, {**STEP, "HEADWAY_NODE": "1", "HEADWAY_SECRET": "x" * 16})
    assert numbered is not None and numbered.is_restarted, "it may be, by who numbers machines"
    pod = {"JOB_COMPLETION_INDEX": "0", "HEADWAY_LEAD": "job-0.job", "HEADWAY_SECRET": "x" * 16}
    leads = find_role(config, {**pod, "HEADWAY_LISTEN": "10.0.0.7"})
    assert leads is not None and (leads.listen, leads.is_restarted) == ("10.0.0.7", True)
    assert (first.host, first.port, first.secret) == (second.host, second.port, second.secret)
    assert first.secret != other.secret and len(first.secret) == 32
    file = config.run_directory.parent / ".headway-secret"
    assert file.stat().st_mode & 0o777 == 0o600 and list(file.parent.iterdir()) == [file]


def test_machines_of_a_gang_agree_on_a_port_and_a_secret_and_none_is_started_again_alone(config: Config) -> None:
    gang = {"HEADWAY_GANG": "17.0", "HEADWAY_LEAD": "10.0.0.7"}
    first, second = (find_role(config, {**gang, "HEADWAY_NODE": number}) for number in "01")
    again = find_role(config, {**gang, "HEADWAY_GANG": "17.1", "HEADWAY_NODE": "0"})
    assert first is not None and second is not None and again is not None
    assert (first.host, first.port, first.secret) == (second.host, second.port, second.secret)
    assert first.port != again.port and first.secret != again.secret, "a try meets no machine of another one"
    assert first.port in range(20_000, 30_000) and not first.is_restarted and not second.is_restarted
    chosen = find_role(config, {**gang, "HEADWAY_NODE": "1", "HEADWAY_LEAD": "head:7000", **SECRET})
    assert chosen is not None and (chosen.port, chosen.secret) == (7000, SECRET["HEADWAY_SECRET"].encode())


def test_an_empty_file_is_no_secret_of_a_step(config: Config) -> None:
    file = config.run_directory.parent / ".headway-secret"
    file.parent.mkdir(exist_ok=True)
    file.touch(0o600)
    with pytest.raises(ConfigError, match="could be guessed"):
        find_role(config, {**STEP, "SLURM_PROCID": "1"})


@pytest.mark.parametrize("nodes", ["localhost[01-04,7]", "localhost[01-04],m2"])
def test_the_first_node_of_a_list_leads(config: Config, nodes: str) -> None:
    variables = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": nodes, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}
    role = find_role(config, variables)
    assert role is not None and role.host in ("localhost01", "10.0.0.9"), "the second where no such name is known"


def test_addresses_are_parsed() -> None:
    assert parse_address(" node-0:29450 ") == ("node-0", 29450)
    for text in ("", "a b", "a:b", "fd00::1", "[fd00::1", "a:70000"):
        with pytest.raises(ConfigError):
            parse_address(text)
