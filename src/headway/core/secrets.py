"""The one redaction: whatever is kept, printed or sent passes through it, and credentials in it become `***`.

A credential is known by where it stands (before the @ of a URL, in a query, behind `password=`), by its shape
(`ghp_...`, a private key in PEM), by its name in a mapping, or because an environment variable or a key file has that
very value.

A config in which this would change anything is refused (`headway.config.credentials`), so that what lies in a run
directory is both free of credentials and the config itself. This module imports nothing of Headway's: errors pass
through it too, and `python secrets.py` runs it as a filter (`core.alerts`).
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
#: The last line that the filter reads: this, and the exit code of the command whose words it filters.
END_MARK = "\x1fheadway-alert-ended "

#: Words of a name that make it a credential's, wherever they stand in it, ...
_WORDS = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "passcode", "pwd", "credential",
    "credentials", "apikey", "authorization", "cookie", "cookies", "jwt", "bearer", "secretkey", "accesskey",
    "accountkey", "privatekey", "signingkey", "sharedaccesssignature", "sharedaccesskey", "connectionstring",
    "sastoken", "accesstoken", "authtoken", "sessiontoken",
}  # fmt: skip
#: ... two that follow each other, ...
_PAIRS = {
    ("api", "key"), ("access", "key"), ("account", "key"), ("auth", "key"), ("client", "key"), ("deploy", "key"),
    ("encryption", "key"), ("ingest", "key"), ("integration", "key"), ("license", "key"), ("master", "key"),
    ("private", "key"), ("routing", "key"), ("secret", "key"), ("service", "key"), ("shared", "key"),
    ("signing", "key"), ("storage", "key"), ("access", "signature"), ("connection", "string"),
}  # fmt: skip
#: ... unless its last one says that it is about the credential, and is none.
_ABOUT = {
    "file", "files", "path", "dir", "directory", "folder", "uri", "url", "endpoint", "name", "type", "count", "length",
    "policy", "provider", "seconds", "expiry", "expires", "algorithm", "sock", "host", "helper",
}  # fmt: skip
#: Last words that do so in options, queries and variables, where nothing else is called so.
_LAST_WORDS = {"key", "token", "auth", "sig", "signature", "pass", "pw", "pat", "sas", "psk", "dsn"}
#: What stands before "token" in the names of special tokens of a vocabulary.
_OF_A_TEXT = {
    "bos", "eos", "unk", "pad", "sep", "cls", "mask", "begin", "end", "start", "stop", "first", "last", "next", "per",
    "special", "added", "prefix", "suffix", "image", "text", "unknown", "padding", "fim", "unexpected", "each", "a",
    "the", "one", "of",
}  # fmt: skip
#: Parameters of a query that may as well be something else, unless their value is long.
_IN_QUERIES = {"code", "session", "sid", "ticket", "sign", "key", "auth", "pass", "pw", "pat"}
_SIGNED_QUERIES = {"googleaccessid", "keypairid", "policy", "xamzcredential", "xgoogcredential", "awsaccesskeyid"}
#: Headers whose values are no credentials. Of others nobody can know.
_HEADERS = {
    "accept", "accept-encoding", "accept-language", "cache-control", "connection", "content-type", "host",
    "if-modified-since", "if-none-match", "origin", "range", "referer", "user-agent",
}  # fmt: skip
#: What names end with of mappings that are handed to a library as they are.
_OPTIONS = ("options", "headers", "client_kwargs", "config_kwargs")
#: Values in place of a credential, for stores that need none or find it elsewhere.
_PLAIN = {"", "none", "null", "true", "false", "anon", "anonymous", "cloud", "google_default", "browser", "cache"}

#: Variables that alerts are likely to name, and that are no secrets.
_PUBLIC = {"HOME", "HOSTNAME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER"}

#: What `${NAME}` in options stands for, key files, and other values that were met in this process.
_remembered: dict[str, str] = {}


def redact(text: str) -> str:
    """Replace all that is known for a credential in a text; everything else stays as it is."""
    return _redacted(text, _known())


def redact_values(value: Any) -> Any:
    """The same for a tree of mappings and lists, in which names say what values are; for what JSON can hold."""
    return _tree(value, _known(), options=False)


def redact_argument(text: str) -> str:
    """The same for one word of a command line, as `checkpoint.remote.options.secret=...` is."""
    key, equals, value = text.partition("=")
    if equals and key and not key.startswith("-") and not re.search(r"[\s/?&]", key):
        parts = key.split(".")
        options = any(map(_begins_options, parts))
        if _is_credential(parts[-1]) or (options and any(map(_is_credential, parts))):
            return text if _stands_for_one(value) else f"{key}={HIDDEN}"
        if len(parts) > 1 and parts[-2] == "headers" and parts[-1].lower() not in _HEADERS:
            return text if _stands_for_one(value) else f"{key}={HIDDEN}"
        if "{" in value and (options or any(name in value for name in _OPTIONS)):
            return f"{key}={_inline(value, options, parts[-1])}"
        if parts[-1] == "alert":  # where such words are refused
            return redact(_without_random(text))
    return redact(text)


def redact_arguments(words: Iterable[str]) -> list[str]:
    """The same for a command line, in which an option's value may be a word of its own (`--token ...`)."""
    found: list[str] = []
    before = ""
    for word in words:
        hides = before.startswith("--") and "=" not in before and _is_credential(before.lstrip("-"))
        found.append(HIDDEN if hides and not _stands_for_one(word) else redact_argument(word))
        before = word
    return found


