"""The fixture of `support_csv.py`."""

from support_csv import default_field_limit

__all__ = ["default_field_limit"]
