"""What the errors of object storage mean, as the libraries of each cloud raise them."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from headway.core.errors import ConfigError
from headway.core.storage import cloud_of, extra_for, filesystem, kind_of


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
        (OSError(errno.EIO, "x"), "unreachable"),
        (OSError(errno.ELOOP, "links that lead around in a circle"), "other"),
        (OSError(errno.ENAMETOOLONG, "x"), "other"),
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


@pytest.mark.parametrize(
    ("url", "cloud", "extra"),
    [
        ("s3a://bucket/x", "aws", "s3"),
        ("GS://bucket/x", "gcp", "gcs"),
        ("adl://container/x", "azure", "azure"),
        ("https://example.org/x", None, "remote"),
        ("file:///x", None, None),
        ("bucket/x", None, None),
    ],
)
def test_a_scheme_has_one_cloud_with_one_package(url: str, cloud: str | None, extra: str | None) -> None:
    assert (cloud_of(url), extra_for(url)) == (cloud, extra)


@pytest.mark.parametrize(
    ("url", "options", "fix"),
    [
        ("s3://AK:se/cret@bucket/a", {}, "AWS_PROFILE"),
        ("s3://bucket/a", {"secret": "se/cret"}, "AWS_PROFILE"),
        ("gs://bucket/a", {"token": "se/cret"}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container/a", {"client_kwargs": {"credential": "se/cret"}}, "AZURE_STORAGE_ACCOUNT_KEY"),
        ("https://h.example/a?sig=se/cret", {}, "${NAME}"),
    ],
)
def test_credentials_are_refused_before_a_place_is_opened(url: str, options: dict[str, object], fix: str) -> None:
    with pytest.raises(ConfigError, match="has a credential in it") as refused:
        filesystem(url, options, "reading")
    assert fix in str(refused.value) and "se/cret" not in str(refused.value)


def test_options_and_web_addresses_may_name_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("A_WORD", "plain1text2")
    options = {"client_kwargs": {"headers": {"Authorization": "Bearer ${A_WORD}"}}}
    files, path = filesystem("https://h.example/a?token=${A_WORD}", options, "reading")
    assert path == "https://h.example/a?token=plain1text2"
    assert files.client_kwargs == {"headers": {"Authorization": "Bearer plain1text2"}}
    assert filesystem("memory://a/${A_WORD}", {}, "reading")[1] == "/a/${A_WORD}", "a name like any other"
    with pytest.raises(ConfigError, match="NOT_THERE} stands for an environment variable that is not set"):
        filesystem("https://h.example/a", {"headers": {"X": "${NOT_THERE}"}}, "reading")


def test_what_gcsfs_logs_of_an_error_is_not_told_twice() -> None:
    """In a process of its own, since pytest looks after all logs."""
    code = """
import logging, headway.core.storage
log = logging.getLogger("gcsfs")
log.warning("kept")
try:
    raise ValueError("told by others")
except ValueError:
    log.exception("not kept")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "kept\n"
