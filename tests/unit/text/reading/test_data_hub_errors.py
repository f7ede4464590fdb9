"""What goes wrong with a dataset from the Hub that a server cannot be made to do; the rest is in
tests/e2e/test_e2e_hub.py."""

from __future__ import annotations

import errno
import gzip
import ssl
import zlib

import pytest

from headway.config.sections.data import SourceConfig
from headway.core.errors import DataError
from headway.text.reading.huggingface_datasets import hub_error

CONFIG = SourceConfig(path="hf://org/name")


def told(outer: Exception, cause: BaseException | None = None, begun: bool = True) -> DataError:
    """The error for `outer`, raised from `cause`."""
    outer.__cause__ = cause
    return hub_error(CONFIG, outer, begun)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_no_failing_hub(code: int) -> None:
    error = told(RuntimeError("An error occurred"), OSError(code, "reason", "/cache/file"))
    assert error.what == "the dataset cannot be put into the local cache: reason"
    assert error.where == "/cache/file" and "HF_HOME" in str(error.fix)


@pytest.mark.parametrize(
    "cause",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        ssl.SSLError(1, "certificate verify failed"),
        TimeoutError("timed out"),
    ],
)
def test_a_failing_connection_is_no_full_disk(cause: Exception) -> None:
    error = told(RuntimeError("An error occurred"), cause)
    assert error.what.startswith("the Hugging Face Hub no longer answers") and str(cause) in error.what
    assert "cannot be reached" in told(RuntimeError(), cause, begun=False).what


def test_the_first_cause_is_told() -> None:
    error = told(RuntimeError("An error occurred while generating the dataset"), ValueError("column 'a' is missing"))
    assert error.what == "the dataset cannot be read: column 'a' is missing" and error.where == "hf://org/name"
    assert "hf://datasets/org/name/**/*.parquet" in str(error.fix)


@pytest.mark.parametrize(
    "cause", [EOFError("ended"), gzip.BadGzipFile("not gzip"), zlib.error("invalid"), OSError("Corrupt snappy data")]
)
def test_a_damaged_file_is_no_failing_hub(cause: Exception) -> None:
    error = told(RuntimeError("An error occurred"), cause)
    assert error.what == f"the dataset cannot be read: {cause}" and "bad_documents" in str(error.fix)


def test_which_subset_of_the_cache_is_meant() -> None:
    error = told(ValueError("There are multiple 'org/name' configurations in the cache: en, de"), begun=False)
    assert "several subsets" in error.what and "en, de" in error.what and error.fix == "set the source's subset"
