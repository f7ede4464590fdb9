"""The `fsspec` file system of each scheme: its package and credentials, and the meaning of its errors."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

from headway.core.credentials.secrets import credential_in, credentials_in, expand
from headway.core.errors import ConfigError, missing_extra

#: What an error of a store means.
Kind = Literal["missing", "credentials", "unreachable", "other"]
Cloud = Literal["aws", "gcp", "azure"]

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
WEB = ("http", "https")
#: The cloud of each scheme of a bucket, which knows its package, credentials, rights and rules.
CLOUDS: Mapping[str, Cloud] = {
    **dict.fromkeys(("s3", "s3a"), "aws"),
    **dict.fromkeys(("gs", "gcs"), "gcp"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "azure"),
}
#: Package and extra of a cloud, or of another scheme.
_PACKAGES = {
    "aws": ("s3fs", "s3"),
    "gcp": ("gcsfs", "gcs"),
    "azure": ("adlfs", "azure"),
    **dict.fromkeys(WEB, ("aiohttp", "remote")),
    "hf": ("huggingface_hub", "datasets"),
}
_CREDENTIALS = {
    "aws": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), and see that the clock is right here; for"
    " a public bucket storage_options: {anon: true}",
    "gcp": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`; for a public bucket "
    "storage_options: {token: anon}",
    "azure": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_CONNECTION_STRING)",
    "hf": "check the name, and set HF_TOKEN to a token that may read it; for a gated dataset access is asked for on its"
    " page",
}
_WEB_CREDENTIALS = (
    "set a header from an environment variable, in the options: {headers: {Authorization: Bearer ${NAME}}}; or write"
    " ${NAME} in the URL in its place"
)
_MISSING = {"hf": "check the dataset's name, revision and path; a private one needs HF_TOKEN"}
# By name, since the packages that define them need not be there.
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"}
_RETRIED = {"EndpointConnectionError", "OfflineModeIsEnabled"}
#: Errors of a path itself, which stay however long one waits: links in a circle, a name that is too long.
_LASTING = (errno.ELOOP, errno.ENAMETOOLONG)
_NETWORK = ("aiohttp", "botocore", "urllib3", "requests", "httpx", "httpx2", "azure", "google", "gcsfs")

# gcsfs logs a failed request with a traceback, which Python prints when logging is not configured. The error is raised
# as well, and the caller reports it. Warnings of gcsfs stay.
logging.getLogger("gcsfs").addFilter(lambda record: not record.exc_info)


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL, `s3` for `s3://bucket/key`; None when the path is not a URL."""
    match = _SCHEME.match(path)
    return match[1].lower() if match else None


def cloud_of(url: str) -> Cloud | None:
    """Return the cloud whose bucket a URL is in; None for any other place."""
    return CLOUDS.get(str(scheme_of(url)))


def filesystem(url: str, options: Mapping[str, Any], purpose: str) -> tuple[Any, str]:
    """Return the `fsspec` file system for a URL, and the path on it.

    `${NAME}` in options, and in the URL of a web server, stands for the value of an environment variable. It is
    expanded here and nowhere else, so that no config, manifest or record holds the value.

    Raises:
        ConfigError: the scheme is unknown or needs a package that is not installed (the error names the `purpose`); the
            URL or the options contain a credential; or a variable is not set.
    """
    check_credentials(url, options)
    options = expand(options, partial(_not_set, url))
    path = expand(url, partial(_not_set, url)) if scheme_of(url) in WEB else url
    with _explained(url, purpose):
        import fsspec

        return fsspec.url_to_fs(path, **options)  # type: ignore[no-any-return]


def check_filesystem(url: str, purpose: str) -> None:
    """Check that the package is installed that reads and writes a URL; nothing is connected to.

    Raises:
        ConfigError: it is not, or the scheme is unknown.
    """
    with _explained(url, purpose):
        import fsspec

        fsspec.get_filesystem_class(scheme_of(url))


