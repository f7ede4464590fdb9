"""The wheel of the Headway that runs: what launches install on machines that share no disk with this one.

No index of packages has Headway, and the version alone would not say which code it is. The wheel is made of the
installed files, whether they lie in an environment or in a checkout, so the machines run what launched them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shlex
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import headway
from headway.config import Config
from headway.core.errors import ConfigError
from headway.core.requirements import NAME
from headway.core.storage import extra_for
from headway.core.version import __version__

#: Its name, which pip reads the version and the tags from.
WHEEL = f"{NAME}-{__version__}-py3-none-any.whl"
_INFO = f"{NAME}-{__version__}.dist-info"
_LICENSES = "/licenses/"
_TAGS = "Wheel-Version: 1.0\nGenerator: headway\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
#: What stands for it in lines of shell that the user writes.
PLACE = "{headway}"
#: Equal files give equal bytes: the first time that a zip archive can hold.
_TIME = (1980, 1, 1, 0, 0, 0)


def shipped(config: Config) -> tuple[str, bytes] | None:
    """Return name and content of the wheel that travels with a launch; None if machines get Headway from elsewhere.

    Raises:
        ConfigError: as `build_wheel`.
    """
    named = config.launch.package
    if named is None:
        return WHEEL, build_wheel()
    return (Path(named).name, Path(named).read_bytes()) if _is_here(named) else None


def with_install(lines: Sequence[str], config: Config, folder: str) -> list[str]:
    """Return lines of shell with what pip is to install as Headway in the place of `{headway}`.

    Args:
        lines: The user's lines.
        config: Its section `launch` says what; its URLs need extras, too.
        folder: Where the machines find the wheel that travels, as a shell reads it between double quotes.
    """
    named = config.launch.package
    word = shlex.quote(named or "")
    if named is None or _is_here(named):
        urls = [config.data.remote, *(source.path for source in config.data.sources)]
        urls += [] if config.checkpoint.remote is None else [config.checkpoint.remote.url]
        extras = dict.fromkeys([*config.launch.extras, *filter(None, (extra_for(url or "") for url in urls))])
        chosen = f"[{','.join(extras)}]" if extras else ""
        word = f'"{folder}/{Path(named or WHEEL).name}{chosen}"'
    return [line.replace(PLACE, word) for line in lines]


def _is_here(named: str) -> bool:
    return named.endswith(".whl") and Path(named).is_file()


def build_wheel() -> bytes:
    """Build the wheel of the files that this process runs.

    Raises:
        ConfigError: Headway is not installed here, so its requirements are unknown.
    """
    try:
        installed = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "Headway runs from its source and is not installed, so no wheel can be made of it",
            where=str(Path(headway.__file__).parent),
            fix="python -m pip install -e . in its folder; or name in launch.package what the machines are to install",
        ) from None
    members = dict(_files())
    about = installed.read_text("METADATA") or ""
    members[f"{_INFO}/METADATA"] = _with_version(about).encode()
    members[f"{_INFO}/WHEEL"] = _TAGS.encode()
    for file in installed.files or ():
        place = Path(str(installed.locate_file(file)))
        name = str(file).partition(f".dist-info{_LICENSES}")[2]
        if name and place.is_file():
            members[f"{_INFO}{_LICENSES}{name}"] = place.read_bytes()
    members[f"{_INFO}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    record = [f"{name},{_hashed(content)},{len(content)}" for name, content in members.items()]
    members[f"{_INFO}/RECORD"] = "\n".join([*record, f"{_INFO}/RECORD,,", ""]).encode()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            one = zipfile.ZipInfo(name, _TIME)
            one.external_attr = 0o644 << 16
            archive.writestr(one, content, zipfile.ZIP_DEFLATED)
    return wheel.getvalue()


def _files() -> Iterator[tuple[str, bytes]]:
    """Yield the files of the package, in the order of their names."""
    root = Path(headway.__file__).parent
    for path in sorted(root.rglob("*")):
        hidden = path.name.startswith(".") and "template" not in path.parts  # templates have files such as .bazelrc
        # Of this repository: a package of Bazel in the wheel would hide the files from a project's own.
        is_build = path.name == "BUILD.bazel"
        if path.is_file() and "__pycache__" not in path.parts and not hidden and not is_build:
            yield path.relative_to(root.parent).as_posix(), path.read_bytes()


def _with_version(about: str) -> str:
    """Return the metadata with the version of the code: an editable installation may be older than its checkout."""
    head, gap, body = about.partition("\n\n")
    lines = [f"Version: {__version__}" if line.startswith("Version:") else line for line in head.split("\n")]
    return "\n".join(lines) + gap + body


def _hashed(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
