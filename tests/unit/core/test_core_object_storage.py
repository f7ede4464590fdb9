"""What the errors of object storage mean, as the libraries of each cloud raise them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headway.core.object_storage import kind_of


def error_of(library: str, name: str, **facts: object) -> Exception:
    error: Exception = type(name, (Exception,), {"__module__": f"{library}.errors"})("said")
    vars(error).update(facts)
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), "missing"),
        (PermissionError("x"), "credentials"),
        (ConnectionResetError("x"), "unreachable"),
        (error_of("azure", "HttpResponseError", status_code=403), "credentials"),
        (error_of("azure", "ResourceNotFoundError", status_code=404), "missing"),
        (error_of("azure", "HttpResponseError", status_code=503), "unreachable"),
        (error_of("azure", "ServiceRequestError", status_code=None), "unreachable"),
        (OSError("Forbidden: https://storage.googleapis.com/x\nNo."), "credentials"),
        (error_of("gcsfs", "HttpError", code=401), "credentials"),
        (error_of("gcsfs", "HttpError", code=503), "unreachable"),
        (error_of("gcsfs", "HttpError", code=400), "other"),
        (error_of("aiohttp", "ClientResponseError", status=429), "unreachable"),
        (error_of("aiohttp", "ClientResponseError", status=416), "other"),
        (ValueError("x"), "other"),
    ],
)
def test_kinds(error: Exception, kind: str) -> None:
    assert kind_of(error)[0] == kind


def test_what_gcsfs_logs_of_an_error_is_not_told_twice() -> None:
    """In a process of its own, since pytest looks after all logs."""
    code = """
import logging, headway.core.object_storage
log = logging.getLogger("gcsfs")
log.warning("kept")
try:
    raise ValueError("told by others")
except ValueError:
    log.exception("not kept")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "kept\n"
