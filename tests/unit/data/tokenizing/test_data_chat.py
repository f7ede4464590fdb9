"""Conversations: which tokens are trained, what is refused, and the bytes of their stores.

Right values come from transformers' own mask of a template that marks what the assistant says.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config import Config, resolve
from headway.config.sections.data import DataConfig
from headway.core.errors import ConfigError, DataError
from headway.core.types import IGNORE_TARGET
from headway.data.feeding.micro_batches import micro_batch_of
from headway.data.feeding.rows import open_rows
from headway.data.first_use import WrongShardError
from headway.data.loss_mask import MASK
from headway.data.store import SKIPPED, TokenStore
from headway.data.tokenizing.chat import ChatEncoder, _Renderer
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.text.preparing import records
from headway.text.preparing.prepare import prepare
from headway.text.reading import sources as source_module
from support.chat import CHATML, MARKED, chat_tokenizer, conversation, write_records
from support.runs import store_contents

transformers = pytest.importorskip("transformers")
# As templates of models that think: earlier answers lose what the last one has.
ANSWER = "{{ message.content }}<|im_end|>\n"
MARKED_ANSWER = (
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
)
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}so: {% endif %}" + ANSWER + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nso: {% endif %}"
)
#: Drops thoughts before the last question; with marks where GEN and END stand.
DROPPING = """
{%- set last = namespace(index=-1) %}
{%- for message in messages[::-1] %}
    {%- if last.index < 0 and message.role == 'user' %}
        {%- set last.index = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}GEN
        {%- if loop.index0 > last.index and '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].split('<think>')[-1] %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content.split('</think>')[-1].lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' + call | tojson }}
        {%- endfor %}
        {{- '<|im_end|>' }}END
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n' + message.content }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def chat_config(records: list[Any] | None, template: str | None = CHATML, **values: Any) -> DataConfig:
    if records is not None:
        write_records(Path("chats.jsonl"), records)
    values = {
        "sources": [{"path": "chats.jsonl", "format": "chat"}],
        "store": "store",
        "tokenizer": {"path": str(chat_tokenizer(Path("tokenizer"), template))},
        "validation": 0,
        **values,
    }
    return DataConfig.model_validate(values)


def prepared(records: list[Any] | None, template: str | None = CHATML, **values: Any) -> TokenStore:
    data = chat_config(records, template, **values)
    prepare(data, workers=1)
    store = TokenStore.open(data.store)
    assert not store.verify()
    return store


def documents_of(store: TokenStore, split: str = "train", source: str = "chats") -> list[tuple[list[int], list[bool]]]:
    bounds = store.documents(split, source).astype(int).tolist()
    found = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):  # noqa: RUF007
        mask = store.read_mask(split, source, start, end - start)
        assert mask is not None
        found.append((store.read(split, source, start, end - start).tolist(), mask.tolist()))
    return found


