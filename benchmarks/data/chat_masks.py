"""What is trained of conversations, next to TRL: for every chat template in its package, the tokens that differ.

TRL has a second template for most of them, with `{% generation %}` around what is trained. Headway reads the first one,
as models have it. Both encode the same conversations with one small tokenizer, which has the special tokens of the
template. Needs the extra `hf`, and TRL's package, of which only the templates are read:

    pip download trl --no-deps && unzip trl-*.whl -d trl
    python benchmarks/data/chat_masks.py trl/trl/chat_templates
    python benchmarks/data/chat_masks.py --only phi glm
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import HeadwayError
from headway.data.tokenizing.chat import ChatEncoder
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.tokenizing.train import train_on

SPECIAL = re.compile(
    r"<[|｜][^|｜<>\s'\"]{1,40}[|｜]?>|<[a-z_]{1,40}\|>|\[gMASK\]|</?s>|<(?:bos|eos|sop|image|video|audio|[a-z]+_of_[a-z]+)>"
)
MARKS = re.compile(r"\{%-?\s*generation")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
QUESTION, ANSWER = {"role": "user", "content": "how are you"}, {"role": "assistant", "content": "well and wide"}
MORE = [{"role": "user", "content": "and the rivers"}, {"role": "assistant", "content": "they run down"}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [QUESTION, ANSWER],
    "two turns": [QUESTION, ANSWER, *MORE],
    "assistant first": [ANSWER, *MORE],
    "tools": [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "it rains"},
    ],
}


def main() -> None:
    """Print a table in Markdown: a line for each template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("templates", nargs="?", type=Path, help="folder with the templates; that of the installed TRL")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="templates whose name holds one of these"
    )
    options = parser.parse_args()
    folder = options.templates or installed_templates()
    if folder is None:
        parser.error("TRL is not installed: name a folder with its templates, as the examples above do")
    print("| template | " + " | ".join(CONVERSATIONS) + " |\n" + "|---" * (len(CONVERSATIONS) + 1) + "|")
    for file in sorted(folder.glob("*.jinja")):
        if file.stem.endswith("_training") or not any(part in file.stem for part in options.only):
            continue
        marked = file.with_name(f"{file.stem}_training.jinja")
        cells = compared(dated(file.read_text()), dated((marked if marked.exists() else file).read_text()))
        print(f"| {file.stem} | " + " | ".join(cells) + " |")


def installed_templates() -> Path | None:
    """Find the templates of TRL without loading it."""
    found = importlib.util.find_spec("trl")
    return Path(found.origin).parent / "chat_templates" if found is not None and found.origin else None


def dated(template: str) -> str:
    """Put a date in place of today's, which Headway refuses."""
    template = template.replace("strftime_now is defined", "true")
    return re.sub(r"strftime_now\([^)]*\)", "'26 Jul 2024'", template)


def compared(template: str, marked: str) -> list[str]:
    """Describe for each conversation what the masks of a template, and of the one with marks, have apart."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(
            Path(folder), template, ["<s>", *sorted({*SPECIAL.findall(template + marked)} - {"<s>"})]
        )
        encoder = ChatEncoder(Path(folder), tokenizer, "tokenizer")
        cells = []
        for messages in CONVERSATIONS.values():
            record = json.dumps({"messages": messages})
            try:
                ids, _, mask = encoder.encode_masked([record])
            except HeadwayError as error:
                cells.append(f"refused: {error.what.partition(' (chat template')[0].partition(': give a')[0]}")
                continue
            cells.append(difference(encoder._library, ids.tolist(), mask.tolist(), messages, marked))
        return [cell.replace("|", "\\|").replace("\n", "⏎") for cell in cells]


def write_tokenizer(folder: Path, template: str, special: list[str]) -> Tokenizer:
    """Write a byte-level tokenizer with special tokens and a template to a folder."""
    texts = [" ".join(str(message["content"]) for message in messages) for messages in CONVERSATIONS.values()]
    spec = json.loads(train_on(texts * 3, 300).content)
    number = max([*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])]) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    known = {token["content"] for token in spec["added_tokens"]}
    for place, name in enumerate(name for name in special if name not in known):
        spec["added_tokens"].append({"id": number + place, "content": name, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    settings = {"bos_token": special[0], "eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder)


def difference(library: Any, ids: list[int], mask: list[bool], messages: list[dict[str, Any]], marked: str) -> str:
    """Describe how our mask differs from the one that transformers gives for a template with marks."""
    if MARKS.search(marked) is None:
        return f"ours: {shown(library, ids, mask)}; TRL has none"
    try:
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": marked}
        found = library.apply_chat_template(messages, **options)
    except Exception as error:  # whatever a template raises
        return f"ours: {shown(library, ids, mask)}; TRL's template fails: {' '.join(str(error).split())[:60]}"
    theirs, their_mask = found["input_ids"], [bool(bit) for bit in found["assistant_masks"]]
    ours_only, theirs_only, other = np.zeros(len(ids), bool), np.zeros(len(theirs), bool), False
    for kind, a, b, c, d in difflib.SequenceMatcher(None, ids, theirs, autojunk=False).get_opcodes():
        if kind == "equal":
            ours_only[a:b] = np.array(mask[a:b]) & ~np.array(their_mask[c:d])
            theirs_only[c:d] = ~np.array(mask[a:b]) & np.array(their_mask[c:d])
        else:
            ours_only[a:b], theirs_only[c:d] = mask[a:b], their_mask[c:d]
            other |= library.decode(ids[a:b]) != "<|endoftext|>"
    parts = [f"only {who}: {text}" for who, text in (
        ("ours", shown(library, ids, ours_only.tolist())), ("TRL's", shown(library, theirs, theirs_only.tolist()))
    ) if text]  # fmt: skip
    return ("other text; " if other else "") + ("; ".join(parts) or "equal")


def shown(library: Any, ids: list[int], mask: list[bool]) -> str:
    """Show the trained stretches of a text."""
    runs, run = [], list[int]()
    for number, trained in [*zip(ids, mask, strict=True), (0, False)]:
        if trained:
            run.append(number)
        elif run:
            runs.append(f"`{library.decode(run)}`")
            run = []
    return " ".join(runs)


if __name__ == "__main__":
    main()
