from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.machine.system import Machine
from headway.lab.plan.accelerators import KNOWN, NETWORKS, parse_machines, this_machine


def test_every_accelerator_has_a_peak_under_its_drivers_name() -> None:
    without = [name for name, accelerator in KNOWN.items() if accelerator.peak_flops("fp32") is None]
    assert not without
    # Two that have no bf16: MFU is unknown there, not guessed.
    assert {name for name, accelerator in KNOWN.items() if accelerator.peak_flops("bf16") is None} == {"T4", "V100"}


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [("8xH100", 8, "H100"), ("64 x A100-40GB", 64, "A100-40GB"), ("L4", 1, "L4"), ("2*rtx 4090", 2, "RTX-4090"),
     ("8xH100 SXM5", 8, "H100"), ("16xnvidia h200", 16, "H200"), ("4xA100 80GB", 4, "A100"),
     ("1xNVIDIA H100 80GB HBM3", 1, "H100")],
)  # fmt: skip
def test_machines_as_people_write_them(text: str, count: int, name: str) -> None:
    machines = parse_machines(text)
    assert (machines.count, machines.accelerator.name) == (count, name)
    assert machines.per_node == min(count, 8)


def test_links() -> None:
    one, many = parse_machines("8xH100"), parse_machines("64xH100")
    assert one.network is None and one.network_bytes_per_second() is None
    assert one.link_bytes_per_second() == 450e9
    assert many.nodes == 8 and many.network_bytes_per_second() == 50e9
    assert parse_machines("64xH100", interconnect="ethernet-100").network_bytes_per_second() == 100e9 / 8 / 8
    assert parse_machines("16xL4").network is NETWORKS["ethernet-100"]
    assert parse_machines("16xL4", per_node=4).nodes == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("8xH1000",), "did you mean H100"), (("0xH100",), "not name accelerators"), (("8x",), "not name accelerators"),
     (("12xH100",), "16xH100"), (("8xFoo",), "--memory-gib"), (("64xH100", None, "smoke"), "one of: ndr")],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_nearest_that_can(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_machines(*arguments)  # type: ignore[arg-type]
    assert words in refused.value.render()


def test_an_unknown_accelerator_has_the_memory_it_is_given_and_no_speed() -> None:
    accelerator = parse_machines("8xFoo", memory_gib=48).accelerator
    assert accelerator.memory_gib == 48 and accelerator.peak_flops("bf16") is None and accelerator.watts is None


def test_workers_share_the_memory_of_a_machine_without_accelerators() -> None:
    one, four = this_machine(1, accelerators=False), this_machine(4, accelerators=False)
    assert one.accelerator.device == "cpu" and four.count == four.per_node == 4
    assert one.accelerator.memory_gib is not None and four.accelerator.memory_gib == one.accelerator.memory_gib / 4


def test_workers_share_what_a_container_allows(tmp_path: Path) -> None:
    for name, text in {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\n", "proc/self/cgroup": "0::/job\n",
                       "sys/fs/cgroup/job/memory.max": str(8 * 2**30)}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert this_machine(2, accelerators=False, machine=Machine(tmp_path)).accelerator.memory_gib == 4
    elsewhere = this_machine(1, accelerators=False, machine=Machine(tmp_path / "no-linux"))
    assert elsewhere.accelerator.memory_gib is not None and elsewhere.accelerator.memory_gib > 0