def of_transformers(
    conversations: list[list[dict[str, Any]]], template: str = MARKED
) -> list[tuple[list[int], list[bool]]]:
    """Encode by the template that marks what is trained, and end each with an end of text that is not."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_tokenizer(Path("marked"), template))
    found = []
    for messages in conversations:
        out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        found.append(([*out["input_ids"], tokenizer.eos_token_id], [*map(bool, out["assistant_masks"]), False]))
    return found


CONVERSATIONS = [conversation(number, turns=1 + number % 3) for number in range(12)]
RECORDS = [{"messages": messages} for messages in CONVERSATIONS]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_mask_is_that_of_transformers(template: str) -> None:
    store = prepared(RECORDS, template)
    expected = of_transformers(CONVERSATIONS)
    assert documents_of(store) == expected
    trained = sum(sum(mask) for _, mask in expected)
    assert store.manifest["sources"][0]["trained_tokens"] == trained > 0


def test_all_layouts_become_the_same_conversation() -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "how do\n\nrivers run"},
        {"role": "assistant", "content": "down to seas"},
    ]
    layouts = [
        {"messages": messages, "source": "elsewhere"},
        {"messages": [{**m, "name": None, "content": [{"type": "text", "text": m["content"]}]} for m in messages]},
        {"system": "be kind", "conversations": [{"from": "human", "value": "how do\n\nrivers run"}, messages[2]]},
        {
            "conversations": [
                {"from": "system", "value": "be kind"},
                {"from": "user", "value": "how do\n\nrivers run"},
                {"from": "gpt", "value": "down to seas"},
            ]
        },
        {"system": "be kind", "instruction": "how do", "input": "rivers run", "output": "down to seas"},
        {"system": "be kind", "instruction": "how do\n\nrivers run", "output": "down to seas"},
    ]
    found = documents_of(prepared(layouts))
    assert found == of_transformers([messages]) * len(layouts)


BAD: list[tuple[Any, str]] = [
    ({"messages": "hello"}, "field 'messages' holds str, not a list of messages"),
    ({"messages": [7]}, "message 1 holds int, not an object with a role"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "message 1 has the role 'narrator'; there are: assistant"),
    ({"messages": [{"role": "user"}]}, "message 1 has no content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1 has a part that is no text: 'image'"),
    ({"messages": [{"role": "user", "content": "x"}]}, "no turn of the assistant"),
    ({"instruction": "", "output": "x"}, "field 'instruction' is empty"),
    ({"instruction": "x", "output": 7}, "field 'output' holds int, not text"),
    ({**RECORDS[0], "tools": "[{"}, "field 'tools' is not valid JSON"),
    ({**RECORDS[0], "tools": ["x"]}, "field 'tools' is not a list of objects"),
    ({"messages": [*CONVERSATIONS[0], {"role": "user", "content": "\ud800"}]}, "not valid UTF-8"),
    ({"messages": [{"role": "user", "content": "<|im_end|>"}, *CONVERSATIONS[0]]}, "the special token '<|im_end|>'"),
    (
        {
            "messages": [
                *CONVERSATIONS[0],
                {"role": "assistant", "content": "x", "tool_calls": [{"role": "<|im_end|>"}]},
            ]
        },
        "the special token '<|im_end|>'",
    ),
    ({**RECORDS[0], "tools": [{"properties": {"a<|im_start|>": {}}}]}, "the special token '<|im_start|>'"),
    (
        {"text": "x"},
        "no conversation: none of the fields messages, conversations, instruction and output, or prompt and completion",
    ),
]


def test_records_that_are_no_conversations_are_counted_and_named() -> None:
    store = prepared([*RECORDS, *(record for record, _ in BAD)], bad_documents="skip")
    listed = [json.loads(line) for line in (store.path / SKIPPED).read_text().splitlines()]
    listed.sort(key=lambda entry: int(entry["where"].split(":")[1]))
    assert [entry["where"] for entry in listed] == [f"chats.jsonl:{13 + number}" for number in range(len(BAD))]
    for entry, (_, reason) in zip(listed, BAD, strict=True):
        assert reason in entry["reason"]
    assert documents_of(store) == of_transformers(CONVERSATIONS)
    with pytest.raises(DataError, match="has the role 'narrator'") as caught:
        prepared([*RECORDS, BAD[2][0]], store="other")
    assert caught.value.where == "chats.jsonl:13"


def test_turns_that_change_when_others_follow_are_those_that_the_loop_writes() -> None:
    """Right values come from the same template with marks, and transformers' own mask."""
    store = prepared(RECORDS, THINKING)
    # What the prompt gives is not trained, nor what follows it by the template.
    assert documents_of(store) == of_transformers(CONVERSATIONS, THINKING.replace(ANSWER, MARKED_ANSWER))


THOUGHTFUL = [
    {"role": "user", "content": "how do the rivers run"},
    {"role": "assistant", "content": "<think>\nrain\n</think>\n\n", "tool_calls": [{"name": "sea"}, {"name": "fall"}]},
    {"role": "tool", "content": "wide"},
    {"role": "tool", "content": "down"},
    {"role": "assistant", "content": "<think>\nhills\n</think>\n\ndown to wide seas"},
    {"role": "user", "content": "while rain falls"},
    {"role": "assistant", "content": "<think>\nfalls\n</think>\n\non hills", "tool_calls": [{"name": "sea"}]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "run"},
]


