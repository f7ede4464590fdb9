"""Commands as users type them, in processes that need not load PyTorch first: copies of one that has.

A tiny run is over in a tenth of the time that a new process takes to get ready for it, and the tests begin hundreds of
them. A copy does what `python -m` does in a new process, from what it finds in the environment on. Two starters take
turns, since all copies of one have the hashes of texts in common, and with them the order of sets: what holds by that
alone must not pass. Where something is asked for that Python or a library reads when it is loaded, there is no copy.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

#: Variables that are read when what they are for is done, not when a library is loaded.
_LATE = re.compile(r"HEADWAY_(FAULTS|FAULTS_LOG)|PYTEST_.*|AWS_.*|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)")
#: What commands load besides what workers need.
_MODULES = (
    "headway.cli.application",
    "headway.cli.runs.checkpoints",
    "headway.text.cli.data",
    "headway.cli.main",
    "headway.cli.runs.runs",
    "headway.cli.start.train",
    "headway.text.preparing.prepare",
    "headway.run.supervisor.supervisor",
    "headway.training.evaluation.inference",
    "rich.console",
    "typer.rich_utils",
)
#: What this process began with, whatever the test that needs the first copy has changed.
_OWN_ENVIRONMENT = dict(os.environ)
#: Variables that libraries, and trainings in this process, leave in its environment. A user's shell has none of them.
_LEFT_BEHIND = {
    "CUBLAS_WORKSPACE_CONFIG", "DS_ACCELERATOR", "PYTORCH_NVML_BASED_CUDA_CHECK", "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_DETERMINISTIC", "_MLFLOW_TELEMETRY_SESSION_ID",
}  # fmt: skip
_BYTES = 2**20
#: The program of a copy that is to be a starter itself.
_STARTER = "starter"


@dataclass(frozen=True)
class Order:
    """What a copy is to do."""

    program: str
    """A module, or a file that ends in `.py`."""
    words: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    before: str = ""
    """Code that is executed first."""


class Starter:
    """A process that has loaded what many commands need, from outside.

    Args:
        origin: A starter of which this one is a copy.
        modules: What it loads besides.
    """

    def __init__(self, origin: Starter | None = None, modules: Sequence[str] = ()) -> None:
        self._orders, theirs = socket.socketpair()
        self._process = None
        if origin is not None:
            self._environment = origin._environment
            origin.start(Order(_STARTER, modules, self._environment, ""), [theirs.fileno()])
        else:
            self._environment = _OWN_ENVIRONMENT
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=self._environment
            )
        theirs.close()
        atexit.register(self._close)

    def can(self, order: Order) -> bool:
        """Whether a copy finds what a new process would."""
        ours, wanted = self._environment.items(), order.environment.items()
        return all(_LATE.fullmatch(name) for name, _ in set(ours) ^ set(wanted))

    def start(self, order: Order, descriptors: Sequence[int]) -> None:
        """Begin a copy.

        Args:
            order: What it is to do.
            descriptors: Where its number and then its exit code go, a line each, and its standard output and error.
        """
        content = json.dumps(asdict(order)).encode()
        with _ordering:
            socket.send_fds(self._orders, [len(content).to_bytes(8, "big")], descriptors)
            self._orders.sendall(content)

    def _close(self) -> None:
        self._orders.close()
        if self._process is not None:
            self._process.wait()


def environment_for(**more: object) -> dict[str, str]:
    """Return the variables of a new process: those of this one and some more, without what libraries have left here."""
    left = _LEFT_BEHIND - _OWN_ENVIRONMENT.keys()
    own = {name: value for name, value in os.environ.items() if name not in left}
    return own | {name: str(value) for name, value in more.items()}


_starters: dict[tuple[str, ...], list[Starter]] = {}
_turns = count()
#: Tests may order from several threads; an order is one message.
_ordering = threading.RLock()


def _starters_with(modules: tuple[str, ...]) -> list[Starter]:
    with _ordering:
        if modules not in _starters:
            origins = _starters_with(()) if modules else [None, None]
            _starters[modules] = [Starter(origin, modules or _MODULES) for origin in origins]
        return _starters[modules]


def run(
    orders: Sequence[Order], timeout: float, modules: Sequence[str] = ()
) -> subprocess.CompletedProcess[str] | None:
    """Carry out orders side by side, as `subprocess.run` does one and captures what it says; None where only new
    processes will do. When one fails, the others are killed.

    Args:
        orders: At least one.
        timeout: In seconds.
        modules: What all that are asked for with them find loaded besides what every command does.

    Raises:
        subprocess.TimeoutExpired: they take longer, or what they leave behind keeps their streams; they are killed.
    """
    if not all(can_start(order, modules) for order in orders):
        return None
    there = _starters_with(tuple(modules))
    starters = [there[next(_turns) % len(there)] for _ in orders]
    with ExitStack() as stack:
        pipes = [os.pipe() for _ in range(2)]
        reading = [stack.enter_context(os.fdopen(end, "rb", buffering=0)) for end, _ in pipes]
        copies: list[socket.socket] = []
        for starter, order in zip(starters, orders, strict=True):
            ours, theirs = socket.socketpair()
            copies.append(stack.enter_context(ours))
            starter.start(order, [theirs.fileno(), *(end for _, end in pipes)])
            theirs.close()
        for _, end in pipes:
            os.close(end)
        said = {file.fileno(): bytearray() for file in (*reading, *copies)}
        code = _listen(said, [copy.fileno() for copy in copies], time.monotonic() + timeout)
    first = orders[0]
    command = [sys.executable, "-m", first.program, *first.words]
    out, err = (said[pipe].decode().replace("\r\n", "\n").replace("\r", "\n") for pipe, _ in pipes)
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    return subprocess.CompletedProcess(command, code, out, err)


class Copy:
    """A copy that runs beside the test. Names are those of `subprocess.Popen`; standard output is discarded.

    Args:
        order: What it is to do; only if `can_start` says so.
        modules: As for `run`.
    """

    def __init__(self, order: Order, modules: Sequence[str] = ()) -> None:
        there = _starters_with(tuple(modules))
        reading, writing = os.pipe()
        self._answers, theirs = socket.socketpair()
        with Path(os.devnull).open("wb") as nothing:
            there[next(_turns) % len(there)].start(order, [theirs.fileno(), nothing.fileno(), writing])
        theirs.close()
        os.close(writing)
        self.stderr = os.fdopen(reading, encoding="utf-8")
        self.returncode: int | None = None
        self._said = b""
        self.pid = int(self._line())

    def _line(self) -> bytes:
        while b"\n" not in self._said:
            if not (part := self._answers.recv(64)):
                raise ChildProcessError("the process that starts copies is gone")
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return line

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._line())
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[None, str]:
        """Wait for its end and for all that has its standard error; return what came there."""
        said = {self.stderr.fileno(): bytearray()}
        if _listen(said, [], time.monotonic() + timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self.wait(timeout)
        (text,) = said.values()
        self.stderr.close()
        return None, text.decode()


def can_start(order: Order, modules: Sequence[str] = ()) -> bool:
    """Return whether a copy would do what a new process does."""
    return sys.platform == "linux" and all(starter.can(order) for starter in _starters_with(tuple(modules)))


def _listen(said: Mapping[int, bytearray], copies: Sequence[int], deadline: float) -> int | None:
    """Take in all that comes until nobody is left who could write; the exit code of the first that failed, or None
    where that takes too long."""
    first_failure = 0
    with selectors.DefaultSelector() as selector:
        for descriptor in said:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                part = os.read(key.fd, _BYTES)
                said[key.fd].extend(part)
                if part:
                    continue
                selector.unregister(key.fd)
                if key.fd in copies and not first_failure:
                    first_failure = int(said[key.fd].split()[1])  # without one the process that starts them is gone
                    if first_failure:
                        _kill(said[copy] for copy in copies)
            if not ready and time.monotonic() > deadline:
                _kill(said[copy] for copy in copies)
                return None
    return first_failure


def _kill(answers: Iterable[bytes]) -> None:
    """Those that have not ended."""
    for answer in answers:
        if len(numbers := answer.split()) == 1:
            with suppress(ProcessLookupError):
                os.kill(int(numbers[0]), signal.SIGKILL)


def _serve(orders: socket.socket) -> None:
    """What a starter does: copy itself as it is ordered to, until nobody is left who could. It has one thread, since a
    process with others cannot be copied."""
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not orders:
                    pid, answers = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with suppress(OSError), answers:
                        answers.sendall(b"%d\n" % code)
                    continue
                try:
                    head, descriptors, _, _ = socket.recv_fds(orders, 8, 3)
                except ConnectionResetError:  # what a starter's own starter has told of it was never read
                    return
                if not head:
                    return
                content = bytearray()
                while len(content) < int.from_bytes(head, "big"):
                    content += orders.recv(int.from_bytes(head, "big") - len(content))
                if (pid := os.fork()) == 0:
                    for other in list(selector.get_map().values()):  # numbers that others will have
                        if other.data:
                            other.data[1].close()
                    orders.close()
                    selector.close()
                    _become(Order(**json.loads(content)), descriptors)
                    return
                for stream in descriptors[1:]:
                    os.close(stream)
                answers = socket.socket(fileno=descriptors[0])
                with suppress(BrokenPipeError):
                    answers.sendall(b"%d\n" % pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))


def _become(order: Order, descriptors: Sequence[int]) -> None:
    """What a copy does."""
    if order.program == _STARTER:
        _begin(socket.socket(fileno=descriptors[0]), order.words)
        return
    for number, stream in enumerate(descriptors[1:], 1):
        os.dup2(stream, number)
    os.closerange(3, max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 1)
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # Python's own know what they led to before
        old = getattr(sys, name)
        kind = {"encoding": old.encoding, "errors": old.errors, "closefd": False}
        stream = os.fdopen(number, "w" if number else "r", 1 if number == 2 else -1, **kind)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    is_file = order.program.endswith(".py")
    sys.path.insert(0, str(Path(order.program).parent) if is_file else order.folder)
    sys.argv = [order.program, *order.words]
    exec(order.before, {})
    if is_file:
        runpy.run_path(order.program, run_name="__main__")
    else:
        runpy.run_module(order.program, run_name="__main__", alter_sys=True)


def _begin(orders: socket.socket, modules: Sequence[str]) -> None:
    """What a starter does."""
    for name in modules:
        importlib.import_module(name)
    _serve(orders)


if __name__ == "__main__":
    from headway.run.supervisor.agent import load_training

    load_training()
    _begin(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
