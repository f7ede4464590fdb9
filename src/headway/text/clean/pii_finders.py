"""Finders of personal data in text, with few false positives.

All finders first search for a literal character (an @, a dot, a plus, a hyphen), at gigabytes per second. Then they
examine the text on both sides of it.
"""

# ruff: noqa: SIM905 (words in a text are easier to read than in a list)

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import NamedTuple


class Found(NamedTuple):
    """A range of the text. The results of one finder are in order and do not overlap."""

    start: int
    end: int
    kind: str


# E-mail ---------------------------------------------------------------------------------------------------------------

_LOCAL = re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,62}[A-Za-z0-9_%+-])?\Z")
_DOMAIN = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,18}(?![A-Za-z0-9_-]|\.[A-Za-z0-9])"
)
# Reserved for examples by RFC 2606.
_RESERVED = re.compile(r"(?:^|\.)(?:example\.(?:com|net|org|edu)|example|test|invalid|localhost|local)$", re.IGNORECASE)
_AUTHORITY = re.compile(r"://[^/\s]*\Z")
# Nearly all domains in use end in a country code or in one of these; attributes in code and file names do not.
_ENDINGS = frozenset(
    "com org net edu gov mil int info biz name pro aero coop museum mobi travel jobs asia cat tel post xxx"
    " app dev page cloud online site store shop tech blog xyz email live life world today news media agency group"
    " digital network systems solutions services software company team work works space website design studio club"
    " academy education university school institute foundation center science health care clinic doctor hospital bank"
    " finance money capital ventures partners consulting legal law lawyer london berlin paris nyc wien koeln hamburg"
    " amsterdam swiss africa eus gal scot wales".split()
)
_COUNTRIES = frozenset(
    "ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bw by bz ca cc cd"
    " cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga gb gd"
    " ge gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg"
    " kh ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt mu mv"
    " mw mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa"
    " sb sc sd se sg sh si sj sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua"
    " ug uk us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw".split()
)


def find_emails(text: str) -> Iterator[Found]:
    """Yield e-mail addresses, except those at domains reserved for examples, code, and remotes (`git@host:path`)."""
    done = 0
    at = text.find("@")
    while at >= 0:
        # The local part has at most 64 characters (RFC 5321, section 4.5.3.1.1).
        window = text[max(done, at - 66) : at]
        local = _LOCAL.search(window)
        domain = _DOMAIN.match(text, at + 1) if local else None
        end = domain.end() if domain else 0
        if local and domain and _is_mailbox(window[: local.start()], local[0], domain[0], text[end : end + 1]):
            done = end
            yield Found(at - len(local[0]), done, "e-mail address")
        at = text.find("@", max(done, at + 1))


def _is_mailbox(before: str, local: str, domain: str, following: str) -> bool:
    labels = domain.lower().split(".")
    if labels[-1] not in _COUNTRIES and labels[-1] not in _ENDINGS:
        return False
    # `x@y.to(device)` is code, `package@1.2.in` a version, `user:secret@host.com` part of a URL.
    if len(labels[-2]) < 2 or following in ("(", "=") or labels[0].isdecimal() or _AUTHORITY.search(before):
        return False
    return not (local == "git" and following in (":", "/")) and not _RESERVED.search(domain)


# IP -------------------------------------------------------------------------------------------------------------------

