"""Renders the files of this repository that are a project's, too, from the template of `headway init`.

python tools/render_own.py           # write them
python tools/render_own.py --check   # exit code 1, with their names, if some differ
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from headway.clouds.scaffold.answers import Answers
from headway.clouds.scaffold.rendering import render

ROOT = Path(__file__).parents[1]
ANSWERS = Answers("headway", ("docker", "github", "bazel"), itself=True)


def rendered() -> dict[str, bytes]:
    """Return the files by their names from the root of the repository."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        render(ANSWERS, folder)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def differing(files: dict[str, bytes]) -> list[str]:
    """Return the names of files that are missing here, or have another content."""
    return [name for name, content in sorted(files.items()) if _content(ROOT / name) != content]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def main(words: list[str]) -> int:
    """Write or compare."""
    files = rendered()
    names = differing(files)
    for name in names:
        print(name)
        if "--check" not in words:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_bytes(files[name])
    return int("--check" in words and bool(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
