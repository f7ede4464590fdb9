"""Redaction: replaces credentials by `***` in everything that is kept, printed or sent.

A credential is recognised by its place (before the @ of a URL, in a query, behind `password=`), by its shape
(`ghp_...`, a private key in PEM), by its name in a mapping, or because an environment variable or a key file holds
that value.

A config that redaction would change is refused (`headway.config.checks.contradictions`), so a run directory holds the
config itself and no credentials. This module imports nothing from Headway: errors pass through it, and
`python secrets.py` runs it as a filter (`core.alerts`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

HIDDEN = "***"
#: The filter stops at a line that begins with this; the exit code of the filtered command follows.
END_MARK = "\x1fheadway-alert-ended "

#: A name that contains one of these words names a credential, ...
_WORDS = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "passcode", "pwd", "credential",
    "credentials", "apikey", "authorization", "cookie", "cookies", "jwt", "bearer", "secretkey", "accesskey",
    "accountkey", "privatekey", "signingkey", "sharedaccesssignature", "sharedaccesskey", "connectionstring",
    "sastoken", "accesstoken", "authtoken", "sessiontoken",
}  # fmt: skip
#: ... and so does one that contains one of these pairs, ...
_PAIRS = {
    ("api", "key"), ("access", "key"), ("account", "key"), ("auth", "key"), ("client", "key"), ("deploy", "key"),
    ("encryption", "key"), ("ingest", "key"), ("integration", "key"), ("license", "key"), ("master", "key"),
    ("private", "key"), ("routing", "key"), ("secret", "key"), ("service", "key"), ("shared", "key"),
    ("signing", "key"), ("storage", "key"), ("access", "signature"), ("connection", "string"), ("access", "token"),
    ("api", "token"), ("auth", "token"), ("bot", "token"), ("deploy", "token"), ("id", "token"), ("job", "token"),
    ("personal", "token"), ("private", "token"), ("refresh", "token"), ("sas", "token"), ("security", "token"),
    ("service", "token"), ("session", "token"), ("user", "token"), ("vault", "token"),
}  # fmt: skip
#: ... unless its last word says that the value is a fact about the credential.
_ABOUT = {
    "file", "files", "path", "dir", "directory", "folder", "uri", "url", "endpoint", "name", "names", "ref", "type",
    "count", "length", "policy", "provider", "seconds", "expiry", "expires", "algorithm", "sock", "host", "helper",
}  # fmt: skip
#: In options, queries and environment variables, a name that ends with one of these words names a credential too.
_LAST_WORDS = {"key", "token", "auth", "sig", "signature", "pass", "pw", "pat", "sas", "psk", "dsn"}
#: Words before "token" in names of a vocabulary's special tokens, and in prose.
_OF_A_VOCABULARY = {
    "bos", "eos", "unk", "pad", "sep", "cls", "mask", "begin", "end", "start", "stop", "first", "last", "next", "per",
    "special", "added", "prefix", "suffix", "image", "text", "unknown", "padding", "fim", "unexpected", "each", "a",
    "the", "one", "of",
}  # fmt: skip
#: Query parameters that name a credential only when their value is long.
_IN_QUERIES = {"code", "session", "sid", "ticket", "sign", "key", "auth", "pass", "pw", "pat"}
_SIGNED_QUERIES = {"googleaccessid", "keypairid", "policy", "xamzcredential", "xgoogcredential", "awsaccesskeyid"}
#: Headers whose values are no credentials; any other header might authenticate.
_HEADERS = {
    "accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-type", "host",
    "if-modified-since", "if-none-match", "origin", "range", "referer", "user-agent",
}  # fmt: skip
#: Names of mappings that are passed to a library end with one of these.
_OPTIONS = ("options", "headers", "client_kwargs", "config_kwargs")
#: Values that some stores take in place of a credential.
_PLAIN = {"", "none", "null", "true", "false", "anon", "anonymous", "cloud", "google_default", "browser", "cache"}

#: Environment variables that an alert may name and that hold no secret.
_PUBLIC = {"HOME", "HOSTNAME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER"}

#: Credentials that this process has read (key files, `${NAME}` in options), each with its name.
_remembered: dict[str, str] = {}


def redact(text: str) -> str:
    """Replace the credentials in a text; everything else stays as it is."""
    return _redacted(text, _known())


def redact_values(value: Any) -> Any:
    """Replace the credentials in a tree of mappings and lists, judging each value by its name too."""
    return _tree(value, _known(), options=False)


def redact_argument(text: str) -> str:
    """Replace the credentials in one word of a command line, such as `checkpoint.remote.options.secret=...`."""
    key, equals, value = text.partition("=")
    if equals and key and not key.startswith("-") and not re.search(r"[\s/?&]", key):
        parts = key.split(".")
        options = any(map(_begins_options, parts))
        if _names_credential(parts[-1]) or (options and any(map(_names_credential, parts))):
            return text if _is_placeholder(value) else f"{key}={HIDDEN}"
        if len(parts) > 1 and parts[-2] == "headers" and parts[-1].lower() not in _HEADERS:
            return text if _is_placeholder(value) else f"{key}={HIDDEN}"
        if "{" in value and (options or any(name in value for name in _OPTIONS)):
            return f"{key}={_inline(value, options, parts[-1])}"
        if parts[-1] == "alert":  # the config refuses words there that look random
            return redact(_without_random(text))
    return redact(text)


def redact_arguments(words: Iterable[str]) -> list[str]:
    """Replace the credentials in a command line, including the word after `--token`."""
    found: list[str] = []
    before = ""
    for word in words:
        hides = before.startswith("--") and "=" not in before and _names_credential(before.lstrip("-"))
        found.append(HIDDEN if hides and not _is_placeholder(word) else redact_argument(word))
        before = word
    return found


def credentials_in(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Find the credentials in a tree: yield the dotted key and a description of each."""
    known = _known()
    if _tree(values, known, options=False) != values:
        yield from _found_in(values, "", known, options=False)