def credentials_in(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where in a tree there are credentials (dotted keys), and what they are, in words."""
    known = _known()
    if _tree(values, known, options=False) != values:
        yield from _found_in(values, "", known, options=False)


def credential_in(text: str) -> str | None:
    """What kind of credential a text holds, in words; None when it holds none."""
    return _kind(text, _known())


def looks_random(text: str) -> bool:
    """Whether a text has a word that nobody would choose, as keys and tokens are."""
    return _without_random(text) != text


def _without_random(text: str) -> str:
    def hide(match: re.Match[str]) -> str:
        mixed = re.search(r"\d", match[0]) and re.search("[A-Za-z]", match[0])
        return HIDDEN if mixed else match[0]

    return re.sub(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[A-Za-z0-9]{20,}", hide, text)


def remember(value: str, name: str) -> None:
    """Have this value redacted from now on, wherever it turns up.

    Args:
        name: What it is, for people.
    """
    for part in {value, *value.splitlines()}:
        if len(part.strip()) >= 6 and not part.startswith("-----"):
            _remembered[part.strip()] = name


def expand(value: Any, missing: Callable[[str], Exception]) -> Any:
    """Put what environment variables hold in place of `${NAME}`, in all texts of a tree; see `remember`.

    Args:
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
    """`X-Amz-Security-Token`, `apiKey`, `AWS_SECRET_ACCESS_KEY` in small words."""
    found = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name[-200:])
    return tuple(word.lower() for word in found)


@lru_cache(maxsize=4096)
def _is_surely_credential(name: str) -> bool:
    """Whether a name is a credential's wherever it stands."""
    words = _words(name)
    if not words or words[-1] in _ABOUT or name in ("PWD", "OLDPWD"):
        return False
    named = any(word in _WORDS or word.endswith(("password", "passphrase", "secret")) for word in words)
    return named or any(pair in _PAIRS for pair in pairwise(words))


@lru_cache(maxsize=4096)
def _is_credential(name: str) -> bool:
    """Whether a name is a credential's where there is nothing else of that name: options, queries, variables."""
    words = _words(name)
    if _is_surely_credential(name) or not words or words[-1] in _ABOUT:
        return _is_surely_credential(name)
    if words[-1].endswith("token"):
        return not (len(words) > 1 and words[-2] in _OF_A_TEXT)
    return words[-1] in _LAST_WORDS


def _begins_options(name: str) -> bool:
    return name.endswith(_OPTIONS)


# Values ---------------------------------------------------------------------------------------------------------------