def test_thoughts_that_a_template_drops_are_no_part_of_what_is_trained() -> None:
    """Thoughts before the last question are dropped, and neighbouring answers of tools are one turn (as in Qwen3)."""
    store = prepared([{"messages": THOUGHTFUL}], DROPPING.replace("GEN", "").replace("END", ""))
    marked = DROPPING.replace("GEN", "{%- generation %}").replace("END", "{%- endgeneration %}")
    assert documents_of(store) == of_transformers([THOUGHTFUL], marked)
    ids, mask = documents_of(store)[0]
    trained = transformers.AutoTokenizer.from_pretrained("tokenizer").decode(np.array(ids)[mask])
    assert "hills\n</think>" not in trained and "falls\n</think>" in trained and trained.count("<|im_end|>") == 4


@pytest.mark.parametrize(
    "template",
    [
        # The text of a turn depends on what follows, and ...
        THINKING.replace(
            "<|im_end|>\n{% endfor %}", "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
        ).replace(
            "{% for message in messages %}",
            "{% for message in messages %}{% if not loop.first %}<|im_end|>\n{% endif %}",
        ),  # a loop writes the end of one turn with the next
        THINKING.replace("{% for", "{% set text %}{% for").replace("endfor %}", "endfor %}{% endset %}{{ text[3:] }}"),
        THINKING + "{% for message in messages %}{{ message.content }}{% endfor %}",  # two loops write it
        "{% for turn in messages|map(attribute='content') %}{{ turn }}{{ loop.length }}{% endfor %}",  # none does
    ],
)
def test_a_template_whose_turns_cannot_be_found_is_named_with_the_record(template: str) -> None:
    with pytest.raises(DataError, match="renders the messages up to number 2 otherwise when more follow") as caught:
        prepared(RECORDS, template)
    assert caught.value.where in ("chats.jsonl:1", "chats.jsonl:2")
    assert "chat template of tokenizer" in caught.value.what and "{% generation %}" in caught.value.what


#: Templates that end a turn in different ways, and the same ones with marks around what is trained.
ENDS = {
    # As GLM-4.5: the next role's token ends a turn.
    "next role": (
        "{% for m in messages %}<|{{ m.role }}|>{{ '\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ '\n' + m.content }}"
        "{% if not loop.last %}<|user|>{% endif %}{% endgeneration %}"
        "{% else %}{% if loop.first %}<|user|>{% endif %}{{ '\n' + m.content }}{% endif %}{% endfor %}",
    ),
    # As Vicuna: plain text begins turns, and the end of the text ends one.
    "end of text": (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT: {% endif %}",
        "{% for m in messages %}{{ m.role | upper }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}",
    ),
    # As Phi-3 and Phi-4-mini: the conversation is closed where no prompt is asked for.
    "closed": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
        "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}{{ eos_token }}",
    ),
    "closed without line breaks": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}",
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{{ eos_token }}",
    ),
    # As Qwen2: the first message has a preamble.
    "preamble": (
        "{% for m in messages %}{% if loop.first %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_start|>system\nbe kind<|im_end|>\n" + MARKED,
    ),
}


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("first", ["user", "assistant"])
def test_a_turn_ends_with_the_token_at_which_a_model_stops(kind: str, first: str) -> None:
    """Right values come from a template with marks. The last turn of GLM-4.5 ends with the end of the text."""
    template, marked = ENDS[kind]
    conversations = CONVERSATIONS if first == "user" else [messages[1:] for messages in CONVERSATIONS]
    expected = of_transformers(conversations, marked)
    if kind == "next role":
        expected = [(ids, [*mask[:-1], True]) for ids, mask in expected]
    if "closed" in kind:  # with the end of the text, that nothing is appended to
        expected = [(ids[:-1], mask[:-1]) for ids, mask in expected]
    assert documents_of(prepared([{"messages": messages} for messages in conversations], template)) == expected


