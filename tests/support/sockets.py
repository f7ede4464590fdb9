"""What a tree of processes listens on, as the C library is asked for it: no door is missed because nobody looked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import pytest

#: Preloaded into every process: notes each `listen`, and each datagram socket that takes a place of its own.
_SOURCE = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void note(int fd) {
  struct sockaddr_storage place;
  socklen_t size = sizeof place;
  char host[INET6_ADDRSTRLEN] = "", line[1024], command[512] = "";
  const char *path = getenv("SOCKETS_LOG");
  if (!path || getsockname(fd, (struct sockaddr *)&place, &size)) return;
  if (place.ss_family == AF_INET)
    inet_ntop(AF_INET, &((struct sockaddr_in *)&place)->sin_addr, host, sizeof host);
  else if (place.ss_family == AF_INET6)
    inet_ntop(AF_INET6, &((struct sockaddr_in6 *)&place)->sin6_addr, host, sizeof host);
  else if (place.ss_family == AF_UNIX && !((struct sockaddr_un *)&place)->sun_path[0])
    strcpy(host, "abstract");
  else
    return; /* a file, which has its owner and mode */
  int own = open("/proc/self/cmdline", O_RDONLY);
  ssize_t length = own < 0 ? 0 : read(own, command, sizeof command - 1);
  if (own >= 0) close(own);
  for (ssize_t at = 0; at < length; at++)
    if (command[at] < 33) command[at] = ' ';
  int log = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
  if (log < 0) abort();
  if (write(log, line, snprintf(line, sizeof line, "%d %s %s\n", (int)getpid(), host, command)) < 0) abort();
  close(log);
}

int listen(int fd, int backlog) {
  int (*real)(int, int) = dlsym(RTLD_NEXT, "listen");
  int result = real(fd, backlog);
  if (!result) note(fd);
  return result;
}

int bind(int fd, const struct sockaddr *place, socklen_t size) {
  int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
  int kind = 0, result = real(fd, place, size);
  socklen_t length = sizeof kind;
  if (!result && !getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &length) && kind == SOCK_DGRAM) note(fd);
  return result;
}
"""


@dataclass(frozen=True)
class Listener:
    """A process that was ready for strangers."""

    pid: int
    host: str
    """The address; "abstract" for a local socket that is no file."""
    command: str

    @property
    def is_open(self) -> bool:
        """Whether other machines, or other users without a look at a file's mode, can reach it."""
        return self.host == "abstract" or not ip_address(self.host).is_loopback


class Sockets:
    """Runs commands and tells what their trees listen on."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            pytest.skip("there is no C compiler")
        (folder / "sockets.c").write_text(_SOURCE)
        self._library, self._log = folder / "sockets.so", folder / "sockets.log"
        build = [compiler, "-shared", "-fPIC", "-o", str(self._library), str(folder / "sockets.c"), "-ldl"]
        subprocess.run(build, check=True, capture_output=True)

    def of(
        self, *command: str | Path, variables: Mapping[str, str] | None = None, code: int = 0, timeout: float = 800
    ) -> list[Listener]:
        """What the processes of a command have listened on, which must end with an exit code."""
        self._log.unlink(missing_ok=True)
        given = {"LD_PRELOAD": str(self._library), "SOCKETS_LOG": str(self._log), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **(variables or {}), **given}
        words = list(map(str, command))
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == code, done.stderr[-6000:] + done.stdout[-2000:]
        return _read(self._log)


def _read(log: Path) -> list[Listener]:
    lines: Sequence[str] = log.read_text().splitlines() if log.exists() else []
    found = (line.split(" ", 2) for line in lines)
    return [Listener(int(pid), host, command) for pid, host, command in found]
