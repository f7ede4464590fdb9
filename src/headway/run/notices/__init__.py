"""Notices that this machine will be taken away: one small file per source behind one protocol (`source.Source`)."""

from headway.run.notices.watch import watching, watching_for

__all__ = ["watching", "watching_for"]