def test_an_assistant_that_speaks_before_any_user() -> None:
    """As Qwen3.5, whose template renders no messages without one."""
    template, messages = ENDS["preamble"][0], [{"role": "system", "content": "be wide"}, *CONVERSATIONS[1][1:]]
    users = "messages | selectattr('role', 'equalto', 'user') | list"
    check = "{% if not USERS %}{{ raise_exception('no user') }}{% endif %}".replace("USERS", users)
    assert documents_of(prepared([{"messages": messages}], check + template)) == of_transformers(
        [messages], ENDS["preamble"][1]
    )


PLAIN = ENDS["end of text"][0].replace("{{ eos_token }}", "")


def test_turns_that_nothing_ends_are_refused_by_name() -> None:
    """Plain text after a turn is no token at which a model stops; where nothing follows, the end of the text is."""
    store = prepared(RECORDS[:1], PLAIN, bad_documents="skip")
    ids, mask = documents_of(store)[0]
    trained = transformers.AutoTokenizer.from_pretrained("tokenizer").decode(np.array(ids)[mask])
    assert trained.lstrip() == f"{CONVERSATIONS[0][1]['content']}\n<|endoftext|>"
    with pytest.raises(DataError, match="no special token after message 2, which the assistant says") as caught:
        prepared(RECORDS[1:2], PLAIN)
    assert "eos_token" in caught.value.what
    twice = [*CONVERSATIONS[0], {"role": "assistant", "content": "rain falls"}]
    with pytest.raises(DataError, match="no special token after message 2"):  # the next role's is no end then
        prepared([{"messages": twice}], ENDS["next role"][0])


CONTENT = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"


def test_marks_without_a_token_that_ends_a_turn() -> None:
    """Such a model would never stop: refused, unless the end of the text follows, which is trained then."""
    with pytest.raises(DataError, match="ends without a special token, so a model would not learn to stop"):
        prepared(RECORDS[:1], CONTENT + "{% endgeneration %}<|end|>{% else %}{{ m.content }}{% endif %}{% endfor %}")
    template = CONTENT + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    expected = [(ids, [*mask[:-1], True]) for ids, mask in of_transformers(CONVERSATIONS[:1], template)]
    assert documents_of(prepared(RECORDS[:1], template)) == expected


CALLS = [{"name": "sea"}, {"name": "fall"}]


@pytest.mark.parametrize(
    ("template", "content", "calls", "words"),
    [
        (CHATML, "", CALLS[:1], "ignores tool_calls of message 2, so its turn comes out empty"),
        (CHATML, "rain", CALLS, "ignores tool_calls of message 2, so its turn comes out without them"),
        (MARKED, "", CALLS[:1], "ignores tool_calls of message 2, so its turn comes out empty"),
        (
            CHATML.replace("}}<", "}}{{ (message.tool_calls or [1])[0] }}<"),
            "rain",
            CALLS,
            "ignores the last of the tool",
        ),
    ],
)
def test_tool_calls_that_a_template_ignores_are_named(
    template: str, content: str, calls: list[dict[str, str]], words: str
) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": calls}
    with pytest.raises(DataError, match=words):
        prepared([{"messages": [CONVERSATIONS[0][0], turn, *CONVERSATIONS[1]]}], template)


def test_what_the_assistant_says_and_a_template_leaves_out_is_named() -> None:
    """As templates for images do, which take the content as a list of parts."""
    parts = "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    with pytest.raises(
        DataError, match="writes nothing of what the assistant says in message 2, so its turn comes out"
    ):
        prepared(RECORDS[:1], CHATML.replace("{{ message.content }}", parts))


