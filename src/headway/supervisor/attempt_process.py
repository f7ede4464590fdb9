"""The first process of an attempt, in which the supervisor has its work done: the only worker, or the agent of several.

It looks at config, data and machine, asks the supervisor to begin the attempt, and says why it ended. It is a copy of
the supervisor's process (`fork`), which saves it a third of a second, or where that is not safe
`python -m headway.supervisor.attempt_process CHANNEL`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from headway.config import Config
from headway.core.console import say
from headway.core.errors import INTERRUPTED, CheckpointError, HeadwayError, Preempted, explain_refusal
from headway.core.process_exit import exit_process
from headway.core.signals import defer_signals
from headway.preemption import watching_for
from headway.runs.run_directory import Attempt
from headway.session.attempt import RunOptions, WorkerDied, describe, preemptible, record_preemption
from headway.session.completed import completed
from headway.supervisor.agent import run_agent
from headway.supervisor.local_workers import ONE_THREAD
from headway.supervisor.worker import begin_process, error_record, report_to


class Channel:
    """JSON objects between the supervisor and a leader, one per line."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = b""

    def say(self, kind: str, **content: Any) -> None:
        """Tell the other side, which may be gone."""
        with suppress(OSError):
            self.end.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next message; waits for it. None when the other side is gone."""
        while b"\n" not in self._buffer:
            try:
                more = self.end.recv(65536)
            except ConnectionResetError:  # it has gone without having heard all
                return None
            if not more:
                return None
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    @property
    def pending(self) -> bool:
        """Whether a whole message has been received and not been heard."""
        return b"\n" in self._buffer


def lead(channel: Channel, config: Config, options: RunOptions, number: int | None = None) -> int:
    """Do an attempt; returns the exit code.

    Args:
        number: Of the attempt, when the supervisor has begun it already: the config is complete, and was checked.
    """
    if config.parallel.workers > 1:
        for variable, value in ONE_THREAD.items():  # looking at the data loads NumPy
            os.environ.setdefault(variable, value)
    try:
        with preemptible():
            if number is None:
                _first(channel, config, options)
            else:
                _again(config, options, Attempt.join(config.run_directory, number))
    except HeadwayError as error:
        told = error.record if isinstance(error, WorkerDied) else {}
        own = {"exit_code": error.exit_code, "what": error.what, "where": error.where, "fix": error.fix}
        channel.say("error", **{**error_record(error, 0), **told, **own})
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        explained = explain_refusal(error, CheckpointError, str(config.run_directory))
        if explained is not None:
            channel.say("error", **error_record(explained, 0))
            return explained.exit_code
        say(traceback.format_exc().rstrip())
        channel.say("error", **error_record(error, 0), traceback=traceback.format_exc())
        return 1
    channel.say("done")
    return 0


def _again(config: Config, options: RunOptions, attempt: Attempt) -> None:
    """Nothing that the attempt before has looked at is looked at again: what counts is the time to the next step."""
    if config.parallel.workers == 1:
        from headway.session.session import run_in_this_process
        from headway.training.task import language_model_task

        run_in_this_process(
            config, language_model_task, options, own=lambda *_: _watched(config, attempt), own_process=True
        )
    else:
        run_agent(config, attempt)


def _first(channel: Channel, config: Config, options: RunOptions) -> None:
    config, store = completed(config)
    from headway.session.changes import StoreData, settle_segments  # loads NumPy, which a supervisor must not

    config = settle_segments(config, StoreData(config, store), options, store.tokenizer_fingerprint)
    if config.parallel.workers == 1:
        from headway.session.session import run_in_this_process
        from headway.training.task import language_model_task

        own = partial(_only_worker, channel)
        run_in_this_process(config, language_model_task, options, own=own, own_process=True)
        return
    from headway.models.facts import count_parameters
    from headway.supervisor.local import check_local

    facts = {"parameters": count_parameters(config.model).total, "vocab_size": store.vocab_size}
    data = config.segments[-1].data if config.segments else store.fingerprint
    fingerprints = {"data": data, "tokenizer": store.tokenizer_fingerprint}
    if check_local(config, fingerprints, options):
        run_agent(config, _begun(channel, config, fingerprints, facts))


def _begun(channel: Channel, config: Config, fingerprints: Mapping[str, str], facts: Mapping[str, Any]) -> Attempt:
    """The attempt, which the supervisor begins."""
    segments = [segment.model_dump(mode="json") for segment in config.segments]
    channel.say("ready", model=config.model.model_dump(mode="json"), segments=segments)
    answer = channel.hear()
    if answer is None:
        raise Preempted("the supervisor is gone", where=str(config.run_directory), fix="run the same command again")
    attempt = Attempt.join(config.run_directory, answer["attempt"])
    with defer_signals():  # pydantic would take an error in the middle of the config for a value that cannot be written
        describe(attempt, config, fingerprints, facts)
    return attempt


@contextmanager
def _only_worker(
    channel: Channel, config: Config, fingerprints: Mapping[str, str], facts: Mapping[str, Any], options: RunOptions
) -> Iterator[Attempt]:
    with _watched(config, _begun(channel, config, fingerprints, facts)) as attempt:
        yield attempt


@contextmanager
def _watched(config: Config, attempt: Attempt) -> Iterator[Attempt]:
    """With all that an attempt's only worker has around it: somebody to tell of errors, and an ear for notices."""
    report_to(attempt.directory, 0)
    with watching_for(attempt.directory, config.preemption), record_preemption():
        yield attempt


def main() -> None:
    """Take the order from the channel, and lead."""
    begin_process()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    given = channel.hear()
    if given is None:
        sys.exit(1)
    sys.argv = given["argv"]
    config = Config.model_validate(given["config"])
    config = config.model_copy(update={"train": config.train.asking(given["asked"])})
    exit_process(lead(channel, config, RunOptions(**given["options"]), given["number"]))


if __name__ == "__main__":
    main()
