"""The generations of the template that a project has seen: a git bundle in the project, which any clone of it has.

copier merges by git: it wants the template as a repository with a tag for what the project was made from, and one for
what it is brought to. A wheel holds only its own template, without a repository. So the project keeps the templates it
was made from, in `.headway/template.bundle` (some tens of kilobytes). An update unpacks it, adds the template of the
Headway that runs as the next generation, lets copier merge, and packs it again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.clouds.programs import last_words, try_program
from headway.core.errors import ConfigError
from headway.core.version import __version__

#: Where copier finds the unpacked generations: `_src_path` in the answers. Git ignores it, so the tree stays clean.
UNPACKED = Path(".headway") / "template"
BUNDLE = Path(".headway") / "template.bundle"
_IDENTITY = {
    **{f"GIT_{who}_NAME": "Headway" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "headway@localhost" for who in ("AUTHOR", "COMMITTER")},
    # Equal templates give equal commits.
    **{f"GIT_{who}_DATE": "2000-01-01T00:00:00+0000" for who in ("AUTHOR", "COMMITTER")},
}
#: The user's own settings (signatures, hooks, line ends) would change or stop the commits.
_PLAIN = ("-c", "commit.gpgSign=false", "-c", "tag.gpgSign=false", "-c", "core.autocrlf=false", "-c", "core.hooksPath=")


def git(folder: Path, *words: str) -> str:
    """Run git in a folder, and return what it prints.

    Raises:
        ConfigError: git is missing, or it fails.
    """
    # A hook that calls this names its own repository in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = try_program(["git", *_PLAIN, *words], folder=folder, environment={**environment, **_IDENTITY})
    if done.returncode:
        raise ConfigError(
            f"git {words[0]} failed: {last_words(done)}",
            where=str(folder),
            fix="try it by hand, and correct what it names",
        )
    return done.stdout.strip()


@contextmanager
def unpacked(project: Path) -> Iterator[Path]:
    """Unpack the generations of a project, and pack them again, with what was added, unless an error ends the block.

    Yields:
        The repository.

    Raises:
        ConfigError: the project has none, or git fails.
    """
    repository = project / UNPACKED
    bundle = project / BUNDLE
    if not bundle.is_file():
        raise ConfigError(
            "the project does not have the template it was made from",
            where=str(bundle),
            fix=f"restore the file: git checkout HEAD -- {BUNDLE}",
        )
    shutil.rmtree(repository, ignore_errors=True)
    try:
        git(project, "clone", "--quiet", str(bundle.resolve()), str(repository.resolve()))
        before = git(repository, "for-each-ref", "refs/tags")
        yield repository
        if git(repository, "for-each-ref", "refs/tags") != before:  # equal generations need not give equal bundles
            _pack(repository, bundle)
    finally:
        shutil.rmtree(repository, ignore_errors=True)


@contextmanager
def begun(project: Path, template: Path) -> Iterator[Path]:
    """Begin the generations of a new project, and pack them at the end.

    Yields:
        The repository, with generation 1.

    Raises:
        ConfigError: git is missing or fails.
    """
    repository = project / UNPACKED
    repository.mkdir(parents=True)
    try:
        git(repository, "init", "--quiet", "--initial-branch=main")
        add_generation(repository, template)
        yield repository
        _pack(repository, project / BUNDLE)
    finally:
        shutil.rmtree(repository, ignore_errors=True)


def add_generation(repository: Path, template: Path) -> str:
    """Add a template as the next generation, unless it is that of the newest one, and return the tag of the newest.

    Tags count generations, since two checkouts of one version of Headway may have different templates.

    Raises:
        ConfigError: git fails.
    """
    for path in repository.iterdir():
        if path.name == ".git":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.copytree(template, repository, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".DS_Store"))
    git(repository, "add", "--all", "--force")
    tags = git(repository, "tag", "--list").split()
    newest = max(map(int, tags), default=0)
    if newest and not git(repository, "status", "--porcelain"):
        return str(newest)
    git(repository, "commit", "--quiet", "--message", f"Template of Headway {__version__}")
    git(repository, "tag", str(newest + 1))
    return str(newest + 1)


def _pack(repository: Path, bundle: Path) -> None:
    made = repository / ".git" / "packed"
    git(repository, "bundle", "create", "--quiet", str(made.resolve()), "--all")
    made.replace(bundle)