def _stands_for_one(value: str, shell: bool = False) -> bool:
    """Whether a value only says where a credential comes from, or that there is none."""
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
    """Values that are credentials since they are this process's, the longest first, each with its name."""
    found = dict(_remembered)
    for name in os.environ:
        if _is_credential(name):
            value = os.environ.get(name, "")
            for part in _parts_to_hide(value):
                found[part] = name
    return dict(sorted(found.items(), key=lambda item: -len(item[0]))) if len(found) > 1 else found


@lru_cache(maxsize=256)
def _parts_to_hide(value: str) -> tuple[str, ...]:
    """Of a variable's value what would be hidden wherever it stood; nothing that may as well be a plain word."""
    if os.path.exists(value):  # noqa: PTH110 - a variable may hold what no path can
        return ()
    parts = {part.strip() for part in (value, *value.splitlines())}
    telling = [p for p in parts if len(p) >= 8 and not p.startswith("-----") and _kinds_of_signs(p) > 1]
    if any(set(part) & set("/+=&% ") for part in telling):
        from urllib.parse import quote

        telling += [quote(part, safe="") for part in telling]
    return tuple(telling)


def _kinds_of_signs(text: str) -> int:
    return sum(bool(re.search(kind, text)) for kind in ("[a-z]", "[A-Z]", "[0-9]", "[^A-Za-z0-9]"))


# Texts ----------------------------------------------------------------------------------------------------------------


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Patterns by name, compiled when a text first gives reason to."""
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
    # Keys of object stores have slashes in them, and names of buckets no colon.
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
        rf"(?:({_QUOTE})(.*?)(\3|$)|((?:\$\{{\w+\}}|\$\([^()]*\)|[^\s,;&|}})\]\"'<>])+))"
    ),
    "header": (
        rf"(?i)((?<![\w\-])(?:(?:proxy-)?authorization|(?:x|api)-[\w\-]*(?:token|key|secret|auth)[\w\-]*)"
        rf"{_QUOTE}?\s*[:=]\s*{_QUOTE}?)((?:[a-z][\w\-]*\s+)?(?:\$\{{\w+\}}|\$\([^()]*\)|`[^`]*`|[^\s\"'&,}}])+)"
    ),
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
        harmless = match[2].startswith("arn:") or _stands_for_one(password if password else user, shell=True)
        return match[0] if harmless else f"{match[1]}{HIDDEN}@"

    for name in ("userinfo", "web user", "bucket"):
        text = _pattern(name).sub(hide, text)
    return text


def _query(text: str) -> str:
    def hide(match: re.Match[str]) -> str:
        name, value = match[2], match[3]
        secret = _is_credential(name)
        if "".join(_words(name)) in _SIGNED_QUERIES:
            secret = len(value) >= 8
        elif _words(name) and _words(name)[-1] in _IN_QUERIES:
            secret = len(value) >= 8 and not set(value) & set("/.,")
        return match[0] if not secret or _stands_for_one(value, shell=True) else f"{match[1]}{name}={HIDDEN}"

    return _pattern("query").sub(hide, text) if "=" in text and set(text) & set("?&#;") else text


def _webhook(text: str) -> str:
    if "://" not in text or not any(host in text for host in _HOOK_HOSTS):
        return text
    return _pattern("webhook").sub(lambda m: m[0] if _stands_for_one(m[2], shell=True) else f"{m[1]}{HIDDEN}", text)


_HOOK_HOSTS = ("slack.com", "discord", "telegram.org", "office.com", "hc-ping", "pagerduty", "zapier", "ifttt")


def _header(text: str) -> str:
    def hide(match: re.Match[str]) -> str:
        return match[0] if _stands_for_one(match[2], shell=True) else f"{match[1]}{HIDDEN}"

    def hide_scheme(match: re.Match[str]) -> str:
        scheme, value = match[1].lower(), match[3]
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
    """Whether a text is what HTTP's basic authentication makes of them (RFC 7617)."""
    import binascii

    try:
        return b":" in binascii.a2b_base64(text)
    except binascii.Error:
        return False


