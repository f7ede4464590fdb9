"""Clock synchronisation, which times in records, certificates and leases depend on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headway.core.machine.system import Machine
from headway.lab.doctor.findings import Finding

#: Clocks of a run's machines should differ by less than this.
_SKEW_SECONDS = 1.0

_FIX = ("let a time service keep it", "sudo timedatectl set-ntp true   (or install chrony)")


def examine_clock(machine: Machine) -> Iterator[Finding]:
    """Examine the clock through chrony, then systemd, then the mark of systemd-timesyncd."""
    mark = "/run/systemd/timesync/synchronized"
    found = _chrony(machine) or _systemd(machine)
    if found is None and machine.exists(mark):
        found = Finding("ok", "the clock is synchronised (systemd-timesyncd)", mark)
    unknown = "whether the clock is synchronised is unknown: no chrony and no systemd to ask"
    yield found or Finding("note", f"{unknown} (a container has its host's clock)", "chronyc, timedatectl")


def _chrony(machine: Machine) -> Finding | None:
    output = machine.run(("chronyc", "-n", "tracking"))
    if output.state != "ok":
        return None
    where = "chronyc tracking"
    leap = re.search(r"Leap status\s*:\s*(.+)", output.text)
    offset = re.search(r"System time\s*:\s*([\d.]+) seconds", output.text)
    if leap is None or leap[1].strip() == "Not synchronised":
        return Finding("warning", "the clock is not synchronised", where, *_FIX)
    if offset and float(offset[1]) > _SKEW_SECONDS:
        what = f"the clock is {float(offset[1]):.1f} s off"
        return Finding("warning", what, where, "let chrony set it at once", "sudo chronyc makestep")
    by = f", {float(offset[1]) * 1000:.3f} ms off" if offset else ""
    return Finding("ok", f"the clock is synchronised (chrony{by})", where)


def _systemd(machine: Machine) -> Finding | None:
    output = machine.run(("timedatectl", "show", "--property=NTPSynchronized", "--value"))
    if output.state != "ok" or output.text.strip() not in ("yes", "no"):
        return None
    if output.text.strip() == "yes":
        return Finding("ok", "the clock is synchronised", "timedatectl")
    return Finding("warning", "the clock is not synchronised", "timedatectl", *_FIX)
