"""Answers from a program with OpenAI's interface behind the front, as `vllm serve` is. The only file with httpx."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.console import notice
from headway.core.errors import ConfigError, needing
from headway.core.exposure import free_port
from headway.core.process.command import tied_command
from headway.serve.asking import RefusedRequest
from headway.serve.backend import JSON, LATE, Answer, Call

if TYPE_CHECKING:
    import os

    import httpx

#: Name of vLLM's command.
VLLM = "vllm"
#: Time that a large model may take to load.
_START_SECONDS = 1800.0
_END_SECONDS = 30.0
_KEY_VARIABLE = "VLLM_API_KEY"


def find_vllm() -> str | None:
    """Return the path of vLLM's command; None where it is not installed."""
    return shutil.which(VLLM)


class ProgramBackend:
    """Answers from a program on a port of this machine, which a random key protects from its other users.

    Args:
        program: The command, as `vllm`.
        folder: The model, as a Hugging Face folder.
        label: The version.
        model: The name that clients ask for.
        arguments: More arguments of the program.
        environment: Variables of its process.
        owned: A folder that is removed at the end.

    Raises:
        ConfigError: httpx is not installed, or the program does not start.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        label: str,
        *,
        model: str,
        arguments: Sequence[str],
        environment: os._Environ[str] | dict[str, str],
        owned: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        with needing("httpx", "serve", "requests are passed on to a program"):
            import httpx
        self.label = label
        self._owned = owned
        self._key = secrets.token_urlsafe(32)
        port = free_port("127.0.0.1")
        address = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", model)
        command = [program, "serve", str(folder), *address, *arguments]
        notice(f"starting {' '.join(command)}")
        self._process = subprocess.Popen(
            tied_command(command),
            env={**environment, _KEY_VARIABLE: self._key},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the front, which lets replies end
        )
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {self._key}"},
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # none is left when another version has taken over
        )
        self._wait(f"http://127.0.0.1:{port}/health")

    def is_alive(self) -> bool:
        """Return whether the program runs."""
        return self._process.poll() is None

    def has_chat(self) -> bool:
        """Return True: the program says itself what it cannot do."""
        return True

    def close(self) -> None:
        """End the program."""
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._owned is not None:
            self._owned.cleanup()

    async def answer(self, call: Call) -> Answer:
        """Pass a request on, and its reply back as it comes."""
        import httpx

        path = "/v1/chat/completions" if call.is_chat else "/v1/completions"
        request = self._client.build_request(
            "POST", path, json=dict(call.body), headers={"X-Request-Id": call.name}, timeout=call.seconds
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TimeoutException:
            raise RefusedRequest(LATE, 504) from None
        except httpx.HTTPError as error:
            raise RefusedRequest(f"the engine does not answer: {type(error).__name__}", 502) from None
        content_type = response.headers.get("content-type", JSON)
        return Answer(response.status_code, content_type, _passed_on(response))

    def _wait(self, health: str) -> None:
        """Wait until the program answers.

        Raises:
            ConfigError: it ends before, or takes too long.
        """
        import httpx

        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(health, timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        code = self._process.poll()
        self.close()
        reason = "it did not answer in time" if code is None else f"it ended with exit code {code}"
        raise ConfigError(
            f"the engine did not start: {reason}", where=VLLM, fix="--engine headway, or read its log above"
        )


async def _passed_on(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in response.aiter_bytes():
            yield chunk
    finally:
        await response.aclose()
