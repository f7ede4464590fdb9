"""`headway chat`."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.core.command_line import StepOption, TemperatureOption, TopPOption, as_utf8
from headway.core.console import exact_results, notice, print_line, print_text, say
from headway.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from headway.training.evaluation.conversation import Conversation

HELP = """Talk to a trained model; answers are printed as they are sampled.

Messages are turns of the model's chat template. A model without one continues your text.

[bold]Examples[/bold]

headway chat runs/my-chat
headway chat my-model --system "Answer in one sentence." --temperature 0
cat questions.txt | headway chat runs/my-chat --step 200

Commands are /reset, /system TEXT, /help and /quit. Ctrl-C stops an answer, and quits when pressed again.
Standard input that is not a terminal is read as one message per line.
"""

COMMANDS = """/reset         begin a new conversation; the system message stays
/system TEXT   set the system message; without a text, remove it
/help          show this list
/quit          quit, as Ctrl-D does
Ctrl-C stops an answer; pressed again, it quits. A message that begins with // is sent with one /."""


def chat(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Run directory, Hugging Face folder, or adapter.")],
    *,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Maximum number of tokens of an answer.")
    ] = 512,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 0.95,
    seed: Annotated[int, typer.Option(help="Seed; equal seeds and messages give equal answers.")] = 0,
    step: StepOption = None,
) -> None:
    """Run `headway chat`."""
    from headway.training.evaluation.conversation import Conversation, Sampling
    from headway.training.evaluation.inference import load_trained

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    trained = load_trained(model, step=step, device="auto")
    conversation = Conversation(trained, sampling)
    if system:
        conversation.set_system(as_utf8(system, "--system"))
    at = "" if trained.step is None else f" at step {trained.step:,}"
    how = "has no chat template: it continues your text"
    if conversation.has_template:
        how = "answers by its chat template"
    notice(f"{model}{at} {how} (/help shows the commands)")
    _talk(conversation, is_person=sys.stdin.isatty())


def _talk(conversation: Conversation, is_person: bool) -> None:
    """Answer until the input ends. A person is shown what went wrong and goes on; a script ends with the error."""
    stopped = False
    while True:
        try:
            line = _read(is_person)
            if line is None:
                return
            stopped = False
            if _follow(conversation, line):
                return
        except KeyboardInterrupt:
            if stopped or not is_person:
                raise
            stopped = True
            say("\nstopped; Ctrl-C again quits")
        except (ConfigError, DataError) as error:
            if not is_person:
                raise
            say(error.render())


def _read(is_person: bool) -> str | None:
    """Read the next message; None at the end of the input."""
    if is_person and sys.stdout.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  # `input` then edits lines and remembers them
        try:
            return as_utf8(input("> "), "standard input").strip()
        except EOFError:
            print_line()
            return None
    line = sys.stdin.buffer.readline()
    return as_utf8(line.decode(errors="surrogateescape"), "standard input").strip() if line else None


def _follow(conversation: Conversation, line: str) -> bool:
    """Follow a command, or answer a message; return whether to quit."""
    command, _, text = line.partition(" ")
    if command == "/quit":
        return True
    if command == "/reset":
        conversation.reset()
        notice("a new conversation")
    elif command == "/system":
        conversation.set_system(text.strip())
        notice("the system message is set" if text.strip() else "there is no system message")
    elif command == "/help":
        notice(COMMANDS)
    elif command[:1] == "/" and command[1:].isalpha():
        raise ConfigError(f"there is no command {command}", where="your message", fix="/help lists the commands")
    elif line:
        _answer(conversation, line.removeprefix("/") if line.startswith("//") else line)
    return False


def _answer(conversation: Conversation, message: str) -> None:
    """Print an answer as it is sampled, and whether it has no end."""
    with exact_results(), closing(conversation.answer(message)) as pieces:
        for piece in pieces:
            print_text(piece)
        print_line()
    if conversation.is_cut:
        notice("the answer was cut: it has --max-new-tokens tokens, or the model has no further position")
    if conversation.is_ended:
        notice("the model ended its text: your next message begins a new one")