_POINTS = re.compile(r"\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"(?<![\w.\-+]){_OCTET}(?:\.{_OCTET}){{3}}(?![\w+]|\.[0-9]|-(?![0-9]+\.[0-9]+\.)\w)")
_VERSION = re.compile(
    r"(?:(?:version|release|ver|rev|revision|build|firmware|driver|section|sec|chapter|clause|table|figure|oid|identifier|§)s?\.?"
    r"[\"'\])]*\s*[:=(]?\s*[\"'\[(]*|[=<>~!^]=\s*[\"']?|[A-Za-z0-9)]/)$",
    re.IGNORECASE,
)
# A whole network, an address written backwards, or the names of X.500 and of elliptic curves.
_NETWORK = re.compile(r"/(?:[0-9]|[1-9][0-9]|1[01][0-9]|12[0-7])(?![0-9])|\.in-addr")
_OBJECT_IDENTIFIERS = ("2.5.4.", "2.5.29.", "1.3.101.")
_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
_GROUP = "[0-9A-Fa-f]{1,4}"
# The character class comes first so that the search can skip ahead; the look-behind then checks the character before.
_IPV6 = re.compile(
    rf"[23fF](?<![\w:.].)[0-9A-Fa-f]{{3}}(?::{_GROUP}){{0,6}}(?:::(?:{_GROUP}(?::{_GROUP}){{0,5}})?|:{_GROUP})(?![\w:])"
)
_DOCUMENTATION = [
    ipaddress.ip_network(net)
    for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")
]


def find_ips(text: str, private: bool) -> Iterator[Found]:
    """Yield public IPv4 and IPv6 addresses; with `private`, also those of private networks and of the local host.

    Addresses reserved for documentation are excluded (RFC 5737, 3849, 9637), and so are matches after a word such as
    "version". Four numbers below 20 are excluded too: they are nearly always a version or a section, and only one
    address in 27,000 has that form.
    """
    found = [Found(*match.span(), "IPv4 address") for match in _ipv4(text) if _is_host(match, private)]
    if _COLONS.search(text):
        matches = _IPV6.finditer(text)
        found += [Found(*match.span(), "IPv6 address") for match in matches if _is_host(match, private)]
        found.sort()
    yield from found


def _ipv4(text: str) -> Iterator[re.Match[str]]:
    """Yield matches of four numbers up to 255 that do not look like a version."""
    done = 0
    for points in _POINTS.finditer(text):
        start = points.start()
        while start > done and points.start() - start < 3 and text[start - 1].isdecimal():
            start -= 1
        match = _IPV4.match(text, start)
        if match and not _VERSION.search(text[max(0, start - 24) : start]):
            done = match.end()
            yield match


def _is_host(match: re.Match[str], private: bool) -> bool:
    """Return whether an address can belong to a host."""
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return False
    network = _NETWORK.match(match.string, match.end())
    if network and network[0] != "/32":
        return False
    if any(address in net for net in _DOCUMENTATION if net.version == address.version) or address.is_multicast:
        return False
    if not address.is_global:
        return private and address.is_private and not address.is_unspecified and address.packed[0] > 0
    if address.version == 6:
        # Only global unicast (RFC 4291, section 2.4), which excludes masks and reserved ranges.
        return address.packed[0] >> 5 == 1 and any(address.packed[8:])
    small = max(address.packed) < 20 or match[0].startswith(_OBJECT_IDENTIFIERS)
    return address.packed[3] > 0 and not small


# Telephone ------------------------------------------------------------------------------------------------------------

_PLUS = re.compile(r"\+[1-9]")
# Possessive quantifiers (`++`, `?+`) prevent backtracking: a number of fifty digits can be grouped in a quarter of a
# million ways, all with the same end.
_INTERNATIONAL = re.compile(
    r"(?<![\w+=*/.)\]])\+[1-9][0-9]{0,14}+(?:[ .\-]?+\(?+[0-9]{1,5}+\)?){0,6}(?![\w]|[.\-:][0-9])"
)
_DATE = re.compile(r"\+?(?:1[0-9]|2[0-9])[0-9]{2}[-.]?[0-9]{2}[-.]?[0-9]{2}(?![0-9])")
# Country codes of ITU-T E.164 besides 1 and 7: those of two digits and those of three.
_CODES = frozenset(
    "20 27 30 31 32 33 34 36 39 40 41 43 44 45 46 47 48 49 51 52 53 54 55 56 57 58 60 61 62 63 64 65 66"
    " 81 82 84 86 90 91 92 93 94 95 98 211 212 213 216 218 290 291 297 298 299 420 421 423 670 800 808 850 852 853 855"
    " 856 870 878 880 881 882 883 886 888".split()
) | {
    str(code)
    for first, last in (
        (220, 258),
        (260, 269),
        (350, 359),
        (370, 389),
        (500, 509),
        (590, 599),
        (672, 692),
        (960, 979),
        (992, 998),
    )
    for code in range(first, last + 1)
}
_LAST_FOUR = re.compile(r"[-.][0-9]{4}(?![\w\-+]|\.[0-9])")
# North American numbering plan: area and exchange codes begin with 2 to 9; one kind of separator, or parentheses.
_AREA = re.compile(
    r"(?<![\w.\-+/=#%$*])(?:\+?1[ .\-]?)?(?:\(([2-9][0-9]{2})\)[ \-]?|([2-9][0-9]{2})([ .\-]))([2-9][0-9]{2})\Z"
)


def find_phones(text: str) -> Iterator[Found]:
    """Yield international numbers with a plus sign, and North American numbers with separators.

    Fictitious numbers (555-0100 to 555-0199), dates, sums, decimals, and digits without separators are excluded.
    """
    found = [*_international(text), *_north_american(text)]
    done = 0
    for item in sorted(found, key=lambda item: (item.start, -item.end)):
        if item.start >= done:
            done = item.end
            yield item


def _international(text: str) -> Iterator[Found]:
    for plus in _PLUS.finditer(text):
        match = _INTERNATIONAL.match(text, plus.start())
        if match and _is_international(match[0]):
            yield Found(*match.span(), "telephone number")


def _is_international(number: str) -> bool:
    groups = re.findall("[0-9]+", number)
    digits = "".join(groups)
    # E.164 allows at most 15 digits. Fewer than 8 are not an international number. Without separators, fewer than 10
    # are more often a sum.
    if not (8 if len(groups) > 1 else 10) <= len(digits) <= 15 or _DATE.fullmatch(number):
        return False
    known = digits[0] in "17" or digits[:2] in _CODES or digits[:3] in _CODES
    if digits[0] == "1" and (len(digits) != 11 or digits[1] in "01" or digits[4] in "01" or _fictitious(digits[1:])):
        return False
    # +12.345.678 has dots between thousands, +35236450.6 is a decimal.
    figure = "." in number and (len(groups) == 2 or all(len(group) == 3 for group in groups[1:]))
    return known and not figure and len(set(digits)) > 2


def _north_american(text: str) -> Iterator[Found]:
    for last in _LAST_FOUR.finditer(text):
        window = text[max(0, last.start() - 20) : last.start()]
        area = _AREA.search(window)
        if area is None:
            continue
        separator = text[last.start()]
        between = area[3]
        # 212.555.0123 or 212-555-0123, (212) 555-0123, 212 555-0123: not 212.555-0123.
        if between is not None and between != separator and (between, separator) != (" ", "-"):
            continue
        if between is None and separator != "-":
            continue
        digits = (area[1] or area[2]) + area[4] + text[last.start() + 1 : last.end()]
        if not _fictitious(digits):
            yield Found(last.start() - len(area[0]), last.end(), "telephone number")


def _fictitious(digits: str) -> bool:
    """Return whether ten digits of the North American plan are reserved for films and examples."""
    return digits[3:8] == "55501"
