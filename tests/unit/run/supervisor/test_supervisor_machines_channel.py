"""The channel between machines: only who knows the secret is heard, and nothing that arrives does harm."""

from __future__ import annotations

import hashlib
import hmac
import json
import random

import pytest

from headway.run.supervisor.machines.channel import LINE_BYTES, Channel, ChannelError, WrongSecret

SECRET = b"a secret of sixteen bytes or more"


def greeted(lead_secret: bytes = SECRET, node_secret: bytes = SECRET) -> tuple[Channel, Channel]:
    lead, node = Channel(lead_secret, is_lead=True), Channel(node_secret, is_lead=False)
    for _ in range(3):
        carry(lead, node)
        carry(node, lead)
    return lead, node


def carry(sender: Channel, receiver: Channel) -> list[bytes]:
    data = bytes(sender.unsent)
    sender.unsent.clear()
    return receiver.receive(data)


def test_both_sides_speak_once_both_have_proven_that_they_know_the_secret() -> None:
    lead, node = greeted()
    assert lead.is_open and node.is_open
    node.send(b"hello")
    node.send(b"readings 1 2")
    lead.send(b"begin")
    assert carry(node, lead) == [b"hello", b"readings 1 2"]
    assert carry(lead, node) == [b"begin"]


def test_the_secret_is_never_sent_and_proofs_are_hmacs_of_both_random_numbers() -> None:
    lead, node = Channel(SECRET, is_lead=True, nonce="aa"), Channel(SECRET, is_lead=False, nonce="bb")
    carry(lead, node)
    said = bytes(node.unsent)
    assert SECRET not in said
    wanted = hmac.new(SECRET, b"headway node aa bb", hashlib.sha256).hexdigest()
    assert json.loads(said) == {"nonce": "bb", "proof": wanted}


def test_who_has_another_secret_is_refused_and_hears_it() -> None:
    lead, node = Channel(SECRET, is_lead=True), Channel(b"another secret of some length", is_lead=False)
    carry(lead, node)
    with pytest.raises(WrongSecret):
        carry(node, lead)
    with pytest.raises(WrongSecret):
        carry(lead, node)
    assert not lead.is_open and not node.is_open


def test_a_lead_that_does_not_know_the_secret_is_not_believed() -> None:
    """It could have a machine run any config."""
    false, node = Channel(b"x" * 32, is_lead=True), Channel(SECRET, is_lead=False)
    carry(false, node)
    node.unsent.clear()
    with pytest.raises(WrongSecret):
        node.receive(json.dumps({"proof": "00" * 32}).encode() + b"\n")


def test_a_proof_sent_back_to_its_sender_proves_nothing() -> None:
    """Who has no secret may connect twice and have one side answer the other."""
    lead, other = Channel(SECRET, is_lead=True), Channel(SECRET, is_lead=True)
    nonce = json.loads(bytes(other.unsent))["nonce"]
    with pytest.raises(WrongSecret):
        lead.receive(json.dumps({"nonce": nonce, "proof": "00" * 32}).encode() + b"\n")
    node = Channel(SECRET, is_lead=False)
    carry(Channel(SECRET, is_lead=True), node)
    proof = json.loads(bytes(node.unsent))["proof"]
    with pytest.raises(WrongSecret):
        node.receive(json.dumps({"proof": proof}).encode() + b"\n")


@pytest.mark.parametrize("how", ["changed", "repeated", "left out", "swapped", "sent back"])
def test_a_line_that_was_tampered_with_ends_the_connection(how: str) -> None:
    lead, node = greeted()
    node.send(b"signal 15")
    node.send(b"signal 10")
    first, second = bytes(node.unsent).splitlines(keepends=True)
    lead.send(b"alive")
    back = bytes(lead.unsent)
    received = {
        "changed": first.replace(b"15", b"99"),
        "repeated": first + first,
        "left out": second,
        "swapped": second + first,
        "sent back": back,
    }[how]
    with pytest.raises(ChannelError):
        lead.receive(received)


def test_recorded_lines_mean_nothing_on_another_connection() -> None:
    (_, node), (other, _) = greeted(), greeted()
    node.send(b"hello")
    with pytest.raises(ChannelError):
        carry(node, other)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_line_without_end_does_not_fill_the_memory(is_open: bool) -> None:
    lead, _ = greeted() if is_open else (Channel(SECRET, is_lead=True), None)
    most = LINE_BYTES if is_open else 1024
    with pytest.raises(ChannelError, match="too long"):
        for _ in range(most // 65536 + 2):
            lead.receive(b"x" * 65536)
    assert len(lead._received) <= most + 65536


def test_who_does_not_read_is_given_up() -> None:
    lead, _ = greeted()
    with pytest.raises(ChannelError, match="too much"):
        for _ in range(30):
            lead.send(b"x" * 2**20)


def test_foreign_bytes_only_ever_end_the_connection() -> None:
    source = random.Random(7)
    pieces = [
        b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"{}\n", b"[]\n", b'{"nonce": 3}\n', b"null\n", b"\n",
        b'{"nonce": "x", "proof": null}\n', b'{"nonce": "x", "proof": "\xff"}\n', b"[" * 900 + b"\n",
        b"9" * 900 + b"\n",
    ]  # fmt: skip
    for number in range(200):
        is_lead, data = number % 2 == 0, source.choice(pieces) + source.randbytes(source.randrange(64))
        channel = Channel(SECRET, is_lead=is_lead)
        try:
            assert channel.receive(data) == []
        except ChannelError:
            continue
        assert not channel.is_open


@pytest.mark.parametrize("greeting", [rb'{"nonce": "\ud800", "proof": "00"}', rb'{"nonce": "00", "proof": "\ud800"}'])
def test_half_a_character_ends_the_connection_and_not_the_lead(greeting: bytes) -> None:
    with pytest.raises(ChannelError):
        Channel(SECRET, is_lead=True).receive(greeting + b"\n")
    with pytest.raises(ChannelError):
        Channel(SECRET, is_lead=False).receive(rb'{"headway": 1, "nonce": "\ud800"}' + b"\n")


def test_random_numbers_differ() -> None:
    assert len({bytes(Channel(SECRET, is_lead=True).unsent) for _ in range(20)}) == 20