def test_an_assistant_that_nothing_tells_from_its_preamble_is_refused() -> None:
    template = "{% for m in messages %}{{ m.role }}: the assistant: {{ m.content }}{{ eos_token }}{% endfor %}"
    messages = [{"role": "assistant", "content": "assistant: the assistant: rain"}, *CONVERSATIONS[0]]
    with pytest.raises(DataError, match="it begins with the assistant, and no loop of the template writes"):
        prepared([{"messages": messages}], template + "{% if add_generation_prompt %}assistant: {% endif %}")


def repeated(change: str, first: str = "'ab'") -> str:
    """A template that changes a value sixty times."""
    loop = "{% for i in range(60) %}{% set n.x = CHANGE %}{% endfor %}".replace("CHANGE", change)
    return "{% set n = namespace(x=FIRST) %}".replace("FIRST", first) + loop + "{{ n.x }}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 10 ** 10 }}", "repeats by a number"),
        ("{{ ([1] * 10 ** 6) * 10 ** 6 }}", "far more text"),
        ("{{ 7 ** 999999999 }}", "integers of more than"),
        (repeated("n.x * n.x", "7"), "integers of more than"),
        (repeated("n.x ~ n.x"), "far more text"),
        (repeated("n.x + n.x"), "far more text"),
        (repeated("[n.x, n.x]"), "far more text"),
        (repeated("dict(a=n.x, b=n.x)"), "far more text"),
        (
            "{% set n = namespace(x=1) %}{% macro m() %}{% set n.x = varargs %}{% endmacro %}"
            "{% for i in range(60) %}{{ m(n.x, n.x) }}{% endfor %}{{ n.x }}",
            "far more text",
        ),
        ("{% set n = namespace() %}{% set n.x = n %}{{ n }}", "far more text"),
        ("{{ 'a' | center(10 ** 10) }}", "repeats by a number"),
        ("{{ 'a'.ljust(10 ** 10) }}", "repeats by a number"),
        ("{{ {'a': 1} | tojson(indent=10 ** 10) }}", "repeats by a number"),
        ("{{ '%999999999d' % 1 }}", "pads a text to a width"),
        ("{{ '%*d' | format(999999999, 1) }}", "pads a text to a width"),
        ("{{ '{:>999999999}'.format(1) }}", "pads a text to a width"),
        ("{{ 'a' | replace('a', 'b' * 10 ** 5) | replace('b', 'c' * 10 ** 5) }}", "far more text"),
        ("{{ ('b' * 10 ** 5).join('c' * 10 ** 5) }}", "far more text"),
        ("{{ range(99999) | map('default') | join('b' * 10 ** 5) }}", "far more text"),
        ("{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}", "far more text"),
        ("{% set a = 'a' * 9999 %}{% for i in range(99999) %}{{ a }}{% endfor %}", "far more text"),
        ("{% set a = 'a' * 9999 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}", "far more text"),
        ("{% set a = 'a' * 9999 %}{% for i in range(99999) %}{% set b = a in a %}{% endfor %}", "far more text"),
        ("{% for i in range(9999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", "far more text"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}", "far more text"),
        ("{{ ('f' * 5000) | int(0, 16) // 3 }}", "integers of more than"),
        ("{{ 3 - 0x" + "f" * 2000 + " }}", "integers of more than"),
        ("{{ ('f' * 5000) | int(0, 16) is divisibleby 3 }}", "integers of more than"),
        ("{% set a = 'A' * 9999 %}{% for i in range(9999) if a is upper %}{% endfor %}", "far more text"),
        ("{% set a = 'a' * 9999 %}{% for i in range(9999) if a is greaterthan a %}{% endfor %}", "far more text"),
        ("{{ ('<!---->' * 9999) | striptags }}", "far more text"),
        ("{{ ('(' * 9999) | urlize }}", "far more text"),
        ("{{ ('a' * 9999) | wordwrap(1) }}", "far more text"),
        ("{{ ('a' * 9999).encode('punycode') }}", "far more text"),
        ("{{ ([[1]] * 999) | sum(start=[]) }}", "far more text"),
        (
            "{% set a = (1,) * 9999 %}{% set b = {a: 1} %}{% for i in range(99) %}{% set c = b[a] %}{% endfor %}",
            "far more",
        ),
        ("{% set a = (1,) * 999 %}{% for i in range(99) %}{% set c = {}.get(a) %}{% endfor %}", "far more text"),
        (repeated("n.x | map(attribute='real')", "range(9999)"), "far more text"),
        ("{{ 'a' * 2**20 }}{% for i in range(9999) %}{% generation %}{% endgeneration %}{% endfor %}", "far more text"),
    ],
)
def test_what_a_template_takes_is_bounded(template: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    from headway.data.tokenizing import templates

    monkeypatch.setattr(templates, "_WORK", 2**22)
    with pytest.raises(RuntimeError, match=words), templates.bounded(templates.Rendering(100)):
        render_jinja_template([CONVERSATIONS[0]], chat_template=template)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{{ messages | tojson(indent=2) }} {{ '%05.1f|%s' % (7, 'a') }} {{ '{:>5}'.format('x') }} {{ 3 ** 7 % 5 }}",
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content | replace('r', 'ss') | upper }}"
        "{{ m.content.split(' ')[1:] | join('-') }}{{ loop.cycle('a', 'b') }}{% endfor %}{{ messages | length }}",
        "{% for k, v in messages[0].items() %}{{ k ~ v ~ loop.index }}{% else %}-{% endfor %}"
        "{% for m in messages if m.role in ('user', 'tool') recursive %}{{ m.role | title }}{% endfor %}",
        "{% macro f(a, b=2) %}{{ a }}{{ b * 'x' }}{{ caller() if caller }}{% endmacro %}{{ f(messages[0].role) }}"
        "{% call f(1) %}{{ [1, [2, messages[0].role]] }}{% endcall %}{% set n = namespace(a=1) %}"
        "{% set n.a = n.a + 1 %}{{ n.a }}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}"
        "{{ dict(a=1) }}{{ messages[0].content is string }}{{ 7 // 2 - 1.5 * 2 }}{{ nothing }}{{ nothing is defined }}",
    ],
)
def test_bounds_change_nothing_of_what_is_rendered(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    from headway.data.tokenizing.templates import Rendering, bounded, marked_spans

    expected = render_jinja_template([CONVERSATIONS[2]], chat_template=template)
    with bounded(Rendering(100)):
        assert render_jinja_template([CONVERSATIONS[2]], chat_template=template) == expected
    with bounded(Rendering(100, "\ue000")):
        marked = render_jinja_template([CONVERSATIONS[2]], chat_template=template)[0][0]
    assert marked_spans(marked, "\ue000")[0] == expected[0][0]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "cannot render it: roles must alternate"),
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}{% set k = j %}{% endfor %}{% endfor %}",
            "cannot render it: it works on far more text than a conversation of this size has",
        ),
        ("{{ strftime_now('%Y') }}", "give a chat_template.jinja with a date in place of strftime_now"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ messages | random }}", "No filter named 'random'"),
        ("{% if x %}", "cannot render it"),
        ("{{ messages[0].content }}", "renders the messages up to number 2 otherwise|writes nothing of what"),
    ],
)
def test_what_a_template_raises_is_explained(template: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        prepared(RECORDS[1:], template)
    assert caught.value.where == "chats.jsonl:1" and "chat template of tokenizer" in caught.value.what


def test_a_version_of_transformers_that_compiles_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.data.tokenizing import templates

    monkeypatch.setattr(templates, "_COMPILE", "_compile_elsewhere")
    with pytest.raises(ConfigError, match="does not compile chat templates where") as caught:
        prepared(RECORDS, bad_documents="skip")
    assert caught.value.where == f"transformers {transformers.__version__}" and caught.value.fix


def test_renderings_of_one_conversation_do_not_add_up_in_memory() -> None:
    folder = chat_tokenizer(Path("tokenizer"), "a" * 10**5 + CHATML)
    encoder, messages = ChatEncoder(folder, Tokenizer.load(folder), "tokenizer"), CONVERSATIONS[0] * 40
    tracemalloc.start()
    try:
        _, spans = encoder._spans(messages, json.dumps(messages), _Renderer(encoder._library, {}, 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(spans) == 40 and peak < 5 * 10**6  # of 120 texts


def test_special_tokens_in_messages_can_be_allowed() -> None:
    values = {"tokenizer": {"path": "tokenizer", "special_tokens_in_text": True}}
    store = prepared([{"messages": [{"role": "user", "content": "<|im_end|>"}, *CONVERSATIONS[0]]}], **values)
    assert store.tokens("train") > 0


def test_conversations_need_a_chat_template() -> None:
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        prepared(RECORDS, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokenizer": {}}, "need a tokenizer with a chat template"),
        ({"clean": ["deduplicate_lines"]}, "clean"),
        ({"dedup": {"paragraphs": True}}, "conversations have no paragraphs"),
        ({"sources": [{"path": "a.jsonl", "format": "chat", "field": "x"}]}, "found by their names"),
        ({"sources": [{"path": "stdlib:", "format": "chat"}]}, "has no conversations"),
    ],
)
def test_settings_that_conversations_cannot_have(values: dict[str, Any], words: str) -> None:
    data = {"sources": [{"path": "a.jsonl", "format": "chat"}], "tokenizer": {"path": "tokenizer"}, **values}
    with pytest.raises((ConfigError, ValueError), match=words):
        resolve(Config.model_validate({"data": data}), trains=False)


def test_bytes_do_not_depend_on_workers_or_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "PIECE_BYTES", 500)
    data = chat_config(RECORDS, validation=0.3)
    prepare(data, workers=1)
    prepare(data.model_copy(update={"store": Path("other")}), workers=2)
    contents = store_contents(Path("store"))
    assert contents == store_contents(Path("other"))
    assert sum(name.endswith(MASK) for name in contents) == 2
    assert prepare(data, workers=1).up_to_date


def test_another_template_is_prepared_again_and_only_that() -> None:
    first = prepared(RECORDS)
    Path("text.txt").write_text("rain falls on far hills " * 9)
    both = [{"path": "chats.jsonl", "format": "chat"}, "text.txt"]
    store = prepared(None, sources=both)
    assert not store.has_mask("train", "text") and store.read_mask("train", "text", 0, 3) is None
    assert store.shard_entries("train", "chats") == first.shard_entries("train", "chats")
    changed = prepared(None, CHATML.replace("<|im_end|>\n", "<|im_end|> "), sources=both)
    assert changed.shard_entries("train", "chats") != first.shard_entries("train", "chats")
    assert changed.shard_entries("train", "text") == store.shard_entries("train", "text")


def test_damage_to_a_mask_is_found() -> None:
    store = prepared(RECORDS)
    file = next(store.path.glob(f"train/*/*{MASK}"))
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1, *whole[1:]]))
    assert [problem for problem in store.verify() if MASK in problem and "SHA-256" in problem]
    checked = TokenStore.open(store.path)
    checker = checked.check_on_first_use()
    checked.read_mask("train", "chats", 0, 4)
    with pytest.raises(WrongShardError, match="its SHA-256 is not the manifest's"):
        checker.wait_verified(1, 60)
    file.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="bytes long"):
        TokenStore.open(store.path)
    assert not prepare(chat_config(None), workers=1).up_to_date  # it is made again
    assert file.read_bytes() == whole
    assert records.Records(store.path, store.path, 2).used == set()


