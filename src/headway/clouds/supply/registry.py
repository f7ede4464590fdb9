"""What a registry of images says about a tag, by the protocol that all registries share (OCI distribution).

It is asked without a login, as for public images; the program `docker` or `skopeo` resolves private ones.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

from headway.core.credentials.http import open_url
from headway.core.errors import ConfigError
from headway.core.files.foreign import parse_json

_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 2**20
_LOOPBACK = ("127.0.0.1", "localhost")
#: The index of all architectures first: its digest serves each of them.
_KINDS = (
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
)  # fmt: skip
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def split_image(name: str) -> tuple[str, str, str]:
    """Return registry, repository and tag of an image's name, as docker completes a short one."""
    path, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        path = name
        tag = "latest"
    first, slash, rest = path.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        first = "docker.io"
        rest = path
    if first == "docker.io" and "/" not in rest:
        rest = f"library/{rest}"
    return first, rest, tag


def resolve_digest(name: str) -> str:
    """Return the digest that a tag names now: `sha256:` and 64 digits.

    Args:
        name: `debian:12-slim`, `ghcr.io/owner/name:1`.

    Raises:
        ConfigError: the registry does not answer, or has no such tag.
    """
    registry, repository, tag = split_image(name)
    host = "registry-1.docker.io" if registry == "docker.io" else registry
    scheme = "http" if host.partition(":")[0] in _LOOPBACK else "https"
    url = f"{scheme}://{host}/v2/{repository}/manifests/{tag}"
    headers = {"Accept": ", ".join(_KINDS)}
    try:
        try:
            digest = _digest_at(url, headers)
        except urllib.error.HTTPError as error:
            if error.code != http.client.UNAUTHORIZED:
                raise
            token = _token(error.headers.get("WWW-Authenticate", ""), f"repository:{repository}:pull", scheme)
            digest = _digest_at(url, {**headers, "Authorization": f"Bearer {token}"})
    except urllib.error.HTTPError as error:
        raise ConfigError(
            f"the registry answers with status {error.code}", where=name, fix="check the name and the tag"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise ConfigError(
            f"the registry {registry} does not answer: {why}",
            where=name,
            fix="run it where there is a network, or write name:tag@sha256:... by hand",
        ) from None
    if not _DIGEST.fullmatch(digest):
        raise ConfigError("the registry names no digest for the tag", where=name, fix="write the digest by hand")
    return digest


def _digest_at(url: str, headers: Mapping[str, str]) -> str:
    request = urllib.request.Request(url, headers=dict(headers), method="HEAD")
    with open_url(request, _TIMEOUT_SECONDS) as response:
        return str(response.headers.get("Docker-Content-Digest", ""))


def _token(challenge: str, scope: str, scheme: str) -> str:
    """Return the token that anybody gets who asks where the challenge says (RFC 6750).

    Raises:
        ValueError: the challenge or the answer is not as documented.
    """
    values = dict(_CHALLENGE.findall(challenge))
    realm = values.get("realm", "")
    if urlsplit(realm).scheme not in ("https", scheme):
        raise ValueError("it names no place that gives tokens")
    query = urlencode({"service": values.get("service", ""), "scope": scope})
    with open_url(urllib.request.Request(f"{realm}?{query}"), _TIMEOUT_SECONDS) as response:
        answer = parse_json(response.read(_MOST_BYTES))
    token = (answer.get("token") or answer.get("access_token")) if isinstance(answer, dict) else None
    if not isinstance(token, str):
        raise ValueError("it gives no token")
    return token
