"""Building an image with docker or buildah, whichever is there, from a package index that this machine's pip knows.

What pip is configured with (indexes, folders of packages, certificates) goes into the build as secrets and read-only
volumes, so credentials of an index are in no layer, no label and no history.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from headway.clouds.programs import show_program, try_program
from headway.clouds.supply.layout import Image, read_image
from headway.core.errors import ConfigError, HeadwayError
from headway.core.files.scratch import scratch_folder

ENGINES = ("docker", "buildah")
#: pip's settings that say where packages are; others are no business of an image.
_INDEX_KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "no-index", "default-timeout")
#: Kinds of settings as `pip config list` names them, the weakest first.
_KINDS = ("global.", "install.", ":env:.")
#: Those of them that name places.
_PLACES = ("index-url", "extra-index-url", "find-links")
_CA = "/run/secrets/ca"
#: No folder of an image has this name, so a mount hides nothing.
_MOUNTS = "/mnt/packages"


@dataclass(frozen=True)
class ImageRequest:
    """An image to build."""

    name: str
    """Its tag: `my-lab-train:0.1.0`."""
    target: str = "train"
    """Stage of the Dockerfile."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Build arguments."""
    platform: str | None = None
    """`linux/amd64` or `linux/arm64`; that of this machine when not given."""
    context: Path = Path()


@dataclass(frozen=True)
class PackageIndex:
    """Where pip of this machine takes packages from."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """By pip's own key; several values are separated by blanks or line ends."""
    certificates: Path | None = None
    """File of the authorities that it trusts."""

    @property
    def folders(self) -> dict[str, str]:
        """Folders of this machine that hold packages, each with its place in the build."""
        words = " ".join(self.settings.get(key, "") for key in _PLACES).split()
        # The pages of an index link to files beside its folder.
        given = {str(Path(urlsplit(word).path).parent) if word.startswith("file:") else word for word in words}
        found = sorted(path for path in given if path.startswith("/") and Path(path).is_dir())
        return {path: f"{_MOUNTS}/{number}" for number, path in enumerate(found)}

    def as_text(self) -> str:
        """Return it as a configuration of pip in the build."""
        lines = []
        for key, value in self.settings.items():
            words = value.split()
            for path, place in self.folders.items() if key in _PLACES else ():
                words = [re.sub(rf"^(file://)?{re.escape(path)}(?=/|$)", rf"\1{place}", word) for word in words]
            lines.append(f"{key} = {' '.join(words)}")
        if self.certificates is not None:
            lines.append(f"cert = {_CA}")
        return "\n".join(["[global]", *lines, ""])


def find_engine() -> str:
    """Return the engine of this machine: docker if its daemon answers, else buildah.

    Raises:
        ConfigError: there is neither.
    """
    for name in ENGINES:
        if _answer([name, "info"]) is not None:
            return name
    raise ConfigError(
        "there is no engine that builds images", where="PATH", fix="start docker, or: apt-get install buildah runc"
    )


def pip_index(listing: str) -> PackageIndex:
    """Return the package index that `pip config list` tells of: the last of `_KINDS` that has a setting wins."""
    found: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=_rank):
        name, _, text = line.partition("=")
        try:
            value = str(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            continue
        found[name.rpartition(".")[2]] = value
    cert = found.get("cert")
    chosen = {key: found[key] for key in _INDEX_KEYS if key in found}
    return PackageIndex(chosen, Path(cert) if cert and Path(cert).is_file() else None)


def _rank(line: str) -> int:
    return next((rank for rank, kind in enumerate(_KINDS) if line.startswith(kind)), -1)


def own_index() -> PackageIndex:
    """Return the package index of this Python's pip; an empty one where there is no pip."""
    listing = _answer([sys.executable, "-m", "pip", "config", "list"])
    return PackageIndex() if listing is None else pip_index(listing)


def build_command(engine: str, request: ImageRequest, index: PackageIndex, secrets: Mapping[str, Path]) -> list[str]:
    """Return the command that builds an image.

    Args:
        engine: One of `ENGINES`.
        request: The image.
        index: Its folders are mounted.
        secrets: Files that the build may read, by their names in the Dockerfile.

    Raises:
        ConfigError: the engine cannot read folders of this machine.
    """
    if engine == "docker":
        if index.folders:
            raise ConfigError(
                f"docker's build cannot read the folder of packages {next(iter(index.folders))}, which pip reads",
                where="pip config list",
                fix="use an index with a URL, or buildah: headway image build --engine buildah",
            )
        command = ["docker", "buildx", "build", "--load"]
    else:
        # docker's format knows health checks.
        command = ["buildah", "build", "--layers", "--format", "docker"]
        command += [word for pair in index.folders.items() for word in ("--volume", ":".join((*pair, "ro")))]
    command += ["--target", request.target, "--tag", request.name]
    if request.platform is not None:
        command += ["--platform", request.platform]
    command += [word for name, file in secrets.items() for word in ("--secret", f"id={name},src={file}")]
    command += [word for name, value in request.arguments.items() for word in ("--build-arg", f"{name}={value}")]
    return [*command, str(request.context)]


def build_image(engine: str, request: ImageRequest, index: PackageIndex, output: Path) -> Image:
    """Build an image, and write it to a folder in the OCI layout.

    Args:
        engine: One of `ENGINES`.
        request: The image.
        index: Where it takes packages from.
        output: The folder; an earlier image in it is replaced.

    Raises:
        HeadwayError: the engine fails.
        ConfigError: as `build_command`.
    """
    with _secrets(index) as secrets:
        _run(build_command(engine, request, index, secrets))
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    if engine == "buildah":
        _run(["buildah", "push", "--quiet", request.name, f"oci:{output}:latest"])
    else:
        archive = output / "image.tar"
        _run(["docker", "save", "--output", str(archive), request.name])
        with tarfile.open(archive) as tar:
            tar.extractall(output, filter="data")
        archive.unlink()
    return read_image(output)


@contextmanager
def _secrets(index: PackageIndex) -> Iterator[dict[str, Path]]:
    """Write the configuration of pip to a file that only this user can read, for the time of a build."""
    if not index.settings and index.certificates is None:
        yield {}
        return
    with scratch_folder("image") as folder:
        file = folder / "pip.conf"
        file.touch(mode=0o600)
        file.write_text(index.as_text(), encoding="utf-8")
        found = {"pip": file}
        if index.certificates is not None:
            found["ca"] = index.certificates
        yield found


def _answer(command: Sequence[str]) -> str | None:
    """Return what a program prints; None if it fails, or cannot be run."""
    try:
        done = try_program(command)
    except ConfigError:
        return None
    return None if done.returncode else done.stdout


def _run(command: Sequence[str]) -> None:
    code = show_program(command)
    if code:
        raise HeadwayError(
            f"{' '.join(command[:2])} ended with {code}; what it said is above",
            where=command[-1],
            fix="correct what it names, and run the same command again: finished layers are kept",
        )
