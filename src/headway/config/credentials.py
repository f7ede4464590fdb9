"""Credentials in a config: it is kept in the run directory and in checkpoints, and shown, so there must be none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headway.core.errors import ConfigError
from headway.core.object_storage import credentials_fix, scheme_of
from headway.core.secrets import credentials_in, looks_random

if TYPE_CHECKING:
    from headway.config.schema import Config

_ALERT = "telemetry.alert"
_ALERT_FIX = (
    "export it, and name the variable, which the shell puts in when it is time: curl -H 'Authorization: Bearer '$TOKEN,"
    " or curl $ALERT_URL; quote the command for your own shell"
)


def credential_problems(config: Config) -> Iterator[ConfigError]:
    """What a redaction would change: refused, since what is kept has to be the config itself."""
    values = config.model_dump(mode="json")
    alert = config.telemetry.alert
    found = dict(credentials_in(values))
    if alert is not None and looks_random(alert):
        found.setdefault(_ALERT, "what looks like a key or token")
    for key, what in found.items():
        yield ConfigError(
            f"{key} has a credential in it: {what}; a config is kept in the run directory and in checkpoints",
            where=key,
            fix=_ALERT_FIX if key == _ALERT else _fix(config, key),
        )


def _fix(config: Config, key: str) -> str:
    url = _url_of(config, key)
    if url is None or scheme_of(url) is None:
        if "options" in key:
            return "take it out; ${NAME} in its place stands for what an environment variable holds"
        return "leave it out, or have the program that needs it read it from the environment"
    return f"take it out; {credentials_fix(url)}"


def _url_of(config: Config, key: str) -> str | None:
    """The URL that a key is about."""
    if key.startswith("data.sources."):
        return config.data.sources[int(key.split(".")[2])].path
    if key.startswith("data.remote"):
        return config.data.remote
    if key.startswith("checkpoint.remote.") and config.checkpoint.remote is not None:
        return config.checkpoint.remote.url
    return None