def credential_in(text: str) -> str | None:
    """Describe the credential in a text; None when there is none."""
    return _kind(text, _known())


def looks_random(text: str) -> bool:
    """Return whether a text has a word that looks generated, as keys and tokens do."""
    return _without_random(text) != text


def _without_random(text: str) -> str:
    def hide(match: re.Match[str]) -> str:
        mixed = re.search(r"\d", match[0]) and re.search("[A-Za-z]", match[0])
        return HIDDEN if mixed else match[0]

    return re.sub(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[A-Za-z0-9]{20,}", hide, text)


def remember(value: str, name: str) -> None:
    """Redact this value from now on, wherever it appears.

    Args:
        value: The credential.
        name: Its name in errors.
    """
    for part in {value, *value.splitlines()}:
        if len(part.strip()) >= 6 and not part.startswith("-----"):
            for text in _spellings(part.strip()):
                _remembered[text] = name


def expand(value: Any, missing: Callable[[str], Exception]) -> Any:
    """Replace `${NAME}` by the value of an environment variable, in all texts of a tree; the value is remembered.

    Args:
        value: The tree.
        missing: Makes the error for a variable that is not set.
    """
    if isinstance(value, Mapping):
        return {key: expand(item, missing) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [expand(item, missing) for item in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        text = os.environ.get(match[1])
        if text is None:
            raise missing(match[1])
        remember(text, match[1])
        return text

    return re.sub(r"\$\{([A-Za-z_]\w*)\}", found, value)


# Names ----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    """Split `X-Amz-Security-Token`, `apiKey` or `AWS_SECRET_ACCESS_KEY` into lower-case words."""
    found = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name[-200:])
    return tuple(word.lower() for word in found)


@lru_cache(maxsize=4096)
def _always_names_credential(name: str) -> bool:
    """Return whether a name names a credential wherever it stands."""
    words = _words(name)
    if not words or words[-1] in _ABOUT or name in ("PWD", "OLDPWD"):
        return False
    named = any(word in _WORDS or word.endswith(("password", "passphrase", "secret")) for word in words)
    return named or any(pair in _PAIRS for pair in pairwise(words))


@lru_cache(maxsize=4096)
def _names_credential(name: str) -> bool:
    """Return whether a name names a credential in options, queries and environment variables."""
    words = _words(name)
    if _always_names_credential(name) or not words or words[-1] in _ABOUT:
        return _always_names_credential(name)
    if words[-1].endswith("token"):
        return not (len(words) > 1 and words[-2] in _OF_A_VOCABULARY)
    return words[-1] in _LAST_WORDS


def _begins_options(name: str) -> bool:
    return name.endswith(_OPTIONS)


# Values ---------------------------------------------------------------------------------------------------------------


def _is_placeholder(value: str, shell: bool = False) -> bool:
    """Return whether a value only says where a credential comes from, or that there is none."""
    rest = re.sub(r"\$\{\w+\}", "", value)
    if shell:
        rest = re.sub(r"\$[A-Za-z_]\w*|\$\([^()]*\)|`[^`]*`", "", rest)
    rest = re.sub(r"(?i)\b(bearer|basic|token|apikey|key)\b", "", rest).strip(" \t\"'\\:;,@.)]}")
    if rest.lower() in _PLAIN or set(rest) <= {"*"}:
        return True
    if rest[0] + rest[-1] in ("<>", "{}") or (rest[0] in "<{" and not set(rest) & set(">}")):
        return True  # `<token>` of an example
    return rest.startswith(("/", "~/", "./")) and rest.endswith((".json", ".pem", ".key", ".crt", ".p12", ".txt"))


def _known() -> dict[str, str]:
    """Return the credentials known to this process, the longest first, each with its name."""
    found = dict(_remembered)
    for name in os.environ:
        if _names_credential(name):
            value = os.environ.get(name, "")
            for part in _parts_to_hide(value):
                found[part] = name
    return dict(sorted(found.items(), key=lambda item: -len(item[0]))) if len(found) > 1 else found


@lru_cache(maxsize=256)
def _parts_to_hide(value: str) -> tuple[str, ...]:
    """Return the parts of a variable's value to redact everywhere: not a path, and nothing that could be a word."""
    if os.path.exists(value):  # noqa: PTH110 - a value may be no valid path
        return ()
    parts = {part.strip() for part in (value, *value.splitlines())}
    hidden = [p for p in parts if len(p) >= 8 and not p.startswith("-----") and _character_classes(p) > 1]
    return tuple(text for part in hidden for text in _spellings(part))


def _spellings(text: str) -> list[str]:
    """Return a text as it is, and as URLs, HTML and JSON spell it."""
    if text.isalnum():
        return [text]
    import html
    import json
    from urllib.parse import quote

    return list(dict.fromkeys([text, quote(text, safe=""), html.escape(text), json.dumps(text)[1:-1]]))


def _character_classes(text: str) -> int:
    return sum(bool(re.search(kind, text)) for kind in ("[a-z]", "[A-Z]", "[0-9]", "[^A-Za-z0-9]"))


# Texts ----------------------------------------------------------------------------------------------------------------


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Return a pattern by name. It is compiled on first use, since most commands need none."""
    return re.compile(_PATTERNS[name], re.DOTALL if name == "pem" else re.MULTILINE)


_QUOTE = r"(?:\\?[\"']|&quot;|&\#x27;|&\#39;)"
_SECRET_NAME = (
    r"secret|passw(?:or)?d|passphrase|passcode|pwd|credential|api[_-]?key|access[_-]?key|account[_-]?key|auth[_-]?key"
    r"|routing[_-]?key|integration[_-]?key|private[_-]?key|signing[_-]?key|encryption[_-]?key|secret[_-]?key"
    r"|shared[_-]?access[_-]?(?:key|signature)|storage[_-]?key|master[_-]?key|service[_-]?key|connection[_-]?string"
    r"|authorization|cookie|token|jwt|bearer"
)
_PATTERNS = {
    "userinfo": r"(?i)\b([a-z][a-z0-9+.\-]{0,30}://)([^\s/?#@\"'<>:]*:[^\s/?#\"'<>]*)@",
    "web user": r"(?i)\b((?:git\+)?https?://)([^\s/?#@:\"'<>]+)@",
    # Secret keys of object stores contain slashes; names of buckets contain no colon.
    "bucket": r"(?i)\b((?:s3[an]?|gs|gcs|az|adl|abfss?|wasbs?|oss|cos|b2|r2|minio)://)([^\s/:@\"'<>]+:[^\s@\"'<>]+)@",
    "query": r"([?&#;])([A-Za-z0-9_.\-\[\]]{1,60})=([^\s&#\"'<>;`]*)",
    "webhook": (
        r"(?i)\b(https?://(?:hooks\.slack\.com/(?:services|workflows|triggers)/"
        r"|(?:\w+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/|api\.telegram\.org/bot|[\w.\-]+\.webhook\.office\.com/"
        r"|hc-ping\.com/|events\.pagerduty\.com/integration/|hooks\.zapier\.com/hooks/|maker\.ifttt\.com/trigger/))"
        r"([^\s\"'<>]+)"
    ),
    "named": (
        rf"(?i)(?:{_SECRET_NAME})[\w.\-]{{0,40}}({_QUOTE}?)\]?\s{{0,3}}([:=])\s{{0,3}}"
        rf"(?:({_QUOTE})((?:[^\\\n]|\\.)*?)(\3|$)|((?:\$\{{\w+\}}|\$\([^()]*\)|[^\s,;&|}})\]\"'<>])+))"
    ),
    "header": (
        rf"(?i)((?<![\w\-])(?:(?:proxy-)?authorization|(?:x|api)-[\w\-]*(?:token|key|secret|auth)[\w\-]*)"
        rf"{_QUOTE}?\s*[:=]\s*{_QUOTE}?)((?:\$\{{\w+\}}|\$\([^()]*\)|`[^`]*`|[^\"'\r\n&}}])+)"
    ),
    "first words": r"(?i)(?:(?:bearer|basic|token|apikey|key)\s+)?(?:\$\([^()]*\)|`[^`]*`|\S+)",
    "cookie": rf"(?i)((?<![\w\-])(?:set-)?cookie{_QUOTE}?\s*[:=]\s*{_QUOTE}?)([^\"'\r\n&]+)",
    "scheme": r"\b(?i:(bearer|basic|token|apikey)([ +]|%20)+)([A-Za-z0-9._~+/=\-]{8,})",
    "flag": rf"(?i)(?<![\w\-])(--?[\w\-]*(?:{_SECRET_NAME})[\w\-]*)(\s+{_QUOTE}?)([^\s\"'\-][^\s\"']*)",
    "user": r"((?:^|\s)(?:-u|-U|--user|--proxy-user)(?:\s*|=)[\"']?[^\s:\"'$/\-]+:)([^\s\"'/][^\s\"']*)",
    "shape": (
        r"\b(?:(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}"
        r"|hf_[A-Za-z0-9]{16,}|xox[abeoprs]-[\w\-]{10,}|sk-[A-Za-z0-9][\w\-]{15,}|AIza[\w\-]{30,}|ya29\.[\w.\-]{20,}"
        r"|[rs]k_(?:live|test)_\w{10,}|npm_[A-Za-z0-9]{30,}|pypi-[\w\-]{40,}|dop_v1_[0-9a-f]{40,}"
        r"|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*)"
    ),
    "pem": r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----).*?(?:(-----END [A-Z0-9 ]*PRIVATE KEY-----)|\Z)",
}
_SHAPES = (
    "AKIA", "ASIA", "ABIA", "ACCA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "xox",
    "sk-", "AIza", "ya29.", "k_live_", "k_test_", "npm_", "pypi-", "dop_v1_", "eyJ",
)  # fmt: skip
_NAMES = (
    "secret", "passw", "passphrase", "passcode", "pwd", "credential", "key", "authorization", "cookie", "token", "jwt",
    "bearer", "string", "signature",
)  # fmt: skip


def _userinfo(text: str) -> str:
    if "://" not in text or "@" not in text:
        return text

    def hide(match: re.Match[str]) -> str:
        user, _, password = match[2].partition(":")
        harmless = match[2].startswith("arn:") or _is_placeholder(password if password else user, shell=True)
        return match[0] if harmless else f"{match[1]}{HIDDEN}@"

    for name in ("userinfo", "web user", "bucket"):
        text = _pattern(name).sub(hide, text)
    return text


def _query(text: str) -> str:
    def hide(match: re.Match[str]) -> str:
        name = match[2]
        value = match[3]
        secret = _names_credential(name)
        if "".join(_words(name)) in _SIGNED_QUERIES:
            secret = len(value) >= 8
        elif _words(name) and _words(name)[-1] in _IN_QUERIES:
            secret = len(value) >= 8 and not set(value) & set("/.,")
        return match[0] if not secret or _is_placeholder(value, shell=True) else f"{match[1]}{name}={HIDDEN}"

    return _pattern("query").sub(hide, text) if "=" in text and any(sign in text for sign in "?&#;") else text


def _webhook(text: str) -> str:
    if "://" not in text or not any(host in text for host in _HOOK_HOSTS):
        return text
    return _pattern("webhook").sub(lambda m: m[0] if _is_placeholder(m[2], shell=True) else f"{m[1]}{HIDDEN}", text)


_HOOK_HOSTS = ("slack.com", "discord", "telegram.org", "office.com", "hc-ping", "pagerduty", "zapier", "ifttt")


def _header(text: str) -> str:
    def hide(match: re.Match[str]) -> str:
        # To the end of the line or the quote, unless the value is a reference, which prose may follow.
        first = _pattern("first words").match(match[2])
        harmless = _is_placeholder(first[0] if first else match[2], shell=True)
        return match[0] if harmless else f"{match[1]}{HIDDEN}"

    def hide_scheme(match: re.Match[str]) -> str:
        scheme = match[1].lower()
        value = match[3]
        if scheme == "bearer":
            hides = len(value) >= 20 or bool(re.search(r"\d|[A-Z].*[A-Z]", value))
        elif scheme == "basic":
            hides = _is_user_and_password(value)
        else:
            hides = len(value) >= 16 and looks_random(value)
        return f"{match[1]}{match[2]}{HIDDEN}" if hides else match[0]

    low = text.lower()
    if any(name in low for name in ("authorization", "cookie", "x-", "api-")):
        text = _pattern("cookie").sub(hide, _pattern("header").sub(hide, text))
    if any(name in low for name in ("bearer", "basic", "token", "apikey")):
        text = _pattern("scheme").sub(hide_scheme, text)
    return text


def _is_user_and_password(text: str) -> bool:
    """Return whether a text is base64 of `user:password`, as in HTTP's basic authentication (RFC 7617)."""
    import binascii

    try:
        return b":" in binascii.a2b_base64(text)
    except binascii.Error:
        return False


def _named(text: str) -> str:
    """Replace values behind `name=`, `"name":` and `--name`."""

    def hide(match: re.Match[str]) -> str:
        before = re.search(r"[\w.\-]*$", text[max(0, match.start() - 60) : match.start()])
        name = (before[0] if before else "") + re.match(r"[\w.\-]*", match[0])[0]  # type: ignore[index]
        value, closing = (match[4], match[5]) if match[3] else (match[6], "")
        exact = match[2] == "=" or bool(match[1])  # otherwise it may be prose
        if not (_always_names_credential(name) or (exact and _names_credential(name) and len(value) >= 6)):
            return match[0]
        if _is_placeholder(value, shell=True) or HIDDEN in value:
            return match[0]
        return f"{match[0][: len(match[0]) - len(value) - len(closing)]}{HIDDEN}{closing}"

    def hide_word(match: re.Match[str]) -> str:
        secret = _names_credential(match[1]) and not _is_placeholder(match[3], shell=True)
        return f"{match[1]}{match[2]}{HIDDEN}" if secret else match[0]

    low = text.lower()
    if any(name in low for name in _NAMES):
        if "=" in text or ":" in text:
            text = _pattern("named").sub(hide, text)
        if " -" in text or text.startswith("-"):
            text = _pattern("flag").sub(hide_word, text)
    if any(flag in text for flag in ("-u", "-U", "--user", "--proxy-user")) and ("http" in low or "curl" in low):
        text = _pattern("user").sub(lambda m: m[0] if _is_placeholder(m[2], shell=True) else f"{m[1]}{HIDDEN}", text)
    return text


def _shape(text: str) -> str:
    if "PRIVATE KEY-----" in text:
        text = _pattern("pem").sub(lambda m: f"{m[1]} {HIDDEN} {m[2] or ''}".rstrip(), text)
    return _pattern("shape").sub(HIDDEN, text) if any(shape in text for shape in _SHAPES) else text


#: Rules, the most specific first, each with a description of what it replaces.
_RULES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("a user or password before the @ of a URL", _userinfo),
    ("the address of a webhook, which is a secret itself", _webhook),
    ("a token or signature in a URL's query", _query),
    ("a bearer token or another authentication header", _header),
    ("a password, key or token behind its name", _named),
    ("a text with the shape of a key or token", _shape),
)


def _redacted(text: str, known: Mapping[str, str]) -> str:
    for value in known:
        if value in text:
            text = text.replace(value, HIDDEN)
    if _is_plain(text):
        return text
    for _, rule in _RULES:
        text = rule(text)
    return text


def _is_plain(text: str) -> bool:
    """Return whether a text is too short to be a credential and has no sign that precedes or follows one."""
    return len(text) < 14 and _SIGNS.isdisjoint(text)


_SIGNS = frozenset("=:@+% ")


def _kind(text: str, known: Mapping[str, str]) -> str | None:
    name = next((name for value, name in known.items() if value in text), None)
    if name is not None:
        return f"the value of {name}"
    return None if _is_plain(text) else next((what for what, rule in _RULES if rule(text) != text), None)


# Trees ----------------------------------------------------------------------------------------------------------------


def _tree(value: Any, known: Mapping[str, str], options: bool) -> Any:
    if isinstance(value, Mapping):
        return {_tree(key, known, options): _under(str(key), item, known, options) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tree(item, known, options) for item in value]
    return _redacted(value, known) if isinstance(value, str) else value


def _under(key: str, value: Any, known: Mapping[str, str], options: bool) -> Any:
    """Replace the credentials in the value of a key."""
    if _hides_value(key, options):
        return _hidden(value)
    if key == "headers" and isinstance(value, Mapping):
        return {name: item if str(name).lower() in _HEADERS else _hidden(item) for name, item in value.items()}
    return _tree(value, known, options or _begins_options(key))


def _hides_value(key: str, options: bool) -> bool:
    return _names_credential(key) if options else _always_names_credential(key)


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    if value is None or isinstance(value, bool) or (isinstance(value, str) and _is_placeholder(value)):
        return value
    return HIDDEN


def _found_in(values: Any, path: str, known: Mapping[str, str], options: bool) -> Iterator[tuple[str, str]]:
    if isinstance(values, Mapping):
        for key, item in values.items():
            below = f"{path}.{key}" if path else str(key)
            if isinstance(key, str) and (what := _kind(key, known)) is not None:
                yield path, what
                continue
            if _under(str(key), item, known, options) == item:
                continue
            if _hides_value(str(key), options):
                yield below, f"a credential ({key})"
            elif key == "headers" and isinstance(item, Mapping):
                yield from (
                    (f"{below}.{name}", f"the header {name}, which may authenticate")
                    for name, one in item.items()
                    if str(name).lower() not in _HEADERS and _hidden(one) != one
                )
            else:
                yield from _found_in(item, below, known, options or _begins_options(str(key)))
    elif isinstance(values, list | tuple):
        for number, item in enumerate(values):
            yield from _found_in(item, f"{path}.{number}", known, options)
    elif isinstance(values, str) and (what := _kind(values, known)) is not None:
        yield path, what


def _inline(text: str, options: bool, name: str) -> str:
    """Replace the credentials in a mapping of YAML's flow style, or all of it when it cannot be parsed."""
    try:
        import yaml

        given = yaml.safe_load(text)
        shown = _under(name, given, _known(), options)
        if shown == given:
            return redact(text)
        return str(yaml.safe_dump(shown, default_flow_style=True, width=10**6, sort_keys=False)).strip()
    except Exception:  # anything may have been typed
        return HIDDEN


# As a filter ----------------------------------------------------------------------------------------------------------


def _filter(variables: Iterable[str]) -> None:
    """Copy standard input to standard output, redacted, until the command that writes it has ended (`END_MARK`).

    Args:
        variables: Environment variables whose values are redacted, whatever their names.
    """
    for name in {*variables} - _PUBLIC:
        for part in _parts_to_hide(os.environ.get(name, "")):
            remember(part, name)
    empty = False
    for line in iter(lambda: sys.stdin.buffer.readline(65536), b""):
        text = line.decode(errors="backslashreplace")
        if text.startswith(END_MARK):
            code = text.removeprefix(END_MARK).strip()
            if code != "0":
                print(f"telemetry.alert ended with exit code {code}", flush=True)
            break
        print("\n" * empty, end="")
        empty = text == "\n"  # held back: an empty line before the mark belongs to the mark
        print("" if empty else redact(text), end="", flush=True)


if __name__ == "__main__":
    _filter(sys.argv[1:])
