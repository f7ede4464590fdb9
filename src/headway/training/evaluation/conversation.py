"""A conversation with a trained model, by its chat template; without one, a text that both continue."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.format import counted
from headway.data.tokenizing.chat import ChatEncoder
from headway.training.evaluation.generation import stream_text
from headway.training.evaluation.inference import TrainedModel, continue_ids, stops_of_turns

Message = dict[str, str]


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled; the fields are arguments of `generate`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    """The seed of the first answer. Each further one has the next number."""


class Conversation:
    """A conversation that grows by a message and its answer at a time.

    Its oldest parts are left out, with a notice, where a message and its answer would not fit the model's positions.

    Args:
        trained: From `load_trained`.
        sampling: How answers are sampled.

    Attributes:
        is_cut: The last answer has as many tokens as it may have, and no end.
        is_ended: The model has ended a text without a template; the next message begins a new one.

    Raises:
        ConfigError: There is a chat template, and transformers is not installed.
        DataError: transformers cannot load the tokenizer.
    """

    def __init__(self, trained: TrainedModel, sampling: Sampling) -> None:
        self._trained = trained
        self._sampling = sampling
        self._encoder = trained.open_chat()
        self._stop_ids = trained.stop_ids | stops_of_turns(self._encoder)
        self._system: list[Message] = []
        self.is_cut = False
        self.is_ended = False
        self.reset()

    @property
    def has_template(self) -> bool:
        """Whether messages are turns of a chat template."""
        return self._encoder is not None

    def reset(self) -> None:
        """Begin anew; the system message stays."""
        self._turns: list[Message] = []
        self._text = ""
        self._answers = 0

    def set_system(self, text: str) -> None:
        """Set the system message from the next answer on; an empty text removes it.

        Raises:
            ConfigError: There is no chat template, or it ignores system messages.
            UnencodableTextError: The template cannot render one.
        """
        if self._encoder is None:
            raise ConfigError(
                "the model has no chat template, so there is no system message",
                where=self._trained.tokenizer.where,
                fix="begin the text with what you want to say",
            )
        system = [{"role": "system", "content": text}] if text else []
        question = {"role": "user", "content": "Hello."}
        if system and self._encoder.prompt([*system, question]) == self._encoder.prompt([question]):
            raise ConfigError(
                "the chat template ignores system messages",
                where=self._trained.tokenizer.where,
                fix="say it in your first message",
            )
        self._system = system

    def answer(self, message: str) -> Generator[str, None, None]:
        """Answer a message, in pieces as they are sampled.

        Where the iterator is closed before its end, what it has yielded is the answer.

        Raises:
            ConfigError: The message does not fit the model's positions.
            UnencodableTextError: The template cannot render the message.
        """
        if self._encoder is None:
            asked = f"{self._text}\n{message}" if self._text else message
            ids = self._fitting_text(asked)
        else:
            asked = ""
            ids = self._fitting_turns(self._encoder, {"role": "user", "content": message})
        self.is_cut = self.is_ended = False
        # The last token that is generated needs no position.
        most = max(1, min(self._sampling.max_new_tokens, self._positions - len(ids) + 1))
        sampling = vars(self._sampling) | {"max_new_tokens": most, "seed": self._sampling.seed + self._answers}
        new_ids = continue_ids(self._trained, ids, self._stop_ids, **sampling)
        return self._answer(message, asked, ids, new_ids, most)

    def _answer(
        self, message: str, asked: str, ids: list[int], new_ids: Iterator[int], most: int
    ) -> Generator[str, None, None]:
        said = ""
        count = 0
        keeps = True

        def counting() -> Iterator[int]:
            nonlocal count
            for number in new_ids:
                count += 1
                yield number

        try:
            for piece in stream_text(self._trained.tokenizer, counting(), after=ids):
                said += piece
                yield piece
        except Exception:
            keeps = False
            raise
        except BaseException:  # it is closed, or interrupted
            keeps = bool(said)
            raise
        else:
            self.is_cut = count >= most
            self.is_ended = not self.is_cut and self._encoder is None
        finally:
            if keeps:
                self._keep(message, asked, said)

    def _keep(self, message: str, asked: str, said: str) -> None:
        self._answers += 1
        if self._encoder is None:
            self._text = "" if self.is_ended else asked + said
        else:
            self._turns += [{"role": "user", "content": message}, {"role": "assistant", "content": said}]

    @property
    def _positions(self) -> int:
        return self._trained.model.config.max_sequence_length

    @property
    def _room(self) -> int:
        """The positions that a prompt may have: an answer has a quarter of them left, or all that it may need."""
        return self._positions - min(self._sampling.max_new_tokens, max(1, self._positions // 4)) + 1

    def _fitting_turns(self, encoder: ChatEncoder, asked: Message) -> list[int]:
        """Return the prompt for a message, and drop the oldest turns until it fits."""
        turns = self._turns
        ids = encoder.prompt([*self._system, *turns, asked])
        while len(ids) > self._room and turns:
            turns = turns[2:]
            ids = encoder.prompt([*self._system, *turns, asked])
        if len(turns) < len(self._turns):
            left_out = counted(len(self._turns) - len(turns), "message")
            notice(
                f"the conversation no longer fits the model's {self._positions:,} positions: its first {left_out} are"
                " left out"
            )
            self._turns = turns
        return ids

    def _fitting_text(self, text: str) -> list[int]:
        """Return the prompt for a text, without its first tokens if they do not fit."""
        begin = list(self._trained.begin_of_text.values())
        ids = self._trained.tokenizer.encode_batch([text])[0]
        left_out = len(begin) + len(ids) - self._room
        if left_out > 0:
            notice(
                f"the text no longer fits the model's {self._positions:,} positions: its first"
                f" {counted(left_out, 'token')} are left out"
            )
            ids = ids[left_out:]
        return begin + ids
