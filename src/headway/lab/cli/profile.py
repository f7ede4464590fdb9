"""`headway profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.config.arguments import ConfigArgument, OverridesArgument, load
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import print_line, print_lines
from headway.core.errors import ConfigError
from headway.core.format import counted, format_bytes
from headway.data.epochs import in_steps
from headway.lab.profiling.plan import TRACED_STEPS, Plan
from headway.lab.profiling.record import Profile
from headway.lab.profiling.roofline import ceiling_text, seconds_text
from headway.lab.profiling.tables import (
    OPERATOR_HEADERS,
    operator_rows,
    part_headers,
    part_rows,
    profiler_text,
    spread_text,
    summary_line,
    warnings,
)

HELP = """Show where the time of a training step goes, and what to change first.

Trains the first steps of the config with its own workers, in a temporary run directory: some steps to warm up, some \
timed, some under PyTorch's profiler. Prints seconds and shares of data, forward, backward, reduction, optimizer, host \
and checkpoint. Compares them with the best that this machine can do (matrix products and copies, measured here, or \
the accelerator's peak), and names the largest loss. Writes profile.json, profile.html (with memory over time and a \
roofline) and a trace per worker for ui.perfetto.dev.

[bold]Examples[/bold]

headway profile quickstart
headway profile quickstart train.compile=true --steps 30 --output compiled
headway profile quickstart parallel.workers=2 --json

Exit codes: 0 profiled, 2 usage or config, 3 data, 130 Ctrl-C.
"""


def profile(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    steps: Annotated[int, typer.Option(min=2, help="Steps to time without the profiler.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them, which are not timed.")] = 3,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("profile"),
    memory_snapshot: Annotated[
        bool,
        typer.Option(
            "--memory-snapshot",
            help="On GPUs, also write memory-<rank>.pickle for pytorch.org/memory_viz (never open foreign pickles).",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print what would run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run `headway profile`."""
    from headway.lab.profiling.run import check, run_profile

    if dry_run and as_json:
        raise ConfigError("a dry run has no result in JSON", where="--dry-run, --json", fix="leave one of them out")
    loaded = in_steps(load(config, overrides))
    plan = Plan(warmup, steps, min(TRACED_STEPS, steps), memory_snapshot)
    if dry_run:
        from headway.run.session.preview import preview

        check(loaded, plan)
        print_lines(preview(loaded))
        print_line(f"profile    {warmup} steps to warm up, {steps} timed, {plan.traced} traced, 1 with a save")
        print_line(f"files      in {output}/")
        return
    found = run_profile(loaded, plan, output)
    if as_json:
        more = {"verdict": found.verdict, "spread": found.spread.model_dump(mode="json"), "warnings": warnings(found)}
        print_json({**found.model_dump(mode="json"), **more})
    else:
        _print_profile(found, output)


def _print_profile(found: Profile, output: Path) -> None:
    slowest = found.slowest_worker
    print_line(summary_line(found))
    print_line()
    print_table(part_headers(found), part_rows(found), numeric=range(1, len(part_headers(found))))
    print_line()
    steps = counted(len(slowest.steps), "step")
    print_line(f"steps      {spread_text(found)}; the table is the mean of {steps} without the profiler")
    print_line(f"ceiling    {ceiling_text(slowest)}; copies {slowest.ceilings.copy_bytes_per_second / 1e9:.1f} GB/s")
    reduced = slowest.ceilings.all_reduce
    if reduced is not None:
        print_line(
            f"exchange   a sum of {format_bytes(reduced.bytes)} over all workers takes {seconds_text(reduced.seconds)}"
        )
    if slowest.device_idle_share is not None:
        print_line(f"device     idle for {slowest.device_idle_share:.1%} of the traced steps")
    peak = max(slowest.memory.peak_bytes.values(), default=None)
    base = format_bytes(slowest.memory.base_bytes)
    print_line(f"memory     {format_bytes(peak)} of tensors at most, {base} of them weights, gradients and moments")
    if len(found.workers) > 1:
        print_line(f"slowest    worker {found.slowest}: the others wait for it")
    print_line(f"profiler   {profiler_text(found)}")
    print_line()
    print_table(OPERATOR_HEADERS, operator_rows(found)[:10], numeric=range(1, len(OPERATOR_HEADERS)))
    print_line()
    for warning in warnings(found):
        print_line(f"warning: {warning}")
        print_line()
    print_line(f"largest loss: {found.verdict}")
    for loss in found.losses[1:]:
        print_line(f"        then: {loss.what}")
    print_line()
    print_line(f"{counted(len(found.workers), 'trace')}, profile.json and profile.html are in {output}/")
