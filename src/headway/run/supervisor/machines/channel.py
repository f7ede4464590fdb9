"""Lines between two machines over TCP, for processes that know the same secret.

Both sides prove that they know the secret without sending it (HMAC-SHA256 over each other's random numbers), and every
later line carries a code that depends on its direction and its number. So lines cannot be forged, repeated, left out or
reordered. They are not encrypted. What foreign processes send is bounded in size, and only ever closes the connection.

    lead  -> node   {"headway": 1, "nonce": N}
    lead  <- node   {"nonce": M, "proof": HMAC(secret, "node" N M)}
    lead  -> node   {"proof": HMAC(secret, "lead" N M)}       or {"refused": true}
    both            <code> <message>
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any

from headway.core.files.foreign import parse_json

#: Longest line before and after the proof. A config with thousands of sources has some hundred kilobytes.
_GREETING_BYTES = 1024
LINE_BYTES = 4 * 2**20
#: Most bytes that wait to be sent: the other side does not read.
_UNSENT_BYTES = 4 * LINE_BYTES
_CODE_CHARACTERS = 32
_VERSION = 1


class ChannelError(Exception):
    """The other side broke the rules of the channel, so the connection is closed."""


class WrongSecret(ChannelError):
    """The two sides do not have the same secret."""


class Channel:
    """One side of a connection, as a pure function of the bytes that arrive.

    Args:
        secret: The shared secret.
        is_lead: Whether this side accepts connections.
        nonce: A random number of this side, in hexadecimal.
    """

    def __init__(self, secret: bytes, *, is_lead: bool, nonce: str | None = None) -> None:
        self._secret, self._is_lead, self._nonce = secret, is_lead, nonce or secrets.token_hex(32)
        self._received, self.unsent = bytearray(), bytearray()
        self._nonces: tuple[str, str] | None = None
        self._keys: tuple[bytes, bytes] | None = None
        self._sent_lines = self._received_lines = 0
        self.is_open = False
        """Whether the other side has proven that it knows the secret."""
        if is_lead:
            self._greet({"headway": _VERSION, "nonce": self._nonce})

    def send(self, text: bytes) -> None:
        """Add a line to what is to be sent.

        Raises:
            ChannelError: the other side does not read, or the line is too long.
        """
        assert self._keys is not None and self.is_open, "the other side is known"
        self._sent_lines += 1
        code = _code(self._keys[0], self._sent_lines, text)
        if len(text) + _CODE_CHARACTERS + 2 > LINE_BYTES or len(self.unsent) > _UNSENT_BYTES:
            raise ChannelError("too much is waiting to be sent")
        self.unsent += code + b" " + text + b"\n"

    def receive(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete with these bytes.

        Raises:
            ChannelError: they come from a process that does not know the secret, or are not what this side expects.
        """
        self._received += data
        lines: list[bytes] = []
        while True:
            most = LINE_BYTES if self.is_open else _GREETING_BYTES
            end = self._received.find(b"\n")
            if max(end, len(self._received) if end < 0 else 0) > most:
                raise ChannelError("a line is too long")
            if end < 0:
                return lines
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            if self.is_open:
                lines.append(self._open(line))
            else:
                self._prove(_parse(line))

    def _greet(self, content: dict[str, Any]) -> None:
        self.unsent += json.dumps(content).encode() + b"\n"

    def _prove(self, greeting: dict[str, Any]) -> None:
        """Take a step of the greeting."""
        if self._is_lead:
            other = _text(greeting, "nonce")
            if not self._is_proof(greeting, "node", self._nonce, other):
                self._greet({"refused": True})
                raise WrongSecret("the other side does not know the secret")
            self._greet({"proof": self._proof("lead", self._nonce, other)})
            self._agree(self._nonce, other)
        elif self._nonces is None:
            if greeting.get("headway") != _VERSION:
                raise ChannelError("another version of the channel")
            other = _text(greeting, "nonce")
            self._greet({"nonce": self._nonce, "proof": self._proof("node", other, self._nonce)})
            self._nonces = other, self._nonce
        elif greeting.get("refused") is True or not self._is_proof(greeting, "lead", *self._nonces):
            raise WrongSecret("the other side does not know the secret")
        else:
            self._agree(*self._nonces)

    def _agree(self, lead: str, node: str) -> None:
        self._keys = self._derive(lead, node)
        self.is_open = True

    def _derive(self, lead: str, node: str) -> tuple[bytes, bytes]:
        """Return the keys for what this side sends, and for what it receives."""
        to_node, to_lead = (bytes.fromhex(self._proof(name, lead, node)) for name in ("to node", "to lead"))
        return (to_node, to_lead) if self._is_lead else (to_lead, to_node)

    def _proof(self, name: str, lead: str, node: str) -> str:
        return hmac.new(self._secret, f"headway {name} {lead} {node}".encode(), "sha256").hexdigest()

    def _is_proof(self, greeting: dict[str, Any], name: str, lead: str, node: str) -> bool:
        given = greeting.get("proof")
        return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, self._proof(name, lead, node))

    def _open(self, line: bytes) -> bytes:
        assert self._keys is not None, "the other side is known"
        code, _, text = line.partition(b" ")
        self._received_lines += 1
        if not hmac.compare_digest(code, _code(self._keys[1], self._received_lines, text)):
            raise ChannelError("a line was changed on its way")
        return text


def _code(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.new(key, b"%d " % number + text, "sha256").hexdigest()[:_CODE_CHARACTERS].encode()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise ChannelError("a line is no JSON") from error
    if not isinstance(found, dict):
        raise ChannelError("a line is no JSON object")
    return found


def _text(message: dict[str, Any], key: str) -> str:
    value = message.get(key)
    # JSON can spell half a character (a lone surrogate), which has no bytes that could be part of a proof.
    if not isinstance(value, str) or len(value) > 256 or not value.isascii():
        raise ChannelError(f"a line has no {key}")
    return value