@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
@pytest.mark.parametrize("document_mask", [False, True])
def test_targets_that_are_not_trained_are_ignored(packing: str, document_mask: bool) -> None:
    store = prepared(RECORDS)
    rows = open_rows(store, "train", "chats", 24, packing, document_mask=document_mask)
    numbers = np.arange(rows.count)
    batch = micro_batch_of(rows.read(numbers))
    without = micro_batch_of(_without_mask(rows.read(numbers)))
    masks: dict[tuple[int, ...], set[bool]] = {}
    for ids, mask in documents_of(store):
        for place in range(3, len(ids)):
            masks.setdefault(tuple(ids[place - 3 : place + 1]), set()).add(mask[place])
    trained = (batch["targets"] != IGNORE_TARGET).numpy()
    assert (batch["ids"] == without["ids"]).all() and trained.any()
    kept = without["targets"].numpy()
    for row, place in zip(*np.nonzero(kept != IGNORE_TARGET), strict=True):
        window = (*batch["ids"][row, max(0, place - 2) : place + 1].tolist(), int(kept[row, place]))
        if len(found := masks.get(window, ())) == 1:  # the place in its document is known
            assert trained[row, place] in found
    assert (batch["targets"].numpy()[trained] == kept[trained]).all()


def _without_mask(block: Any) -> Any:
    return type(block)(block.tokens, block.documents, block.masked, block.continued)


