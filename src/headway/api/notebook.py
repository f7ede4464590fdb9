"""Progress of training in a notebook: one table that updates, read from the run directory as `headway top` reads it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from headway.core.console import TABLE_VARIABLE

#: Seconds between updates.
_UPDATE_SECONDS = 1.0
#: Evaluations that are shown, the newest ones.
_EVALUATIONS = 12
_HEADS = ("step", "training loss", "validation loss", "speed", "time", "left", "cost")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@contextmanager
def live_table(run: Path) -> Iterator[None]:
    """Show the progress of a run in place of the lines of its steps, for the length of a block in a notebook.

    Elsewhere do nothing.
    """
    if not in_notebook():
        yield
        return
    from IPython.display import HTML, display

    table = _Table(run)
    shown = display(HTML(table.render()), display_id=True)
    over = threading.Event()

    def follow() -> None:
        while not over.wait(_UPDATE_SECONDS):
            shown.update(HTML(table.render()))

    thread = threading.Thread(target=follow, name="headway-table", daemon=True)
    os.environ[TABLE_VARIABLE] = "1"  # workers are other processes
    thread.start()
    try:
        yield
    finally:
        del os.environ[TABLE_VARIABLE]
        over.set()
        thread.join()
        shown.update(HTML(table.render()))


class _Table:
    def __init__(self, run: Path) -> None:
        from headway.tracking.live_run import LiveRun
        from headway.tracking.ui.histories import Histories

        self._run, self._live, self._histories = run, LiveRun(run), Histories()
        self._began = time.time()

    def render(self) -> str:
        """Return the table as HTML: a row for each evaluation, and one for the newest step."""
        from headway.telemetry.summary import loss_text
        from headway.tracking.live_table import row

        now = time.time()
        snapshot = self._live.refresh(now)
        if (snapshot.updated or 0.0) < self._began:  # what is there is of an earlier attempt
            return f"<p><b>{escape(snapshot.name)}</b>: starting</p>"
        cells = row(snapshot, now)
        with self._histories.read(self._run) as metrics:
            steps, losses = metrics.series("evaluation/loss")
            trained = dict(zip(*(part.tolist() for part in metrics.series("train/loss")), strict=True))
        evaluated = dict(zip(steps.tolist(), losses.tolist(), strict=True))
        lines: list[tuple[str, ...]] = [
            (f"{step:,}", loss_text(trained.get(step)), loss_text(loss), "", "", "", "")
            for step, loss in list(evaluated.items())[-_EVALUATIONS:]
        ]
        newest = loss_text(evaluated.get(metrics.last_step))
        texts = ("step", "loss", "validation", "speed", "time", "eta", "spent")
        cells["validation"] = newest
        lines.append(tuple(cells[name] for name in texts))
        share = snapshot.values.get("step", 0.0) / (snapshot.values.get("run/total_steps") or 1.0)
        bar = f'<progress value="{min(share, 1.0):.4f}" style="width:16em;vertical-align:middle"></progress>'
        alerts = f"<p>{escape(cells['alerts'])}</p>" if cells["alerts"] else ""
        body = "".join(f"<tr>{_cells('td', line)}</tr>" for line in lines)
        head = f"<p><b>{escape(snapshot.name)}</b>: {escape(snapshot.state)} {bar}</p>"
        return f"<div>{head}<table><tr>{_cells('th', _HEADS)}</tr>{body}</table>{alerts}</div>"


def _cells(tag: str, texts: Any) -> str:
    return "".join(f"<{tag} style='text-align:right'>{escape(text)}</{tag}>" for text in texts)
