"""What is done to a file: hypothesis strategies for edits of bytes, and of the JSON in it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

#: A change of a file's bytes; what it means is said in `_edited`.
Edit = tuple[Any, ...]

# Values that lengths, counts and offsets should not have.
NUMBERS = [0, 1, -1, 2, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, -(2**31), 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 10**9]
# Text that means something to one of the parsers.
WORDS = [
    b"",
    b"\0",
    b"\n",
    b"\r",
    b'"',
    b",",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"../",
    b"NaN",
    b"1e999",
    b"-0",
    b"null",
    b"\\ud800",
    b"&a [*a, *a]",
    b"<<: *x",
    b"!!python/object/apply:os.getcwd []",
    b"${HOME}",
    b"\x1b[2J",
]
_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**300,
    1.5,
    float("nan"),
    "",
    "../../x",
    "/etc/passwd",
    "x" * 10_000,
    "\ud800",
    [],
    {},
    [[]],
    {"": {}},
    "00" * 32,
]

_place = st.floats(0, 1, exclude_max=True)


def edits() -> st.SearchStrategy[list[Edit]]:
    """Some edits, one after the other; few are enough, and easy to understand when they have found something."""
    width = st.sampled_from([1, 2, 4, 8])
    one = st.one_of(
        st.tuples(st.just("number"), _place, width, st.sampled_from(NUMBERS) | st.integers(-(2**63), 2**63 - 1)),
        st.tuples(st.just("bytes"), _place, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("bit"), _place, st.integers(0, 7)),
        st.tuples(st.just("insert"), _place, st.sampled_from(WORDS) | st.binary(max_size=16), st.integers(1, 3)),
        st.tuples(st.just("insert"), _place, st.sampled_from([b"[", b"{", b'{"a":', b"(", b'"', b",", b"\n", b"a"]),
                  st.sampled_from([100, 10_000, 200_000])),
        st.tuples(st.just("delete"), _place, st.integers(1, 200)),
        st.tuples(st.just("repeat"), _place, st.integers(1, 200), st.integers(2, 300)),
        st.tuples(st.just("cut"), _place),
        st.tuples(st.just("json"), _place, st.sampled_from(["value", "remove", "twice"]),
                  st.sampled_from(range(len(_VALUES)))),
    )  # fmt: skip
    return st.lists(one, min_size=1, max_size=4)


def edited(content: bytes, changes: list[Edit]) -> bytes:
    """The bytes with the edits done to them."""
    for change in changes:
        content = _edited(content, change)
    return content


def _edited(content: bytes, change: Edit) -> bytes:
    kind, at, *how = change
    place = int(at * len(content))
    if kind == "number":
        width, value = how
        return content[:place] + (value % 2 ** (8 * width)).to_bytes(width, "little") + content[place + width :]
    if kind == "bytes":
        return content[:place] + how[0] + content[place + len(how[0]) :]
    if kind == "bit" and content:
        return content[:place] + bytes([content[place] ^ (1 << how[0])]) + content[place + 1 :]
    if kind == "insert":
        return content[:place] + how[0] * how[1] + content[place:]
    if kind == "delete":
        return content[:place] + content[place + how[0] :]
    if kind == "repeat":
        return content[:place] + content[place : place + how[0]] * how[1] + content[place + how[0] :]
    if kind == "cut":
        return content[:place]
    if kind == "json":
        return _json_edited(content, at, *how)
    return content


def _json_edited(content: bytes, at: float, how: str, value: int) -> bytes:
    """Change one value of a JSON file, or of one line of a file of them; what is no JSON stays as it is."""
    lines = [content] if _loaded(content) is not None else content.split(b"\n")
    number = int(at * len(lines))
    whole = _loaded(lines[number])
    if whole is None:
        return content
    places = [*_places(whole)]
    if not places:
        return content
    holder, key = places[int((at * len(lines)) % 1 * len(places))]
    if how == "value":
        holder[key] = _VALUES[value]
    elif how == "remove":
        del holder[key]
    line = json.dumps(whole).encode("utf-8", "surrogatepass")
    if how == "twice" and isinstance(holder, dict):
        line = line[:1] + json.dumps(key).encode() + b": " + json.dumps(_VALUES[value]).encode() + b", " + line[1:]
    return b"\n".join([*lines[:number], line, *lines[number + 1 :]])


def _loaded(content: bytes) -> Any:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, (dict, list)) and found else None


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every object or list in a value, with each key that it has."""
    found, left = [], [value]
    while left:
        holder = left.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                left.append(holder[key])
    return found
