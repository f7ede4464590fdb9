"""Headway's version, apart from the package itself: what records it would close a circle by importing the door."""

__version__ = "0.1.0"
