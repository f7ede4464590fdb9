"""A check that a config holds no credentials, since it is kept in the run directory and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from headway.config.schema import Config
from headway.core.credentials.secrets import credentials_in, looks_random
from headway.core.errors import ConfigError
from headway.core.storage import credentials_fix, scheme_of

_ALERT = "telemetry.alert"
_ALERT_FIX = (
    "export it and write the variable's name, which the shell expands when the command runs:"
    " curl -H 'Authorization: Bearer '$TOKEN, or curl $ALERT_URL"
)


def credential_problems(config: Config) -> Iterator[ConfigError]:
    """Yield a problem for each value that redaction would change: the stored config must equal the given one."""
    values = config.model_dump(mode="json")
    alert = config.telemetry.alert
    found = dict(credentials_in(values))
    if alert is not None and looks_random(alert):
        found.setdefault(_ALERT, "a word that looks like a key or token")
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
            return "remove it; ${NAME} in its place stands for the value of an environment variable"
        return "remove it, and let the program read it from an environment variable"
    return f"remove it; {credentials_fix(url)}"


def _url_of(config: Config, key: str) -> str | None:
    """Return the URL that a key belongs to."""
    if key.startswith("data.sources."):
        return config.data.sources[int(key.split(".")[2])].path
    if key.startswith("data.remote"):
        return config.data.remote
    if key.startswith("checkpoint.remote.") and config.checkpoint.remote is not None:
        return config.checkpoint.remote.url
    return None
