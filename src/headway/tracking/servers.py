"""Servers of trackers before the first step: addresses from the environment, and whether they take the credentials.

A server that does not answer is a warning: it costs no step, and gets everything later.
"""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Collection

from headway.core.console import warning
from headway.core.credentials.http import open_url
from headway.core.credentials.secrets import credential_in, redact
from headway.core.errors import ConfigError

#: How long a server may take for the question whether it takes the credentials.
_ASK_SECONDS = 3.0


def address_from(
    variable: str, server: str, *, problem: Callable[[str], str | None], credentials: str, example: str
) -> str | None:
    """Return the address in a variable of the environment; None if it is not set.

    Args:
        variable: Its name.
        server: What is at the address, for people: "the MLflow server".
        problem: Describes what is wrong with an address.
        credentials: Which variables credentials go to.
        example: An address.

    Raises:
        ConfigError: it is no address, or has a credential in it.
    """
    address = os.environ.get(variable)
    if not address:
        return None
    if (what := credential_in(address)) is not None:
        raise ConfigError(
            f"the address of {server} has a credential in it: {what}",
            where=variable,
            fix=f"remove it, and export {credentials}",
        )
    if (found := problem(address)) is not None:
        raise ConfigError(found, where=variable, fix=f"export {variable}={example}")
    return address


def ask_server(
    request: urllib.request.Request,
    server: str,
    *,
    credentials: str,
    address: str,
    refusals: Collection[int] = (401, 403),
    tls: ssl.SSLContext | None = None,
) -> None:
    """Ask a server whether it takes the credentials; warn if it does not answer.

    Args:
        request: A request that changes nothing.
        server: Its name: "MLflow server".
        credentials: Which variables credentials go to.
        address: Where its address stands.
        refusals: The status codes by which it refuses credentials.
        tls: How to check its certificate; None as usual.

    Raises:
        ConfigError: it refuses them, or is another kind of server.
    """
    url = redact(f"{request.type}://{request.host}")
    try:
        with open_url(request, _ASK_SECONDS, tls):
            return
    except urllib.error.HTTPError as error:
        if error.code in refusals:
            raise ConfigError(
                f"the {server} refuses access ({error.code})", where=url, fix=f"export {credentials}"
            ) from None
        if error.code in (404, 405):
            raise ConfigError(
                f"this is no {server}: it answers {error.code}", where=url, fix=f"correct the address: {address}"
            ) from None
        why = f"it answers {error.code}"
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", error))
    warning(f"the {server} at {url} does not answer now ({why}); it gets everything when it does")
