"""The first process of an attempt: the only worker, or the agent that starts several.

It checks config, data and machine, asks the supervisor to begin the attempt, and reports why it ended. It is a copy of
the supervisor's process (`fork`), which saves a third of a second. Where that is not safe, it is started as `python -m
headway.run.supervisor.attempt_process CHANNEL`.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback

from headway.config import Config
from headway.core.console import say
from headway.core.errors import INTERRUPTED, CheckpointError, HeadwayError, explain_refusal
from headway.core.process.exit import exit_process
from headway.core.process.variables import ONE_THREAD
from headway.run.directory.run_directory import Attempt
from headway.run.session.attempt import RunOptions, preemptible
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.messages import AttemptChannel, Done, Order
from headway.run.supervisor.worker import begin_process


def run_attempt(channel: AttemptChannel, config: Config, options: RunOptions, number: int | None = None) -> int:
    """Run an attempt and return the exit code.

    Args:
        number: Number of the attempt, if the supervisor has begun it already: then the config is complete and checked.
    """
    if config.parallel.all_workers > 1:
        for variable, value in ONE_THREAD.items():  # checking the data loads NumPy
            os.environ.setdefault(variable, value)
    try:
        with preemptible():
            from headway.run.supervisor.attempt_training import run_again, run_first  # loads PyTorch

            if number is None:
                run_first(channel, config, options)
            else:
                run_again(config, options, Attempt.join(config.run_directory, number))
    except HeadwayError as error:
        channel.send(ErrorReport.of(error, 0))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        explained = explain_refusal(error, CheckpointError, str(config.run_directory))
        if explained is not None:
            channel.send(ErrorReport.of(explained, 0))
            return explained.exit_code
        say(traceback.format_exc().rstrip())
        channel.send(ErrorReport.of(error, 0, traceback.format_exc()))
        return 1
    channel.send(Done())
    return 0


def main() -> None:
    """Receive the order from the channel, and run the attempt."""
    begin_process()
    channel = AttemptChannel(socket.socket(fileno=int(sys.argv[1])))
    order = channel.receive()
    if not isinstance(order, Order):
        sys.exit(1)
    sys.argv = list(order.argv)
    exit_process(run_attempt(channel, order.config.config(), order.options, order.number))


if __name__ == "__main__":
    main()
