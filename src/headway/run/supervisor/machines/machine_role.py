"""The role of this process among the machines of a run: from options, or variables of the user or the scheduler."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.core.coordination.launch_variables import GANG, LEAD, LISTEN, NODE, OF_A_WORKER, SECRET, SECRET_FILE
from headway.core.coordination.launched import machine_number
from headway.core.errors import ConfigError
from headway.core.files.foreign import open_regular
from headway.core.files.hashes import fingerprint
from headway.core.process.waiting import VISIBILITY_TIMEOUT, wait_until
from headway.core.startup.launch_secret import take_secret

#: Where the lead listens if only its host is known.
_PORT = 29450
#: Ports from which a gang, as a Slurm step, takes one by its name, so that those of one machine do not collide.
_GANG_PORTS = range(20_000, 30_000)
#: Shorter secrets could be guessed from a recorded greeting.
_LEAST_SECRET = 16
_SECRET_NAME = ".headway-secret"


@dataclass(frozen=True)
class MachineRole:
    """Which of the machines this one is, and where the lead listens."""

    number: int
    host: str
    port: int
    secret: bytes
    is_restarted: bool = True
    """Whether the command of a machine may be started again after its end, as far as is known; that of a gang, or of a
    step of Slurm, is not."""
    listen: str | None = None
    """The address of this machine at which it listens when it leads; None for the one that `host` stands for."""

    @property
    def leads(self) -> bool:
        """Whether this machine is the lead."""
        return self.number == 0


@dataclass(frozen=True)
class Membership:
    """A machine's role in a run of a certain config."""

    role: MachineRole
    computes: Mapping[str, Any]
    """What the config says about the mathematics of the run (`headway.config.identity`)."""

    @cached_property
    def identity(self) -> str:
        """Fingerprint of that."""
        return fingerprint(self.computes)


def find_role(config: Config, environment: MutableMapping[str, str] | None = None) -> MachineRole | None:
    """Return the role of this process; None if the run has one machine.

    Variables with which a launcher numbers *processes* (RANK, WORLD_SIZE) mean machines here, and are removed: workers
    get their own. The secret is removed as well, so that no process of the run shows it.

    Raises:
        ConfigError: the number of this machine, the lead's address or the secret is missing or cannot be used.
    """
    environment = os.environ if environment is None else environment
    if config.parallel.machines == 1 or (NODE not in environment and "LOCAL_RANK" in environment):
        return None  # torchrun has started this process as a worker
    numbered = machine_number(environment)
    in_a_step = "SLURM_STEP_NODELIST" in environment
    number, host, port = find_number_and_lead(config.parallel.machines, environment)
    is_task = in_a_step and numbered is not None and numbered[1] == "SLURM_PROCID"
    return MachineRole(
        number,
        host,
        port,
        _secret(config, environment, number),
        is_restarted=not (is_task or GANG in environment),
        listen=environment.get(LISTEN) or None,
    )


def find_number_and_lead(most: int, environment: MutableMapping[str, str]) -> tuple[int, str, int]:
    """Return the number of this machine, and the host and port of machine 0.

    Args:
        most: Number of machines.
        environment: The variables, without those of processes afterwards.

    Raises:
        ConfigError: the number of this machine or the lead's address is missing or cannot be used.
    """
    found = machine_number(environment)
    lead = environment.get(LEAD)
    node = None if found is None else found[0]
    if lead is None and "SLURM_STEP_NODELIST" in environment:
        lead = f"{_first_of_step(environment)}:{_port_of(_step(environment))}"
    if lead is None and environment.get("MASTER_ADDR"):
        lead = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT') or _PORT}"
    for name in OF_A_WORKER:
        environment.pop(name, None)
    if node is None or not node.isdecimal() or int(node) >= most:
        given = "this machine has no number" if node is None else f"'{node}' is no number of a machine"
        raise ConfigError(
            f"{given}; the run has {most} machines, numbered from 0 to {most - 1}",
            where=f"--node, {NODE}",
            fix=f"start the same command on every machine, numbered by --node or {NODE}: 0, 1 and so on",
        )
    if lead is None:
        raise ConfigError(
            "the address of the lead (machine 0) is not known",
            where=f"--lead, {LEAD}",
            fix=f"give every machine --lead HOST:PORT or {LEAD}: where machine 0 is, and a free port there",
        )
    default_port = _port_of(environment[GANG]) if GANG in environment else _PORT
    return int(node), *parse_address(lead, default_port)


