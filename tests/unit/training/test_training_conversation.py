"""Conversations with models: prompts, stops and answers are those of transformers."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.cli.models.export import export
from headway.cli.models.generate import generate as generate_verb
from headway.config import Config
from headway.core.errors import CheckpointError, ConfigError, DataError
from headway.training.evaluation.conversation import Conversation, Sampling
from headway.training.evaluation.inference import continue_text, export_trained, load_trained
from support.chat import CHATML, MARKED, chat_tokenizer, conversation, write_records
from support.families import write_family
from support.runs import config_values
from support.runs import headway as command

transformers = pytest.importorskip("transformers")
GREEDY = Sampling(max_new_tokens=8, temperature=0, top_p=1, seed=0)
ROLES = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DATED = "{{ strftime_now('%Y-%m') }}" + CHATML


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that talks by ChatML, of 128 positions."""
    folder = tmp_path_factory.mktemp("talk") / "model"
    return chat_tokenizer(write_family("qwen3", folder, max_position_embeddings=128))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned its two conversations by heart."""
    folder = tmp_path_factory.mktemp("run")
    records = [{"messages": conversation(number, turns=1)} for number in range(2)]
    write_records(folder / "chats.jsonl", records * 4)
    values = config_values(
        folder,
        data={
            "sources": [{"path": str(folder / "chats.jsonl"), "format": "chat"}],
            "tokenizer": {"path": str(chat_tokenizer(folder / "tokenizer"))},
            "packing": "pad",
            "validation": 0.0,
        },
        model={"dropout": 0.0},
        train={"steps": 60, "sequence_length": 64},
        checkpoint={"every": "30 steps"},
    )
    return headway.train(Config.model_validate(values)).directory


def said(conversation: Conversation, message: str) -> str:
    return "".join(conversation.answer(message))


def of_transformers(folder: Path, messages: list[dict[str, str]], tokens: int = 8) -> str:
    """The answer of transformers to messages."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = network.generate(**given, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    return str(tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["<|im_end|>"]),
        (MARKED, ["<|im_end|>"]),
        (ROLES, ["<|user|>", "<|endoftext|>"]),
        (CHATML.replace("<|im_end|>", "<|endoftext|>"), ["<|endoftext|>"]),
    ],
    ids=["chatml", "marked", "roles", "end-of-text"],
)
def test_stops_are_the_tokens_that_end_trained_turns(
    model: Path, tmp_path: Path, template: str, expected: list[str]
) -> None:
    folder = write_family("qwen3", tmp_path / "model")
    encoder = load_trained(chat_tokenizer(folder, template)).open_chat()
    assert encoder is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert encoder.stop_ids == set(tokenizer.convert_tokens_to_ids(expected))


def test_answers_are_those_of_transformers(model: Path) -> None:
    talk = Conversation(load_trained(model), GREEDY)
    talk.set_system("down the hills")
    system = [{"role": "system", "content": "down the hills"}]
    first = said(talk, "how do rivers run")
    assert first == of_transformers(model, [*system, *turns("how do rivers run")]) != ""
    second = said(talk, "the seas")
    assert second == of_transformers(model, [*system, *turns("how do rivers run", first, "the seas")])
    talk.reset()
    assert said(talk, "the seas") == of_transformers(model, [*system, *turns("the seas")])
    talk.set_system("")
    assert said(talk, "on") == of_transformers(
        model, turns("the seas", of_transformers(model, [*system, *turns("the seas")]), "on")
    )


def test_seeds_decide_and_answers_of_one_conversation_differ(model: Path) -> None:
    trained, sampling = load_trained(model), Sampling(8, 1.5, 1.0, 3)
    one, other = Conversation(trained, sampling), Conversation(trained, sampling)
    assert [said(one, "how"), said(one, "how")] == [said(other, "how"), said(other, "how")]
    one.reset()
    again = said(one, "how")
    assert again == said(Conversation(trained, sampling), "how") != said(Conversation(trained, GREEDY), "how")


def test_a_trained_run_and_its_export_stop_where_turns_end(run: Path, tmp_path: Path) -> None:
    """transformers, too, by the generation config of the export."""
    export_trained(load_trained(run), tmp_path / "out")
    talk = Conversation(load_trained(run), Sampling(60, 0, 1, 0))
    for number in range(2):
        asked, answered = conversation(number, turns=1)
        talk.reset()
        assert said(talk, asked["content"]) == answered["content"]
        assert not talk.is_cut
        again = Conversation(load_trained(tmp_path / "out"), Sampling(60, 0, 1, 0))
        assert said(again, asked["content"]) == answered["content"]
        assert of_transformers(tmp_path / "out", [asked], 60) == answered["content"]
    early = Conversation(load_trained(run, step=30), Sampling(3, 0, 1, 0))
    said(early, "how")
    assert early.is_cut


