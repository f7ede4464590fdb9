"""Personal data: what is replaced, and what only looks like it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.sections.clean import PiiStep
from headway.text.clean import Cleaner, pii_finders

Make = Callable[..., Cleaner]


def replaced(cleaner: Cleaner, text: str) -> tuple[str | None, dict[str, int]]:
    result = cleaner.clean(text)
    return result, dict(cleaner.take_counts().steps[0].reasons)


FOUND = [
    ("Write to jane.doe@gmail.com.", "Write to <EMAIL>.", "e-mail address"),
    ("Jane <jane+list@mail.uni-koeln.de>, Bonn", "Jane <<EMAIL>>, Bonn", "e-mail address"),
    ("mailto:j_d@ox.ac.uk?subject=x", "mailto:<EMAIL>?subject=x", "e-mail address"),
    ("https://shop.com/?mail=jane@web.de&x=1", "https://shop.com/?mail=<EMAIL>&x=1", "e-mail address"),
    ("from 93.184.216.34 at noon", "from <IP> at noon", "IPv4 address"),
    ("http://93.184.216.34:8080/x", "http://<IP>:8080/x", "IPv4 address"),
    ("host=93.184.216.34, ok", "host=<IP>, ok", "IPv4 address"),
    ("It was 93.184.216.34.", "It was <IP>.", "IPv4 address"),
    ("peer [2a00:1450:4001:81b::200e]:80", "peer [<IP>]:80", "IPv6 address"),
    ("2606:4700:4700:0:0:0:0:1111 said", "<IP> said", "IPv6 address"),
    ("call (212) 736-5000 now", "call <PHONE> now", "telephone number"),
    ("call 212-736-5000 now", "call <PHONE> now", "telephone number"),
    ("call 212.736.5000.", "call <PHONE>.", "telephone number"),
    ("tel:+1-212-736-5000", "tel:<PHONE>", "telephone number"),
    ("1 212-736-5000", "<PHONE>", "telephone number"),
    ("Tel. +49 (30) 9018 20 24", "Tel. <PHONE>", "telephone number"),
    ("+442071838750", "<PHONE>", "telephone number"),
    ("+33 1 44 55 66 77, Paris", "<PHONE>, Paris", "telephone number"),
]


@pytest.mark.parametrize(("text", "expected", "kind"), FOUND)
def test_personal_data_is_replaced_and_counted(text: str, expected: str, kind: str, cleaner: Make) -> None:
    assert replaced(cleaner("pii"), text) == (expected, {kind: 1})


@pytest.mark.parametrize(
    "text",
    [
        # No mailboxes.
        "git clone git@github.com:owner/name.git",
        "ssh://git@github.com/owner/name",
        "user@example.com and user@mail.example.org",
        "https://user:secret@host.com/path",
        "x = self.weight@linear.to(device), f(mail@address.name=1)",
        "y = a@b.T + c@d.data",
        "@property.setter and @types/node",
        "icon@2x.png, lodash@4.17.21, react@18.2.0-rc.in",
        "root@localhost and root@localhost.localdomain",
        # No addresses of machines, or none that are public.
        "version 93.184.216.34 of the driver",
        "Chrome/93.18.21.34 Safari",
        "package-93.184.216.34-2.x86_64, v93.184.216.34, >=93.184.216.34",
        "ObjectIdentifier('2.5.29.37'), oid 1.3.6.1.4.1.311.21",
        "see section 1.2.3.4, or 4.3.2.1",
        "192.168.178.1, 10.20.30.40, 127.0.0.1, 169.254.1.1, 0.0.0.0, 255.255.255.255",
        "192.0.2.44 and 2001:db8::44 are for documentation",
        "93.184.216.8/29 and 52.216.1.128/25 are networks, so is 52.216.1.0; 255.255.255.0 is a mask",
        "256.1.1.1, 1.1.1, 93.184.216.34.5, 093.184.216.034",
        "std::vector, a::b, dead::beef, fe80::1, ::1, x[1::2]",
        "at 12:34:56, 2024-01-01T12:34:56, 00:1a:2b:3c:4d:5e",
        # No telephone numbers.
        "on 2024-01-15, 15.01.2024, +2024-01-15, 2024-0115",
        "call 212-555-0123 or +1 212 555 0199 in films",
        "the sum +2147483647, +35236450.6 or +12.345.678",
        "ISBN 978-3-16-148410-0, 123-456-7890, 2127365000",
        # Nothing stands on two lines.
        "thanks to\n@anna.de, follow us\n@python.org",
        "x (212) 634\n-9123, 212-634\n-9123",
        "x = y+442071838750, a[i]+442071838750, 3.1415926535-2123",
        "f0e1d2c3-212-736-5000-aabb, 1-212-736-5000-99",
        "@@ -212,736 +5000,1234 @@",
    ],
)
def test_what_only_looks_like_it_stays(text: str, cleaner: Make) -> None:
    assert replaced(cleaner("pii"), text) == (text, {})


def test_private_addresses_on_request(cleaner: Make) -> None:
    text = "192.168.178.1, 10.0.0.1, 127.0.0.1, fe80::1ff, 192.0.2.44, 0.0.0.0"
    expected = "<IP>, <IP>, <IP>, <IP>, 192.0.2.44, 0.0.0.0"
    assert replaced(cleaner({"step": "pii", "private_ips": True}), text) == (
        expected,
        {"IPv4 address": 3, "IPv6 address": 1},
    )


def test_placeholders_and_kinds_are_chosen_in_the_config(cleaner: Make) -> None:
    text = "jane@web.de, 93.184.216.34, 212-736-5000"
    assert replaced(cleaner({"step": "pii", "email": "[mail]", "ip": None, "phone": ""}), text) == (
        "[mail], 93.184.216.34, ",
        {"e-mail address": 1, "telephone number": 1},
    )


class Looks:
    """A pattern that counts the characters it is given to search, on behalf of all of its kind."""

    characters = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)

    def search(self, text: str, start: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
        Looks.characters += min(end, len(text)) - start
        return self._pattern.search(text, start, end)

    def finditer(self, text: str, start: int = 0, end: int = sys.maxsize) -> Iterator[re.Match[str]]:
        Looks.characters += min(end, len(text)) - start
        return self._pattern.finditer(text, start, end)


def test_no_find_looks_at_the_rest_of_the_text(cleaner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in list(vars(pii_finders).items()):
        if isinstance(value, re.Pattern):
            monkeypatch.setattr(pii_finders, name, Looks(value))
    monkeypatch.setattr(Looks, "characters", 0)
    text, step = "Ann <ann@company.com>, +49 212 3456789, 93.184.216.34 and 212-736-5000; " * 1000, cleaner("pii")
    step.clean(text)
    assert sum(step.take_counts().steps[0].reasons.values()) == 4000
    assert 0 < Looks.characters < 30 * len(text), "a look at the rest from each find is one at 500 times the text"


def test_no_number_is_cut_in_all_the_ways_it_could_be(cleaner: Make) -> None:
    step = cleaner("pii")  # fifty digits can be cut into groups in a quarter of a million ways: for hours
    step.clean(("+" + "1234567890" * 5 + "\n") * 100_000)
    assert sum(step.take_counts().steps[0].reasons.values()) == 0


def test_examples_show_the_placeholder_and_not_the_data(cleaner: Make) -> None:
    one = cleaner("pii")
    one.clean("x " * 200 + "write to jane@web.de, please")
    (example,) = one.take_counts().steps[0].examples
    assert example.kind == "changed" and "<EMAIL>, please" in example.text and "jane" not in example.text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([found[0] for found in FOUND]), max_size=6), st.text(alphabet=" ,;\n語a", min_size=1))
def test_every_find_is_replaced_wherever_it_stands(texts: list[str], between: str) -> None:
    # Spaces at both ends keep letters of `between` from growing into what is looked for.
    cleaner = Cleaner([PiiStep()])
    joined = f" {between} \n".join(texts) or "x"
    cleaner.clean(joined)
    assert sum(cleaner.take_counts().steps[0].reasons.values()) == len(texts)
