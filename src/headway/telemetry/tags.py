"""Tags and a note that people give a run: `tags.json` in its directory, which training never touches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import SETTINGS_BYTES, read_json_or_empty
from headway.core.format import printable

FILE_NAME = "tags.json"
#: Most tags of a run, and most characters of a tag and of a note.
_MOST_TAGS = 50
_TAG_CHARACTERS = 60
_NOTE_CHARACTERS = 4000


@dataclass(frozen=True)
class Tags:
    """What people call a run."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_tags(run: Path) -> Tags:
    """Return the tags of a run directory; none where there is no file, and what cannot be read is left out."""
    found = read_json_or_empty(run / FILE_NAME, SETTINGS_BYTES)
    tags = found.get("tags")
    note = found.get("note")
    words = [word for word in tags if isinstance(word, str)] if isinstance(tags, list) else []
    text = note if isinstance(note, str) else ""
    shown = dict.fromkeys(printable(word)[:_TAG_CHARACTERS] for word in words[:_MOST_TAGS])
    return Tags(tuple(shown), printable(text, keep="\n")[:_NOTE_CHARACTERS])


def change_tags(run: Path, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> Tags:
    """Add and remove tags, set the note if one is given, and return what the run has then.

    Raises:
        ConfigError: a tag is empty or too long, or there would be too many.
        OSError: the file cannot be written.
    """
    before = read_tags(run)
    for word in add:
        if not word.strip() or len(word) > _TAG_CHARACTERS or printable(word) != word or "," in word:
            raise ConfigError(
                f"'{word}' is no tag",
                where="headway runs tag",
                fix=f"1 to {_TAG_CHARACTERS} printable characters without a comma",
            )
    removed = set(remove)
    kept = [word for word in dict.fromkeys([*before.tags, *add]) if word not in removed]
    if len(kept) > _MOST_TAGS:
        raise ConfigError(f"a run has at most {_MOST_TAGS} tags", where=str(run), fix="remove some: --remove TAG")
    if note is not None and len(note) > _NOTE_CHARACTERS:
        raise ConfigError(f"a note has at most {_NOTE_CHARACTERS:,} characters", where="--note", fix="shorten it")
    after = Tags(tuple(kept), before.note if note is None else note)
    write_json(run / FILE_NAME, {"tags": list(after.tags), "note": after.note})
    return after
