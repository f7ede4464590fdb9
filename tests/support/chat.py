"""Conversations, and a tokenizer with a chat template, that tests share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from headway.text.tokenizing.train import train_on

#: ChatML, which renders turn by turn; the second one marks what the assistant says.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["how", "do", "the", "rivers", "run", "down", "to", "wide", "seas", "while", "rain", "falls", "on", "hills"]


#: Special tokens of ChatML, and of templates that begin a turn with its role.
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>")


@cache
def _vocabulary() -> bytes:
    tokenizer = train_on([" ".join(WORDS), "user assistant system\n"] * 3, 300)
    spec = json.loads(tokenizer.content)
    for name in SPECIAL:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        number = max([*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])]) + 1
        spec["added_tokens"].append({"id": number, "content": name, "special": True, **flags})
    return json.dumps(spec).encode()


def chat_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """Write a tokenizer with a chat template to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(_vocabulary())
    settings: dict[str, Any] = {"eos_token": "<|endoftext|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def conversation(number: int, turns: int = 2) -> list[dict[str, str]]:
    """Messages that no other number has: a question and an answer for each turn."""
    said = [" ".join(WORDS[(number * 3 + place * 5 + k) % len(WORDS)] for k in range(3 + place)) for place in range(9)]
    return [
        message
        for turn in range(turns)
        for message in (
            {"role": "user", "content": f"{number}: {said[2 * turn]}"},
            {"role": "assistant", "content": said[2 * turn + 1]},
        )
    ]


def write_records(path: Path, records: list[Any]) -> Path:
    """Write one record per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path
