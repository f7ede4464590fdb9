"""What comes next after a verb, shown to a person at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from headway.core.user_command import suggest_next

#: Verb -> the commands that may follow it, each with its purpose. `{name}` is an argument of the verb; a command with
#: one that was not given is left out. `{overrides}` are all of them. Verbs that know more of their result, such as
#: `train` and `export`, suggest it themselves.
STEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "doctor": (("train my-texts --minutes 10", "a model from a folder of text"),),
    "config new": (("config explain train", "what the keys mean"), ("train my.yaml", "if you wrote it to my.yaml")),
    "config show": (("config check {config} {overrides}", "check it"), ("config explain train", "what the keys mean")),
    "config check": (
        ("train {config} {overrides}", "start it"),
        ("plan {config} {overrides}", "its memory, time and cost on other machines"),
    ),
    "config explain": (("config check CONFIG {key}=VALUE", "try a value"),),
    "config presets": (("config show quickstart", "see one"), ("train quickstart", "start one")),
    "data prepare": (
        ("data inspect {config} {overrides}", "what is in it"),
        ("train {config} {overrides}", "train on it"),
    ),
    "data inspect": (("data verify {store}", "check its hashes"),),
    "data verify": (("data inspect {store}", "what is in it"),),
    "data report": (("data inspect {store}", "the same in a terminal"),),
    "data preview": (("train {config} {overrides}", "train on it"),),
    "data import": (("data inspect {output}", "what is in it"), ("train CONFIG data.store={output}", "train on it")),
    "tokenizer train": (
        ("tokenizer compare {config} {output}", "beside others"),
        ("train {config} data.tokenizer.path={output}", "train with it"),
    ),
    "tokenizer inspect": (("train CONFIG data.tokenizer.path={path}", "train with it"),),
    "tokenizer extend": (("train CONFIG model.from_pretrained={output}", "train the new tokens"),),
    "launch run": (("launch status RUN", "where it is"), ("launch logs RUN", "what it says")),
    "runs list": (("runs show RUN", "one of them"), ("ui {folder}", "their curves in a browser")),
    "runs show": (("report {run}", "its curves on a page"), ("chat {run}", "talk to its model")),
    "runs compare": (("ui runs", "their curves in a browser"),),
    "compare": (("ui runs", "their curves in a browser"),),
    "report": (("chat {run}", "talk to its model"), ("export {run}", "make a folder for transformers")),
    "ledger": (("checkpoints verify {run}", "check the hashes of its checkpoints"),),
    "checkpoints list": (("checkpoints verify {run}", "check their hashes"), ("eval {run} --step STEP", "one of them")),
    "checkpoints verify": (("checkpoints list {place}", "what there is"),),
    "models": (("train my-texts --size 30M", "train one on a folder of text"),),
    "eval": (("chat {model}", "talk to it"), ("benchmark {model}", "tasks of lm-eval")),
    "benchmark": (("chat {model}", "talk to it"),),
    "generate": (("chat {model}", "talk to it"), ("eval {model}", "its loss on held-out text")),
    "push": (("chat {model}", "talk to it"),),
    "plan": (("train {config} {overrides}", "start it here"), ("launch {config} --on TARGET", "or on a cluster")),
    "profile": (("train {config} {overrides}", "start it"),),
    "verify": (("train {config} {overrides}", "start it"),),
    "chaos run": (("train {config} {overrides}", "start it"),),
    "bench run": (("bench report {output}", "its report again"),),
    "prices list": (("plan CONFIG --gpus 8xH100", "time and cost of a run there"),),
    "cost show": (("report {run}", "its curves on a page"),),
}


def followed(verb: str, callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a verb, which then says what comes next; the same function for a verb without steps."""
    steps = STEPS.get(verb)
    if steps is None:
        return callback

    @wraps(callback)
    def run(*words: Any, **arguments: Any) -> Any:
        result = callback(*words, **arguments)
        suggest_next(*_filled(steps, arguments))
        return result

    return run


def _filled(steps: tuple[tuple[str, str], ...], arguments: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    given = {name: value for name, value in arguments.items() if value is not None}
    for command, purpose in steps:
        words: list[str] = []
        for word in command.split():
            if word == "{overrides}":
                words += map(str, arguments.get("overrides") or ())
                continue
            try:
                words.append(word.format_map(given))
            except KeyError:
                break
        else:
            yield (*words, purpose)