def test_part_of_a_shard_has_its_own_part_of_the_mask() -> None:
    store = prepared(RECORDS)
    file = store.shard_entries("train", "chats")[0]["file"]
    part = store.with_shards("train", {"chats": [f"{file}:3:7", f"{file}:9:10"]})
    whole = documents_of(store)
    assert documents_of(part) == [*whole[3:7], whole[9]]


def test_conversations_of_tables_and_python_are_those_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    expected = of_transformers(CONVERSATIONS)
    table = arrow.table({"id": list(range(12)), "messages": CONVERSATIONS, "tools": [None] * 12})
    parquet.write_table(table, "chats.parquet", row_group_size=5)
    feather.write_feather(table, "chats.arrow", chunksize=5)
    Path("own_chats.py").write_text(f"def all():\n    return {RECORDS!r}\n")
    for number, path in enumerate(("chats.parquet", "chats.arrow", "python:own_chats:all")):
        source = {"path": path, "format": "chat", "name": "chats"}
        assert documents_of(prepared(None, sources=[source], store=f"store-{number}")) == expected
    parquet.write_table(arrow.table({"text": ["x"]}), "chats.parquet")
    with pytest.raises(DataError, match="no conversations: none of the columns messages"):
        prepared(None, sources=[{"path": "chats.parquet", "format": "chat"}], store="store-4")