def _named(text: str) -> str:
    """What stands behind `name=`, `"name":` and `--name`."""

    def hide(match: re.Match[str]) -> str:
        before = re.search(r"[\w.\-]*$", text[max(0, match.start() - 60) : match.start()])
        name = (before[0] if before else "") + re.match(r"[\w.\-]*", match[0])[0]  # type: ignore[index]
        value, closing = (match[4], match[5]) if match[3] else (match[6], "")
        exact = match[2] == "=" or bool(match[1])  # else it may be a sentence
        if not (_is_surely_credential(name) or (exact and _is_credential(name) and len(value) >= 6)):
            return match[0]
        if _stands_for_one(value, shell=True) or HIDDEN in value:
            return match[0]
        return f"{match[0][: len(match[0]) - len(value) - len(closing)]}{HIDDEN}{closing}"

    def hide_word(match: re.Match[str]) -> str:
        secret = _is_credential(match[1]) and not _stands_for_one(match[3], shell=True)
        return f"{match[1]}{match[2]}{HIDDEN}" if secret else match[0]

    low = text.lower()
    if any(name in low for name in _NAMES):
        if "=" in text or ":" in text:
            text = _pattern("named").sub(hide, text)
        if " -" in text or text.startswith("-"):
            text = _pattern("flag").sub(hide_word, text)
    if any(flag in text for flag in ("-u", "-U", "--user", "--proxy-user")) and ("http" in low or "curl" in low):
        text = _pattern("user").sub(lambda m: m[0] if _stands_for_one(m[2], shell=True) else f"{m[1]}{HIDDEN}", text)
    return text


def _shape(text: str) -> str:
    if "PRIVATE KEY-----" in text:
        text = _pattern("pem").sub(lambda m: f"{m[1]} {HIDDEN} {m[2] or ''}".rstrip(), text)
    return _pattern("shape").sub(HIDDEN, text) if any(shape in text for shape in _SHAPES) else text


#: What a text is looked at for, in this order: the more is known of a credential, the earlier.
_RULES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("a user or password before the @ of a URL", _userinfo),
    ("the address of a webhook, which is a secret by itself", _webhook),
    ("a token or signature in a URL's query", _query),
    ("a bearer token, or another header that lets in", _header),
    ("a password, key or token behind its name", _named),
    ("what has the shape of a key or token", _shape),
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
    """Whether a text is too short for the shape of a credential, and has no sign that stands beside one."""
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
    """A value under its name."""
    if _hides_all(key, options):
        return _hidden(value)
    if key == "headers" and isinstance(value, Mapping):
        return {name: item if str(name).lower() in _HEADERS else _hidden(item) for name, item in value.items()}
    return _tree(value, known, options or _begins_options(key))


def _hides_all(key: str, options: bool) -> bool:
    return _is_credential(key) if options else _is_surely_credential(key)


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    if value is None or isinstance(value, bool) or (isinstance(value, str) and _stands_for_one(value)):
        return value
    return HIDDEN


def _found_in(values: Any, path: str, known: Mapping[str, str], options: bool) -> Iterator[tuple[str, str]]:
    if isinstance(values, Mapping):
        for key, item in values.items():
            below = f"{path}.{key}" if path else str(key)
            if _under(str(key), item, known, options) == item:
                continue
            if _hides_all(str(key), options):
                yield below, f"a credential ({key})"
            elif key == "headers" and isinstance(item, Mapping):
                yield from (
                    (f"{below}.{name}", f"the header {name}, which may let in")
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
    """A mapping in YAML's flow style, as overrides have it; hidden as a whole where it cannot be read."""
    try:
        import yaml

        given = yaml.safe_load(text)
        shown = _under(name, given, _known(), options)
        if shown == given:
            return redact(text)
        return str(yaml.safe_dump(shown, default_flow_style=True, width=10**6, sort_keys=False)).strip()
    except Exception:  # whatever a parser says of a text that somebody has typed
        return HIDDEN


# As a filter ----------------------------------------------------------------------------------------------------------


def _filter(variables: Iterable[str]) -> None:
    """Pass standard input on, line by line, until the command that writes it has ended (`END_MARK`).

    Args:
        variables: Their values are redacted too.
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
        empty = text == "\n"  # one before the mark is the mark's
        print("" if empty else redact(text), end="", flush=True)


if __name__ == "__main__":
    _filter(sys.argv[1:])
