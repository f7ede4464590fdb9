"""What the ending of a file's name says: its format and compression, or why it is left out of a folder."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from headway.config.sections.data import SourceConfig
from headway.text.reading.archives import archive_named
from headway.text.reading.compression import ENDINGS
from headway.text.reading.places import STDLIB

#: Formats with their own index and compression.
TABLES = ("parquet", "arrow")
# Formats whose records may hold the messages of a conversation.
_WITH_LISTS = ("jsonl", *TABLES)

_FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_MARKUP = ".markdown .mdown .mkd .mdx .rst .adoc .asciidoc .org .tex .textile .log .srt .vtt"
_CODE = """
.py .pyi .pyx .js .mjs .cjs .jsx .ts .tsx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .java .kt .kts .scala .groovy .go
.rs .rb .php .pl .pm .lua .r .jl .swift .cs .fs .vb .hs .ml .mli .erl .ex .exs .clj .lisp .el .scm .f .f90 .f95 .ada
.pas .d .nim .zig .v .sv .vhd .asm .s .sh .bash .zsh .fish .ps1 .bat .sql .proto .graphql .cmake .tf .sol .vue .svelte
.css .scss .less
"""
# Documents in which text is only a part of what there is.
_DOCUMENTS = """
.pdf .doc .docx .docm .odt .rtf .ppt .pptx .odp .xls .xlsx .ods .epub .mobi .djvu .ps .html .htm .xhtml .xml .ipynb
.pages .eml .mbox
"""
# Read where they are asked for. In a folder of documents such files are often about the documents (a script that made
# them, a description of the data set), and a store must not take in more than before.
_ASKED = {
    ".json": "jsonl",
    ".tsv": "csv",
    ".tab": "csv",
    **dict.fromkeys((*_MARKUP.split(), *_CODE.split()), "text"),
}
#: Patterns for `also` of a source whose folder is all text that there is: markup and code, but no logs.
TEXT_PATTERNS = tuple(f"*{ending}" for ending in (*_MARKUP.split(), *_CODE.split(), ".tsv") if ending != ".log")
# Kinds of files that a line names.
_NAMED = 12

#: For messages: the known endings.
KNOWN = f"({', '.join(_FORMATS)}, all but tables also under {', '.join(ENDINGS)}, and .json under these)"


def format_of(config: SourceConfig, name: str) -> tuple[str, str | None] | None:
    """Return format and compression of a source's file; None if it is left out because of its ending."""
    endings = [ending.lower() for ending in PurePosixPath(name).suffixes]
    compression = ENDINGS.get(endings[-1]) if endings else None
    if compression:
        endings.pop()
    if config.path == STDLIB:
        return "text", None
    if config.format not in ("auto", "chat", "completion"):
        return config.format, None if config.format in TABLES else compression
    last = endings[-1] if endings else ""
    asked = is_asked(config, name)
    kind = _FORMATS.get(last)
    if (compression or config.format in ("chat", "completion")) and last == ".json":
        kind = "jsonl"  # the shards of C4, Dolma and others; a plain .json is often one large value
    if kind is None and asked:
        kind = _ASKED.get(last, "text" if matches(name, config.also) else None)
    if config.format == "chat" and kind not in _WITH_LISTS:
        return None
    if (config.format == "completion" and kind == "text") or (kind in TABLES and compression):
        return None
    return None if kind is None else (kind, compression)


def is_asked(config: SourceConfig, name: str) -> bool:
    """Return whether the config names a file's ending: in the path of a file or glob, or in `also`."""
    last = PurePosixPath(config.path.partition("?")[0] if "://" in config.path else config.path)
    ending = last.suffix.lower()
    # A folder may have a name with an ending too, which says nothing about its files.
    names_files = glob.has_magic(last.name) or name == last.name
    path = PurePosixPath(name.lower())
    uncompressed = path.stem if path.suffix in ENDINGS else path.name
    by_path = names_files and ending[1:].isalnum() and uncompressed.endswith(ending)
    return by_path or matches(name, config.also)


def matches(name: str, patterns: list[str]) -> bool:
    """Return whether a file's name within its source, or for patterns without a slash a part of it, matches one."""
    parts = name.split("/")
    for given in patterns:
        pattern = given.removeprefix("./").removeprefix("**/").rstrip("/")
        if "/" not in pattern and any(fnmatchcase(part, pattern) for part in parts):
            return True
        if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*"):
            return True
    return False


def delimiter_of(config: SourceConfig, name: str) -> str:
    """Return the delimiter of a CSV file."""
    tabs = {".tsv", ".tab"} & {ending.lower() for ending in PurePosixPath(name).suffixes[-2:]}
    return config.delimiter or ("\t" if tabs else ",")


def kind_of(name: str) -> str:
    """Return the kind of a file that is left out: its ending, with that of a compression."""
    endings = [ending.lower() for ending in PurePosixPath(name).suffixes]
    compressed = len(endings) > 1 and endings[-1] in ENDINGS
    return "".join(endings[-2:] if compressed else endings[-1:]) or "without an ending"


def describe_left_out(kinds: Mapping[str, int]) -> str:
    """Name the files that are left out by kind, with their number and what to do about them."""
    groups: dict[str, list[str]] = {}
    in_order = sorted(kinds, key=lambda kind: (-kinds[kind], kind))
    for kind in in_order[:_NAMED]:
        groups.setdefault(_advice(kind), []).append(kind)
    parts = []
    for advice, group in groups.items():
        named = ", ".join(f"{kinds[kind]:,} {kind}" for kind in group)
        parts.append(named + advice.format(patterns=[f"*{kind}" for kind in group]))
    if len(in_order) > _NAMED:
        parts.append(f"{sum(kinds[kind] for kind in in_order[_NAMED:]):,} of {len(in_order) - _NAMED} other kinds")
    return f"left out: {'; '.join(parts)}"


def _advice(kind: str) -> str:
    endings = PurePosixPath(f"x{kind}").suffixes
    if endings and endings[0] in _ASKED:
        return ": also: {patterns} reads them"
    if any(ending in _DOCUMENTS.split() for ending in endings):
        return ": convert them first"
    return ": unpack them first" if archive_named(f"x{kind}") else ""