def test_tables_that_say_more_than_they_hold_are_malformed() -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from headway.text.reading.pieces import Piece
    from headway.text.reading.places import SourceFile
    from headway.text.reading.table_texts import TableTexts

    long = arrow.ListArray.from_arrays(arrow.array([0, 1, 2_000], arrow.int32()), arrow.nulls(2_000))
    batch = arrow.record_batch({"messages": long})
    piece = Piece(0, SourceFile("a", "", 0), "text", None, 0, template="chat:", most=1_000)
    found = list(TableTexts(piece, str).batches(batch))
    assert [bad.too_large for part in found for bad in part.bad] == [False, True]
    parquet.write_table(arrow.table({"messages": [[{"a": [b"x"], "b": {1: 2}.items() and 1}]]}), "a.parquet")
    with pytest.raises(DataError, match="message 1 has the role None"):
        prepared(None, sources=[{"path": "a.parquet", "format": "chat"}])


def test_a_preview_marks_what_is_trained(config: Callable[..., DataConfig]) -> None:
    from headway.config import resolve_lanes
    from support.feeds import preview

    prepared(RECORDS)
    data = chat_config(None, packing="pad").model_dump(mode="json")
    run = Config.model_validate({"data": data, "train": {"steps": 1, "sequence_length": 64, "global_batch": 4}})
    run = resolve(run)
    row = preview(run, resolve_lanes(run, 1), TokenStore.open("store"), 0).rows[0]
    assert row.marked is not None and row.trained is not None
    answer = next(m for m in CONVERSATIONS if m[0]["content"] in row.documents[0])[1]["content"]
    assert f"<|im_start|>assistant\n⟦{answer}<|im_end|>⟧\n" in row.marked[0]
    assert row.marked[0].replace("⟦", "").replace("⟧", "") == row.documents[0]