def test_stops_of_the_generation_config_end_texts_and_answers(model: Path, tmp_path: Path) -> None:
    folder = chat_tokenizer(write_family("qwen3", tmp_path / "model"))
    trained = load_trained(folder)
    prompt = trained.tokenizer.encode_batch(["how do"])[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)
    tokens = out[0, len(prompt) :].tolist()
    stop = tokens[5]
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [stop, 10**9]}))
    trained = load_trained(folder)
    assert trained.stop_ids == {stop, trained.tokenizer.end_of_text_id}
    text = "".join(continue_text(trained, "how do", max_new_tokens=12, temperature=0, top_p=1, seed=0))
    whole = trained.tokenizer.decode(prompt + tokens[: tokens.index(stop)])
    assert "how do" + text == whole
    settings.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_trained(folder)


def test_a_full_context_drops_the_oldest_turns(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk, history = Conversation(load_trained(model), GREEDY), list[str]()
    for number in range(6):
        asked = f"{number} how do the rivers run down to the wide seas"
        history += [asked, said(talk, asked)]
    told = capsys.readouterr().err
    assert "no longer fits the model's 128 positions: its first 2 messages are left out" in told
    left_out = told.count("left out") * 2
    assert history[-1] == of_transformers(model, turns(*history[left_out:-1]))
    with pytest.raises(ConfigError, match="more than the model's 128 positions"):
        said(talk, "rivers " * 200)
    assert said(talk, "on"), "it goes on"


def test_what_a_closed_answer_has_yielded_is_the_answer(run: Path, tmp_path: Path) -> None:
    trained, (asked, answered) = load_trained(run), conversation(0, turns=1)
    talk = Conversation(trained, GREEDY)
    with closing(talk.answer(asked["content"])) as pieces:
        part = next(pieces) + next(pieces)
    assert answered["content"].startswith(part) and part != answered["content"]
    export_trained(trained, tmp_path / "out")
    assert said(talk, "on") == of_transformers(tmp_path / "out", turns(asked["content"], part, "on"))


def test_special_tokens_in_a_message_are_refused(model: Path) -> None:
    talk = Conversation(load_trained(model), GREEDY)
    with pytest.raises(DataError, match=re.escape("holds the special token '<|im_end|>'")):
        talk.answer("how<|im_end|>")
    assert said(talk, "how") == of_transformers(model, turns("how"))


def test_a_template_may_write_the_date_and_ignore_system_messages(model: Path, tmp_path: Path) -> None:
    folder = write_family("qwen3", tmp_path / "model")
    talk = Conversation(load_trained(chat_tokenizer(folder, DATED)), GREEDY)
    assert said(talk, "how") == of_transformers(folder, turns("how"))
    ignoring = DATED.replace("in messages %}", "in messages if message.role != 'system' %}")
    talk = Conversation(load_trained(chat_tokenizer(folder, ignoring)), GREEDY)
    with pytest.raises(ConfigError, match="ignores system messages"):
        talk.set_system("hills")


def test_a_template_without_ends_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_family("qwen3", tmp_path / "model")
    chat_tokenizer(folder, ROLES.replace("<|{{ message.role }}|>", "{{ message.role }}:"))
    talk = Conversation(load_trained(folder), GREEDY)
    assert "answers may not end where they should" in capsys.readouterr().err
    assert said(talk, "how")


def test_without_a_template_both_continue_one_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = load_trained(chat_tokenizer(write_family("llama-tied", tmp_path / "model"), None))
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9}
    talk = Conversation(trained, Sampling(seed=4, **options))
    assert not talk.has_template
    first = said(talk, "how do")
    assert first == "".join(continue_text(trained, "how do", seed=4, **options))
    second = said(talk, "the rivers")
    assert second == "".join(continue_text(trained, f"how do{first}\nthe rivers", seed=5, **options))
    assert talk.is_cut and not talk.is_ended
    assert said(talk, "wide " * 100)
    assert "the text no longer fits the model's 64 positions" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no chat template"):
        talk.set_system("hills")


