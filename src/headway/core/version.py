"""Headway's version, outside the package's `__init__`: modules that record it would import that in a circle."""

__version__ = "0.1.0"