def parse_address(text: str, default_port: int = _PORT) -> tuple[str, int]:
    """Parse HOST, HOST:PORT or [ADDRESS]:PORT.

    Args:
        text: The address.
        default_port: The port where it names none.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:\s]+))(?::([0-9]{1,5}))?", text.strip())
    port = int(match[3]) if match is not None and match[3] else default_port
    if match is None or not 0 < port < 2**16:
        raise ConfigError(f"'{text}' is no address", where=f"--lead, {LEAD}", fix="write HOST:PORT, as node-0:29450")
    return match[1] or match[2], port


def _first_of_step(environment: Mapping[str, str]) -> str:
    """Return the first node of a Slurm step, which has its first task, from a list like `n[01-04,7],m2`."""
    text = environment["SLURM_STEP_NODELIST"]
    match = re.match(r"([^\[,]*)(?:\[([0-9]+)[^\]]*\])?([^\[,]*)", text)
    name = "".join(part or "" for part in match.groups()) if match is not None else text
    try:
        socket.getaddrinfo(name, None)
    except OSError:  # a name that only Slurm knows, as where several of its nodes are one machine
        return environment.get("SLURM_LAUNCH_NODE_IPADDR") or name
    return name


def _step(environment: Mapping[str, str]) -> str:
    return f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"


def _port_of(gang: str) -> int:
    number = int.from_bytes(hashlib.sha256(gang.encode()).digest()[:4], "big")
    return _GANG_PORTS[number % len(_GANG_PORTS)]


def _secret(config: Config, environment: Mapping[str, str], node: int) -> bytes:
    """Return the secret that all machines of the run share.

    Raises:
        ConfigError: there is none, or others can read it.
    """
    given = take_secret() if environment is os.environ else environment.get(SECRET, "").strip()
    if given:
        secret = given.encode()
    elif name := environment.get(SECRET_FILE):
        secret = _read_secret(Path(name))
    elif GANG in environment:
        # The first machine may come as late as a lead may that is waited for.
        return _gang_secret(config, environment[GANG], node, config.supervise.rejoin_seconds)
    elif environment.get("SLURM_JOB_ID") and "SLURM_PROCID" in environment:
        return _gang_secret(config, _step(environment), node, VISIBILITY_TIMEOUT)
    else:
        raise ConfigError(
            "the machines of a run need a common secret, by which they recognise each other",
            where=f"{SECRET}, {SECRET_FILE}",
            fix=f"set {SECRET} to the same value on every machine, for example of `openssl rand -hex 32`",
        )
    return _check_length(secret, f"{SECRET}, {SECRET_FILE}")


def _gang_secret(config: Config, gang: str, node: int, wait_seconds: float) -> bytes:
    """Derive the secret of a gang from a file beside the run directories, which the first machine makes.

    Raises:
        ConfigError: there is no file after that time, or others can read it.
    """
    file = config.run_directory.parent / _SECRET_NAME
    if node == 0:
        _make_secret(file)
    wait_until(file.exists, wait_seconds, 0.2)
    return hmac.new(_check_length(_read_secret(file), str(file)), gang.encode(), "sha256").digest()


def _check_length(secret: bytes, where: str) -> bytes:
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"the secret has {len(secret)} bytes, so it could be guessed",
            where=where,
            fix=f"use {_LEAST_SECRET} or more, for example of `openssl rand -hex 32`",
        )
    return secret


def _read_secret(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            # Root may read everybody's file, as from a mounted secret.
            if found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
                raise ConfigError(
                    "others can read or replace the file with the secret",
                    where=str(path),
                    fix=f"make it yours alone: chmod 600 {path}",
                )
            return file.read(4096).strip()
    except OSError as error:
        raise ConfigError(
            f"the file with the secret cannot be read: {error.strerror or error}",
            where=str(path),
            fix=f"name a file that every machine can read in {SECRET_FILE}",
        ) from error


def _make_secret(path: Path) -> None:
    """Make the file from which gangs derive their secrets, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    try:
        with suppress(FileExistsError):
            os.link(draft, path)  # whole at once
    finally:
        draft.unlink()
