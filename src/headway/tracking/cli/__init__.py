"""Verbs that show runs, follow them and send them to trackers."""