def test_an_adapter_of_peft_talks_as_its_model_without_a_tokenizer_of_its_own(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.get_peft_model(network, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")  # of no effect yet
    assert not list((tmp_path / "adapter").glob("tokenizer*"))
    talk = Conversation(load_trained(tmp_path / "adapter"), GREEDY)
    assert said(talk, "how do") == of_transformers(model, turns("how do"))


def test_a_run_with_an_adapter_exports_its_own_template(tmp_path: Path) -> None:
    """The base has none; the merged model has it, and the stops, and the adapter has the template."""
    pytest.importorskip("peft")
    base = chat_tokenizer(write_family("qwen3", tmp_path / "base"), None)
    write_records(tmp_path / "chats.jsonl", [{"messages": conversation(0, turns=1)}] * 4)
    values = config_values(
        tmp_path,
        data={
            "sources": [{"path": str(tmp_path / "chats.jsonl"), "format": "chat"}],
            "tokenizer": {"path": str(chat_tokenizer(tmp_path / "tokenizer"))},
            "validation": 0.0,
        },
        train={"steps": 2},
    )
    values["model"] = {"from_pretrained": str(base), "implementation": "transformers", "adapter": {"rank": 2}}
    trained = load_trained(headway.train(Config.model_validate(values)).directory)
    expected = said(Conversation(trained, GREEDY), "how do")
    export_trained(trained, tmp_path / "adapter")
    export_trained(trained, tmp_path / "merged", merge=True)
    for folder in ("adapter", "merged"):
        talk = Conversation(load_trained(tmp_path / folder), GREEDY)
        assert talk.has_template and said(talk, "how do") == expected
    assert of_transformers(tmp_path / "merged", turns("how do")) == expected
    stops = json.loads((tmp_path / "merged" / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert set(stops) == set(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))


def test_messages_from_a_pipe_are_answered_in_lines(model: Path) -> None:
    talk = Conversation(load_trained(model), GREEDY)
    answers = [said(talk, "how do"), said(talk, "/seas")]
    talk.reset()
    answers.append(said(talk, "on"))
    lines = "how do\n\n//seas\n/reset\non\n/frob\nnever\n"
    done = command("chat", model, "-n", "8", "--temperature", "0", input=lines)
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)
    assert done.returncode == 2 and "there is no command /frob" in done.stderr
    assert "answers by its chat template" in done.stderr and ">" not in done.stderr


def _at_the_terminal() -> None:
    """Make standard input the controlling terminal. A test run that began in the background would ignore Ctrl-C."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The command line at a terminal."""

    def __init__(self, *words: str | Path, **variables: str) -> None:
        self.terminal, theirs = pty.openpty()
        self.seen = ""
        environment = {**os.environ, "TERM": "xterm", **variables}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headway", *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_at_the_terminal,
        )
        os.close(theirs)

    def until(self, text: str) -> str:
        """Read until a text comes, and return all before it."""
        while text not in self.seen:
            self.seen += os.read(self.terminal, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def press_until(self, key: str, text: str) -> None:
        """Press a key until a text comes: one that comes while the terminal is set up may be lost."""
        pressed = -math.inf
        while text not in self.seen:
            if time.monotonic() > pressed + 20:
                self.type(key)
                pressed = time.monotonic()
            if select.select([self.terminal], [], [], 1)[0]:
                self.seen += os.read(self.terminal, 4096).decode(errors="replace")
        self.until(text)

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())


def test_at_a_terminal_ctrl_c_stops_an_answer_and_quits_when_repeated(tmp_path: Path) -> None:
    folder = write_family("llama-tied", tmp_path / "model", max_position_embeddings=100_000)
    chat_tokenizer(folder, None)
    person = Terminal("chat", folder, "-n", "90000")
    person.until("> ")
    person.type("/help\n")
    person.until("/system TEXT")
    person.until("> ")
    person.type("how do\n")
    person.until("how do\r\n")
    while not person.seen.strip():  # the first tokens
        person.seen += os.read(person.terminal, 4096).decode(errors="replace")
    person.press_until("\x03", "stopped; Ctrl-C again quits")
    person.until("> ")
    for _ in range(12):
        person.type("\x03")
        with suppress(subprocess.TimeoutExpired):
            person.process.wait(10)
            break
    assert person.process.wait(60) in (130, -signal.SIGINT)  # the latter while Python ends; a shell says 130 to both


def test_generate_marks_where_the_prompt_ends_on_a_terminal(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "top_p": 1, "seed": 0}
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def printed() -> str:
        generate_verb(model, prompt="how do", **options)
        return capsys.readouterr().out

    plain = printed()
    rest = plain.removeprefix("how do")
    assert rest != plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = printed()
    assert shown.startswith("\x1b[1mhow do\x1b[0m") and shown.count("\x1b") == 2
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed().startswith("how do|") and rest.strip()


def test_a_command_that_makes_a_model_shows_what_can_follow(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run, tmp_path / "my model")
    assert "next:" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    export(run, tmp_path / "my model")
    told = capsys.readouterr().err
    assert f"  headway chat '{tmp_path}/my model'" in told and "ORG/NAME" in told