@contextmanager
def _explained(url: str, purpose: str) -> Iterator[None]:
    """Turn a missing package or an unknown scheme into an error with a fix."""
    try:
        yield
    except ImportError as error:
        scheme = str(scheme_of(url))
        package, extra = _PACKAGES.get(cloud_of(url) or scheme, (f"fsspec's {scheme}", "remote"))
        if error.name == "fsspec":
            package = "fsspec"
            extra = "remote"
        raise missing_extra(package, extra, f"{purpose} {url}") from None
    except ValueError as error:
        raise ConfigError(
            f"this URL cannot be used: {error}", where=url, fix="s3://, gs://, az:// and https:// are what most need"
        ) from None


def extra_for(url: str) -> str | None:
    """Return the extra that has the package for a URL's scheme; None for a local path."""
    scheme = scheme_of(url)
    if scheme in (None, "file", "local"):
        return None
    return _PACKAGES.get(cloud_of(url) or str(scheme), ("", "remote"))[1]


def check_credentials(url: str, options: Mapping[str, Any]) -> None:
    """Check that neither a URL nor its options contain a credential: both are recorded and shown.

    Raises:
        ConfigError: one of them does.
    """
    found = [("the URL", what) for what in filter(None, [credential_in(url)])]
    found += [(key.removeprefix("options."), what) for key, what in credentials_in({"options": dict(options)})]
    for place, what in found:
        raise ConfigError(f"{place} has a credential in it: {what}", where=url, fix=credentials_fix(url))


def _not_set(url: str, name: str) -> ConfigError:
    fix = f"export {name}=... before the command"
    return ConfigError(f"${{{name}}} stands for an environment variable that is not set", where=url, fix=fix)


def load_filesystem(url: str) -> None:
    """Import the file system of a URL ahead of its use, which takes half a second for most; errors surface later."""
    with suppress(Exception):
        import fsspec

        fsspec.get_filesystem_class(scheme_of(url))


def credentials_fix(url: str) -> str:
    """Return the fix for a store that denies access."""
    scheme = str(scheme_of(url))
    if scheme in WEB:
        return _WEB_CREDENTIALS
    return _CREDENTIALS.get(cloud_of(url) or scheme, "check the credentials, and what they allow")


def missing_fix(url: str) -> str:
    """Return the fix for a URL at which nothing exists."""
    return _MISSING.get(str(scheme_of(url)), "check the URL, and the bucket's name")


def kind_of(error: BaseException) -> tuple[Kind, str]:
    """Classify an error: a missing file, denied access, an unreachable server, or another; with its text."""
    cause = error.__cause__
    status = status_of(error)
    if isinstance(error, FileNotFoundError) and cause is not None and _library(cause) == "aiohttp":
        # For web servers, `fsspec` reports every file as missing when there is no answer.
        return kind_of(cause)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "missing", str(error)
    if isinstance(error, PermissionError) or status in (401, 403) or type(error).__name__ in _NO_CREDENTIALS:
        return "credentials", in_words(error)
    passing = isinstance(error, OSError | EOFError) or _library(error) in _NETWORK
    if isinstance(error, OSError) and error.errno in _LASTING:
        passing = False
    if status is not None and status < 500 and status not in (408, 429):
        passing = False
    return ("unreachable" if passing else "other"), in_words(error)


def in_words(error: BaseException) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, by the attribute names that libraries use for it."""
    if isinstance(error, OSError) and str(error).startswith("Forbidden: "):  # gcsfs
        return 403
    # Hugging Face's errors carry the answer itself.
    places = (error, getattr(error, "response", None))
    found = (getattr(place, name, None) for place in places for name in ("status", "status_code", "code"))
    return next((status for status in found if isinstance(status, int)), None)


def has_retried(error: BaseException) -> bool:
    """Return whether the library has already retried for seconds, or a retry at once cannot help."""
    return type(error).__name__ in _RETRIED


def _library(error: BaseException) -> str:
    return type(error).__module__.split(".")[0]
