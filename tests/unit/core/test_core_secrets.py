"""What is redacted, and what is left alone: both matter, for what is kept has to be true as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.core.credentials import secrets
from headway.core.credentials.secrets import (
    credential_in,
    credentials_in,
    expand,
    looks_random,
    redact,
    redact_argument,
    redact_arguments,
    redact_values,
)

HIDDEN = [
    ("https://user:pa55@host.example/a", "https://***@host.example/a"),
    ("https://user:p@ss@host.example/a", "https://***@host.example/a"),
    ("https://ghtoken@host.example/a", "https://***@host.example/a"),
    ("postgresql://u:pw@db/x", "postgresql://***@db/x"),
    ("s3://AKIA1:se/cr+et@bucket/a", "s3://***@bucket/a"),
    ("https://h.example/a?token=abc&download=true", "https://h.example/a?token=***&download=true"),
    ("GET /a?access_token=abc HTTP/1.1", "GET /a?access_token=*** HTTP/1.1"),
    (
        "https://b.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F2026&X-Amz-Expires=60"
        "&X-Amz-Signature=0123&X-Amz-Security-Token=FQo",
        "https://b.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=***&X-Amz-Expires=60"
        "&X-Amz-Signature=***&X-Amz-Security-Token=***",
    ),
    ("https://a.blob.core.windows.net/c?sv=2024&sig=a%2Bb%3D&se=2026", "https://a.blob.core.windows.net/c?sv=2024&sig=***&se=2026"),
    ("https://h.example/a#x&amp;token=abc", "https://h.example/a#x&amp;token=***"),
    ("> Authorization: Bearer abc", "> Authorization: ***"),
    ("{'Authorization': 'Basic dTpw', 'Accept': 'text'}", "{'Authorization': '***', 'Accept': 'text'}"),
    ("Authorization: Custom abc def", "Authorization: ***"),
    ("Authorization: AWS4-HMAC-SHA256 Credential=AK/1, Signature=ab", "Authorization: ***"),
    ('curl -H "PRIVATE-TOKEN: abc" h', 'curl -H "PRIVATE-TOKEN: ***" h'),
    ('{"password": "a\\"b", "x": 1}', '{"password": "***", "x": 1}'),
    ("x-api-key: abc", "x-api-key: ***"),
    ("Cookie: a=b; c=d\nnext", "Cookie: ***\nnext"),
    ("sent Bearer abcdefgh12 twice", "sent Bearer *** twice"),
    ("sent Basic dXNlcjpwYXNz once", "sent Basic *** once"),
    ("AWS_SECRET_ACCESS_KEY=a/b+c", "AWS_SECRET_ACCESS_KEY=***"),
    ('{"aws_secret_access_key": "abc", "x": 1}', '{"aws_secret_access_key": "***", "x": 1}'),
    ('{"token": "abcdef12"}', '{"token": "***"}'),
    ('password="abc def', 'password="***'),
    ("&quot;password&quot;: &quot;abc&quot;", "&quot;password&quot;: &quot;***&quot;"),
    ("AccountName=x;AccountKey=abc==;EndpointSuffix=core", "AccountName=x;AccountKey=***;EndpointSuffix=core"),
    ("tool --db-password abc --max-tokens 5", "tool --db-password *** --max-tokens 5"),
    ("curl -u me:abc https://h.example", "curl -u me:*** https://h.example"),
    ("curl https://hooks.slack.com/services/T0/B0/x", "curl https://hooks.slack.com/services/***"),
    ("https://discord.com/api/webhooks/12/ab-c", "https://discord.com/api/webhooks/***"),
    ("key ghp_abcdefghijklmnopqrst0123 and hf_abcdefghijklmnopqr", "key *** and ***"),
    ("AKIAABCDEFGHIJKLMNOP", "***"),
    ("-----BEGIN EC PRIVATE KEY-----\nMC4C\n-----END EC PRIVATE KEY-----\nx",
     "-----BEGIN EC PRIVATE KEY----- *** -----END EC PRIVATE KEY-----\nx"),
]  # fmt: skip

LEFT = [
    "step 10 of 100: loss 3.2, 12.3k tokens/s, eta 3 min",
    "https://h.example:8080/a@b?download=true&id=abcdefgh1234567890",
    "abfs://container@account.dfs.core.windows.net/a",
    "hf://datasets/owner/name@main/a.parquet",
    "git@host.example:owner/name.git, ssh://git@host.example/x",
    "s3://bucket/a/b?versionId=3HL4kqtJvjVBH40Nrjfkd",
    "https://h.example/a?key=folder/file.jsonl",
    "curl -H 'Authorization: Bearer $TOKEN' -u me:$PASS https://h.example?token=${TOKEN}",
    "curl -H 'Authorization: Bearer '$(cat token) $ALERT_URL",
    "https://me:${PASSWORD}@h.example",
    'eos_token=</s> "bos_token": "<s>" "pad_token": "<|endoftext|>"',
    "data.tokenizer.path=/a/b train.tokens=1B model.tokenizer",
    "set HF_TOKEN to a token that may read it; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)",
    "storage_options: {token: anon}, HEADWAY_SIGNING_KEY_FILE=/run/keys/signing",
    "the bearer of bad news; basic training of a tokenizer; unexpected token at 12345678",
    "state 3b5d5c3712955042212316173ccf37be800000000000000000000000000000ff",
    "Authorization: Bearer <token>",
    "PWD=/root/somewhere",
]


@pytest.mark.parametrize(("text", "expected"), HIDDEN)
def test_credentials_are_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(expected) == expected, "a second time changes nothing"
    assert credential_in(text) and not credential_in(expected)


@pytest.mark.parametrize("text", LEFT)
def test_everything_else_is_left(text: str) -> None:
    assert redact(text) == text and credential_in(text) is None


def test_what_this_process_knows_is_hidden_wherever_it_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a-file.json"
    file.touch()
    given = {
        "MY_SECRET": "s3cret/value+",
        "SOME_TOKEN": "postgres",  # a plain word
        "SHORT_KEY": "a1",
        "GOOGLE_APPLICATION_CREDENTIALS": str(file),
        "SSH_AUTH_SOCK": "/tmp/ssh-AbC123/agent.1",
        "DEPLOY_KEY": "-----BEGIN X PRIVATE KEY-----\nMC4CAQAw\n-----END X PRIVATE KEY-----",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert redact("a s3cret/value+ b s3cret%2Fvalue%2B c") == "a *** b *** c"
    monkeypatch.setenv("OTHER_SECRET", 'a"b&c\\d1')
    for spelling in ('a"b&c\\d1', 'a\\"b&c\\\\d1', "a&quot;b&amp;c\\d1"):
        assert redact(f"x {spelling} y") == "x *** y", "as JSON and HTML have it"
    assert redact("the line MC4CAQAw alone") == "the line *** alone"
    assert credential_in("a s3cret/value+ b") == "the value of MY_SECRET"
    for text in ("postgres, a1", str(file), given["SSH_AUTH_SOCK"]):
        assert redact(text) == text


def test_a_tree_by_its_names() -> None:
    tree: dict[str, Any] = {
        "path": "https://me:abc@h.example",
        "password": 1234,
        "eos_token": "</s>",
        "signature": {"key": "k", "value": "v"},
        "key": "step",
        "storage_options": {
            "key": "abc",
            "anon": True,
            "token": "anon",
            "endpoint_url": "http://h.example",
            "client_kwargs": {"auth": ["me", "abc"], "headers": {"X-Any": "abc", "Accept": "text"}},
            "secret": "${SECRET}",
            "account_key": None,
        },
    }
    assert redact_values(tree) == {
        **tree,
        "path": "https://***@h.example",
        "password": "***",
        "storage_options": {
            **tree["storage_options"],
            "key": "***",
            "client_kwargs": {"auth": ["***", "***"], "headers": {"X-Any": "***", "Accept": "text"}},
        },
    }
    assert [key for key, _ in credentials_in({"weights": {"https://me:abc@h.example": 1}})] == ["weights"]
    assert [key for key, _ in credentials_in(tree)] == [
        "path",
        "password",
        "storage_options.key",
        "storage_options.client_kwargs.auth",
        "storage_options.client_kwargs.headers.X-Any",
    ]
    assert redact_values(redact_values(tree)) == redact_values(tree)


def test_command_lines() -> None:
    for given, expected in (
        ("data.remote_options.key=abc", "data.remote_options.key=***"),
        ("data.remote_options={key: abc, anon: true}", "data.remote_options={key: '***', anon: true}"),
        ("data.remote_options={key: [", "data.remote_options=***"),
        ("data.remote_options={anon: true}", "data.remote_options={anon: true}"),
        (
            "data.sources=[{path: a, storage_options: {headers: {X-A: b}}}]",
            "data.sources=[{path: a, storage_options: {headers: {X-A: '***'}}}]",
        ),
        ("data.remote_options.headers.X-A=b", "data.remote_options.headers.X-A=***"),
        ("data.remote_options.headers.Accept=b", "data.remote_options.headers.Accept=b"),
        ("data.remote_options.token=${TOKEN}", "data.remote_options.token=${TOKEN}"),
        ("telemetry.alert=page 0123456789abcdef0123", "telemetry.alert=page ***"),
        ("train.steps=50", "train.steps=50"),
        ("data.sources=https://h.example/a?token=abc", "data.sources=https://h.example/a?token=***"),
    ):
        assert redact_argument(given) == expected
    words = ["x.py", "--api-token", "abc", "--tokens", "5", "--password=abc", "password=abc", "--quiet", "token"]
    shown = ["x.py", "--api-token", "***", "--tokens", "5", "--password=***", "password=***", "--quiet", "token"]
    assert redact_arguments(words) == shown


def test_what_is_put_in_from_the_environment_is_hidden_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN_NAME", "plainlyvisible")
    assert redact("plainlyvisible") == "plainlyvisible"
    given = {"headers": {"Authorization": "Bearer ${PLAIN_NAME}"}, "list": ["${PLAIN_NAME}", 1], "other": "$PLAIN_NAME"}
    assert expand(given, KeyError) == {
        "headers": {"Authorization": "Bearer plainlyvisible"},
        "list": ["plainlyvisible", 1],
        "other": "$PLAIN_NAME",
    }
    assert redact("403 for plainlyvisible") == "403 for ***"
    monkeypatch.setattr(secrets, "_remembered", {})
    with pytest.raises(KeyError, match="NOT_SET"):
        expand("${NOT_SET}", KeyError)


def test_words_that_nobody_chooses() -> None:
    for text in ("page 0123456789abcdef0123", "https://ping.example/01234567-89ab-cdef-0123-456789abcdef"):
        assert looks_random(text)
    for text in ("curl -s -d @- https://alerts.example/headway", "/opt/send-headway-alerts-to-the-channel-2 now"):
        assert not looks_random(text)


def test_a_long_text_is_no_trap() -> None:
    """No pattern goes back and forth over it: this would take hours otherwise."""
    for part in ("a", "https://", "token", "-", "x:@", "=", "'", "a.", "eyJ", "--", "Bearer ", "token='", "s3://a:"):
        done = redact(part * 100_000)
        assert len(done) <= len(part) * 100_000


def test_the_filter_ends_with_the_command_whose_words_it_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER_WORD", "plain1text")
    filter_ = [sys.executable, "-I", "-S", str(Path(secrets.__file__)), "PAGER_WORD", "HOME"]

    def passed(text: str) -> str:
        return subprocess.run(filter_, input=text, capture_output=True, text=True, check=True, timeout=60).stdout

    assert passed(f"a\n\nplain1text\n\n{secrets.END_MARK}3\nmore") == (
        "a\n\n***\ntelemetry.alert ended with exit code 3\n"
    )
    assert passed(f"no end of line\n{secrets.END_MARK}0\n") == "no end of line\n"
    assert passed(f"\n{secrets.END_MARK}0\n") == "" and passed("cut off") == "cut off"
