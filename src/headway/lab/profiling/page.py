"""`profile.html`: the profile on one self-contained page."""

from __future__ import annotations

from html import escape

from headway.core.format import UNKNOWN, counted, format_bytes, format_count
from headway.lab.profiling.charts import memory_chart, roofline_chart, step_chart
from headway.lab.profiling.record import MEANINGS, Profile
from headway.lab.profiling.roofline import ceiling_text, seconds_text
from headway.lab.profiling.tables import (
    OPERATOR_HEADERS,
    memory_rows,
    operator_rows,
    part_headers,
    part_rows,
    product_rows,
    profiler_text,
    spread_text,
    summary_line,
    warnings,
)
from headway.telemetry import html
from headway.telemetry.summary import time_text


def render_page(found: Profile) -> str:
    """Render the page as HTML.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    headers = part_headers(found)
    worker = found.workers[found.slowest]
    losses = [[loss.what, " or ".join(loss.advice)] for loss in found.losses]
    roofline = roofline_chart(worker)
    return html.page(
        f"{found.name} · Headway profile",
        [
            html.heading(f"{found.name}: where a step goes", None, f"{summary_line(found)}."),
            html.tiles(_tiles(found)),
            *(f'<p class="warn">{escape(warning)}.</p>' for warning in warnings(found)),
            html.section("What to change first", html.table(["Loss", "Try"], losses) or f"<p>{found.verdict}.</p>"),
            html.section(
                "The step",
                html.figure(step_chart(found)),
                html.table(headers, part_rows(found), numeric=range(1, len(headers))),
                html.facts((row.part, MEANINGS[row.part]) for row in found.rows),
            ),
            html.section(
                "Memory",
                html.figure(memory_chart(worker.memory)),
                html.table(["Part", "Peak", "Above weights, gradients and moments"], memory_rows(found), (1, 2)),
            ),
            html.section(
                "Roofline of matrix products",
                html.figure(roofline) if roofline is not None else "",
                html.table(["Rows x inner x columns", "Calls", "Time", "FLOPs per byte", "Rate"], product_rows(found),
                           range(1, 5)),
            ),
            html.section("Operators", html.table([h.capitalize() for h in OPERATOR_HEADERS], operator_rows(found),
                                                 range(1, 5))),
            html.section("How it was measured", html.facts(_facts(found))),
            f'<p class="muted">Written {time_text(found.created)} by Headway {found.headway}.</p>',
        ],
    )  # fmt: skip


def _tiles(found: Profile) -> list[tuple[str, str, str]]:
    worker = found.workers[found.slowest]
    largest = max(found.rows, key=lambda row: row.slowest_seconds)
    peak = max(worker.memory.peak_bytes.values(), default=None)
    reached = UNKNOWN if found.reached is None else f"{found.reached:.1%}"
    return [
        (
            "Step",
            seconds_text(found.step_seconds),
            f"mean of {len(worker.steps)} steps ({spread_text(found)}), and a share of a save",
        ),
        ("Tokens per second", format_count(found.tokens_per_second), "of all workers"),
        ("MFU" if found.mfu is not None else "Of the ceiling", reached, ceiling_text(worker)),
        ("Longest part", largest.part, f"{largest.share:.0%} of the step"),
        ("Peak of tensors", format_bytes(peak), f"{format_bytes(worker.memory.base_bytes)} are always in use"),
        *(
            [("Device idle", f"{worker.device_idle_share:.1%}", "of the traced steps")]
            if worker.device_idle_share is not None
            else []
        ),
    ]


def _facts(found: Profile) -> list[tuple[str, str]]:
    worker = found.workers[found.slowest]
    ceilings = worker.ceilings
    facts = [
        ("workers", f"{len(found.workers)} on {worker.device_name}, {counted(worker.threads, 'thread')} each"),
        ("steps", f"{found.warmup_steps} to warm up, {len(worker.steps)} timed, {len(worker.traced_steps)} traced"),
        ("spread", f"a timed step took {spread_text(found)}"),
        ("profiler", f"{profiler_text(found)}; times in tables of parts are without it"),
        ("ceiling", ceiling_text(worker)),
        ("copies in memory", f"{ceilings.copy_bytes_per_second / 1e9:.1f} GB/s read and written"),
        ("feed by itself", f"{seconds_text(worker.feed_seconds)} for one step's batches"),
        ("a save", f"delays training by {seconds_text(worker.checkpoint_stall_seconds)}"
                   if worker.checkpoint_stall_seconds is not None else UNKNOWN),
        ("PyTorch", found.torch),
    ]  # fmt: skip
    if ceilings.all_reduce is not None:
        reduced = ceilings.all_reduce
        facts.insert(6, ("exchange", f"a sum of {format_bytes(reduced.bytes)} takes {seconds_text(reduced.seconds)}"))
    return [*facts, *(("note", note) for note in found.notes)]
