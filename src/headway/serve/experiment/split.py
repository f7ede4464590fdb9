"""Which arm answers whom, and identifiers of requests that say so by themselves."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from headway.core.errors import ConfigError

_ARM = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_NAME = re.compile(r"(?:chat)?cmpl-([0-9a-f]{12})([01])([0-9a-f]{32})([0-9a-f]{32})")


@dataclass(frozen=True)
class Split:
    """Two aliases, and the share of users that the first one answers."""

    arms: tuple[str, str]
    share: float

    @property
    def shares(self) -> tuple[float, float]:
        """The share of users of each arm."""
        return self.share, 1 - self.share

    @classmethod
    def parse(cls, text: str) -> Split:
        """Parse `prod=90,candidate=10`.

        Raises:
            ConfigError: it has another form.
        """
        parts = [part.partition("=") for part in text.split(",")]
        weights = [float(weight) for _, _, weight in parts if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", weight)]
        arms = [arm for arm, _, _ in parts]
        if len(parts) != 2 or len(weights) != 2 or min(weights) <= 0 or len(set(arms)) != 2:
            raise _no_split(text)
        if not all(_ARM.fullmatch(arm) for arm in arms):
            raise _no_split(text)
        return cls((arms[0], arms[1]), weights[0] / sum(weights))

    def arm_of(self, model: str, user: str | None) -> int:
        """Return the arm that answers a user, always the same one; a request without a user gets either by chance."""
        if user is None:
            return int(secrets.SystemRandom().random() >= self.share)
        digest = hashlib.blake2b(f"{model}:{user}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int(int.from_bytes(digest) / 2**64 >= self.share)


def _no_split(text: str) -> ConfigError:
    return ConfigError(
        f"'{text}' does not divide requests between two aliases",
        where="--split",
        fix="for example --split prod=90,candidate=10",
    )


@dataclass(frozen=True)
class AskedBy:
    """What the identifier of a request says."""

    time: float
    arm: int
    unit: str
    """Stands for the user; another one for each request without a user."""


class Names:
    """Makes identifiers of requests, and recognizes them later: nothing is kept for a request without an outcome.

    Args:
        key: Secret of the experiment, 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def make(self, time: float, arm: int, user: str | None) -> str:
        """Return the identifier of a request."""
        unit = secrets.token_hex(8) if user is None else self._digest(b"user:" + user.encode("utf-8", "surrogatepass"))
        payload = f"{int(time * 1000):012x}{arm}{unit[:16]}{secrets.token_hex(8)}"
        return f"cmpl-{payload}{self._digest(payload.encode())}"

    def read(self, name: str) -> AskedBy | None:
        """Return what an identifier says; None if this experiment has not made it."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        time, arm, rest, proof = found.groups()
        if not hmac.compare_digest(proof, self._digest(f"{time}{arm}{rest}".encode())):
            return None
        return AskedBy(int(time, 16) / 1000, int(arm), rest[:16])

    def _digest(self, content: bytes) -> str:
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()[:32]
