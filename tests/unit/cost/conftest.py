"""The fixture of `support/csv_files.py`."""

from support.csv_files import default_field_limit

__all__ = ["default_field_limit"]
