"""Pins: images by digest and actions by commit, found in files, checked, and written.

A tag may be moved to other bytes by whoever owns it; a digest or a commit may not. So what is built from is named by
both: `debian:12-slim@sha256:...` and `actions/checkout@<commit> # v7.0.1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.clouds.programs import try_program
from headway.core.errors import ConfigError
from headway.core.files.atomic import write_text
from headway.core.files.foreign import ForeignFileError, read_text

_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
_COMMIT = re.compile(r"@[0-9a-f]{40}$")
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)
_COPY_FROM = re.compile(r"--from=(\S+)|\bfrom=([^,\s]+)", re.IGNORECASE)
_ARG = re.compile(r"^\s*ARG\s+(\w+)=(\S+)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{?(\w+)")
_USES = re.compile(r"^\s*(?:-\s+)?uses:\s*['\"]?([^'\"\s#]+)")
_IMAGE = re.compile(r"^\s*(?:-\s+)?(?:image|container):\s*['\"]?([^'\"\s#]+)")


@dataclass(frozen=True)
class Reference:
    """An image or an action that a file names."""

    file: Path
    line: int
    text: str
    """As it is written, without the comment behind it."""
    kind: Literal["image", "action"]

    @property
    def pinned(self) -> bool:
        """Whether it names bytes, not only a tag."""
        return bool((_DIGEST if self.kind == "image" else _COMMIT).search(self.text))

    @property
    def tagged(self) -> str:
        """The reference without its digest."""
        return _DIGEST.sub("", self.text) if self.kind == "image" else self.text


def references(file: Path) -> list[Reference]:
    """Return the images and actions that a Dockerfile, a workflow or a compose file names.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        lines = read_text(file).splitlines()
    except (ForeignFileError, OSError, ValueError) as error:
        raise ConfigError(f"the file cannot be read: {error}", where=str(file), fix="name one that exists") from None
    is_yaml = file.suffix in (".yml", ".yaml")
    found = _in_yaml(lines) if is_yaml else _in_dockerfile(lines)
    return [Reference(file, number, text, kind) for number, text, kind in found]


def _in_yaml(lines: Sequence[str]) -> Iterator[tuple[int, str, Literal["image", "action"]]]:
    for number, line in enumerate(lines, 1):
        if (uses := _USES.match(line)) is not None:
            if uses[1].startswith("docker://"):
                yield number, uses[1].removeprefix("docker://"), "image"
            elif not uses[1].startswith("./"):
                yield number, uses[1], "action"
        elif (image := _IMAGE.match(line)) is not None and not image[1].startswith("$"):
            yield number, image[1], "image"


def _in_dockerfile(lines: Sequence[str]) -> Iterator[tuple[int, str, Literal["image", "action"]]]:
    arguments: dict[str, tuple[int, str]] = {}
    stages = {"scratch"}
    named = set[int]()
    for number, line in enumerate(lines, 1):
        if (argument := _ARG.match(line)) is not None:
            arguments[argument[1]] = (number, argument[2].strip("\"'"))
            continue
        if line.lstrip().startswith("#"):
            continue
        start = _FROM.match(line)
        names = [start[1]] if start else [one for pair in _COPY_FROM.findall(line) for one in pair if one]
        for name in names:
            variable = _VARIABLE.match(name)
            place = arguments.get(variable[1]) if variable else (number, name)
            if place is not None and place[1].lower() not in stages and place[0] not in named and not name.isdecimal():
                named.add(place[0])
                yield *place, "image"
        if start and start[2]:
            stages.add(start[2].lower())


def check_pinned(files: Sequence[Path]) -> int:
    """Check that every image and action in files is pinned, and return their number.

    Raises:
        ConfigError: some are not; each is named with its line.
    """
    found = [one for file in files for one in references(file)]
    loose = [one for one in found if not one.pinned]
    if loose:
        lines = "\n".join(f"    {one.file}:{one.line} {one.text}" for one in loose)
        count = f"{len(loose)} of {len(found)}"
        raise ConfigError(
            f"{count} images and actions are named by a tag, which its owner can move:\n{lines}",
            where=str(loose[0].file),
            fix=f"headway image pin {' '.join(dict.fromkeys(str(one.file) for one in loose))}",
        )
    return len(found)


def pin(file: Path, digest_of: Callable[[str], str], commit_of: Callable[[str, str], str]) -> dict[str, str]:
    """Write the present digest of every tag into a file, and the commit of every action that has none.

    Args:
        file: A Dockerfile, a workflow or a compose file.
        digest_of: Returns the digest (`sha256:...`) that an image's tag names now.
        commit_of: Returns the commit that a tag of a repository (`owner/name`) names now.

    Returns:
        What was changed: the text before and after.

    Raises:
        ConfigError: a tag cannot be resolved; the file is as it was.
    """
    changes: dict[int, tuple[str, str]] = {}
    for one in references(file):
        if one.kind == "image":
            if ":" not in one.tagged.rpartition("/")[2]:
                continue  # a digest alone: there is no tag that could have moved
            after = f"{one.tagged}@{digest_of(one.tagged)}"
        elif one.pinned:
            continue
        else:
            path, _, tag = one.text.partition("@")
            repository = "/".join(path.split("/")[:2])
            after = f"{path}@{commit_of(repository, tag)} # {tag}"
        if after != one.text:
            changes[one.line] = (one.text, after)
    if changes:
        _rewrite(file, changes)
    return dict(changes.values())


def _rewrite(file: Path, changes: Mapping[int, tuple[str, str]]) -> None:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, (before, after) in changes.items():
        head, _, tail = lines[number - 1].partition(before)
        if " # " in after:  # the comment of a tag takes the place of an earlier one
            tail = tail.partition("#")[0].rstrip() + "\n"
        lines[number - 1] = f"{head}{after}{tail}"
    write_text(file, "".join(lines))


def github_commit(repository: str, tag: str) -> str:
    """Return the commit that a tag or branch of a repository on GitHub names now.

    Raises:
        ConfigError: git is missing, there is no answer, or no such tag.
    """
    names = (f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}", f"refs/heads/{tag}")
    done = try_program(["git", "ls-remote", "--", f"https://github.com/{repository}", *names])
    lines = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    # An annotated tag is an object of its own; the line that ends in ^{} has the commit.
    by_name = {name: commit for commit, name in lines}
    for name in (f"refs/tags/{tag}^{{}}", f"refs/tags/{tag}", f"refs/heads/{tag}"):
        if re.fullmatch(r"[0-9a-f]{40}", by_name.get(name, "")):
            return by_name[name]
    said = done.stderr.strip().splitlines() or [f"it has no tag {tag}"]
    raise ConfigError(
        f"{repository} says: {said[-1]}", where=f"{repository}@{tag}", fix="check the tag and the network"
    )
