"""RunMachines that differ: what they say of themselves, and what a run that promises equal bits refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway.core.machine.system import Machine
from headway.run.supervisor.machines.differences import compare_machines, describe_machine, name_differences
from headway.run.supervisor.machines.members import Expected, Member, Members
from headway.run.supervisor.machines.messages import Hello, Refused

LEAD = {"torch": "2.13.0", "python": "3.11.2", "processor": "EPYC", "gpus": "NVIDIA H100", "gpu_count": "8"}


def test_a_machine_describes_itself_by_the_drivers_files(tmp_path: Path) -> None:
    for number, model in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA A100", "NVIDIA A100")):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{number:02d}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
    found = describe_machine(Machine(tmp_path))
    assert (found["gpus"], found["gpu_count"]) == ("NVIDIA A100, NVIDIA H100 80GB HBM3", "3")
    assert found["torch"] and found["python"] and found["processor"]
    assert "gpus" not in describe_machine(Machine(tmp_path / "without"))


@pytest.mark.parametrize("name", ["torch", "gpus"])
def test_what_changes_bits_is_refused_unless_nothing_is_promised(name: str) -> None:
    other = {**LEAD, name: "another"}
    found = compare_machines(LEAD, other, "run", "auto")
    assert found.refused is not None and f"another, and the lead {LEAD[name]}" in found.refused
    assert "determinism=off" in found.fix
    found = compare_machines(LEAD, other, "off", "auto")
    assert found.refused is None and len(found.others) == 1


def test_what_costs_only_speed_is_named() -> None:
    other = {**LEAD, "python": "3.12.1", "processor": "Xeon", "gpu_count": "4"}
    found = compare_machines(LEAD, other, "elastic", "auto")
    assert found.refused is None
    assert found.others == (
        "GPUs 4, and the lead 8",
        "the processor Xeon, and the lead EPYC",
        "Python 3.12.1, and the lead 3.11.2",
    )


def test_what_is_alike_unknown_or_unused_is_no_difference() -> None:
    alike = compare_machines(LEAD, LEAD, "run", "auto")
    assert (alike.refused, alike.others) == (None, ())
    for other in ({}, {"torch": ""}):
        assert compare_machines(LEAD, other, "run", "auto") == alike
    assert compare_machines(LEAD, {**LEAD, "gpus": "other", "gpu_count": "1"}, "run", "cpu") == alike


def test_long_descriptions_are_compared_as_far_as_they_are_read() -> None:
    long = {**LEAD, "gpus": "GPU " * 99}
    assert compare_machines(long, long, "run", "auto").refused is None


def test_a_machine_is_refused_or_taken_in_with_its_differences() -> None:
    members = Members(Expected(3, 1, "1", "i", lambda other: compare_machines(LEAD, other, "run", "auto")))
    hello = Hello(1, "p", "b", workers=1, version="1", identity="i")
    refused = members.admit(replace(hello, machine={**LEAD, "torch": "2.11.0"}), 0.0)
    assert isinstance(refused, Refused) and refused.what.startswith(
        "machine 1 (b) has PyTorch 2.11.0, and the lead 2.13"
    )
    taken = members.admit(replace(hello, machine={**LEAD, "python": "3.12.1"}), 0.0)
    assert isinstance(taken, Member) and taken.differs == ("Python 3.12.1, and the lead 3.11.2",)


def test_the_keys_by_which_configs_differ_are_named_and_no_credential_is_shown() -> None:
    lead = {"seed": 3, "model.width": 64, "data.sources": [{"path": "a"}], "password": "kept-to-itself"}
    other = {"seed": 4, "data.sources": [{"path": "b"}, {"path": "c"}], "password": "hidden-as-well"}
    named = name_differences(lead, other)
    assert "seed is 4, and the lead's is 3" in named
    assert "model.width is not set, and the lead's is 64" in named
    assert "data.sources.0.path is b, and the lead's is a; data.sources.1 (c) is new" in named
    assert "password" in named and "kept" not in named and "hidden" not in named
    many = name_differences({}, {f"key.{number}": "x" * 999 for number in range(20)})
    assert many.endswith("; 12 more") and len(many) < 2000
    assert name_differences(lead, lead) == name_differences(lead, {}) == ""
