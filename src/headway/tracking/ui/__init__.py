"""`headway ui`: a local page on the runs of a folder. Only `tracking/cli/ui.py` comes in, through `serve`."""

from __future__ import annotations

from headway.tracking.ui.server import serve

__all__ = ["serve"]
