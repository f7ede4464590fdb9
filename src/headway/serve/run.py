"""`headway serve`: loads what is named, and answers until it is asked to end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from headway.core.console import notice
from headway.core.credentials.keys import key_text
from headway.core.errors import ConfigError
from headway.core.exposure import check_secret, is_this_machine, server_context, url_host
from headway.models.versions import is_reference, local_folder, open_registry, resolve
from headway.serve.backend import Backend
from headway.serve.engine import Engine
from headway.serve.front import Front, request_name
from headway.serve.metrics import Metrics
from headway.serve.native import NativeBackend
from headway.serve.options import EngineName, EngineOptions, Place, ServerOptions, Source
from headway.serve.program import ProgramBackend, find_vllm
from headway.serve.served import Arm, Found, follow_all
from headway.serve.server import listen, serve
from headway.training.evaluation.inference import export_trained, load_trained

#: Environment variable with the key that clients must send.
KEY_VARIABLE = "HEADWAY_API_KEY"
#: The arm of a server without an experiment.
_ONLY = "model"


def serve_model(source: Source, engine: EngineOptions, options: ServerOptions) -> None:
    """Serve a model until SIGTERM.

    Raises:
        ConfigError: it is not there, or would be served to other machines without a key and TLS.
        CheckpointError: it is damaged.
    """
    key = access_key(options.place)
    metrics = Metrics()
    arm = Arm(_ONLY, partial(find_version, source, engine, metrics))
    front = Front(source.served_name, {_ONLY: arm}, lambda user: (_ONLY, request_name()), key, options.limits, metrics)
    following = [arm] if is_reference(source.model) else []

    async def tasks() -> None:
        await follow_all(following, options.follow_seconds, metrics.switched)

    run_front(front, options, tasks)


def run_front(front: Front, options: ServerOptions, tasks: Callable[[], Awaitable[None]]) -> None:
    """Load what answers, and serve until SIGTERM.

    Raises:
        ConfigError, CheckpointError: a model is not there, or damaged; or the address cannot be used.
    """
    listening = listen(options.place)
    for arm in front.arms.values():
        arm.load()
    scheme = "http" if options.place.tls is None else "https"
    host = url_host(options.place.host)
    labels = " and ".join(arm.backend.label for arm in front.arms.values())
    notice(f"{labels} at {scheme}://{host}:{listening.getsockname()[1]}/v1; a page to chat is at /")
    try:
        serve(front, options.place, listening, drain_seconds=options.drain_seconds, tasks=tasks)
    finally:
        for arm in front.arms.values():
            arm.close()
    notice("every request has been answered")


def access_key(place: Place) -> str | None:
    """Return the key that clients must send; None lets everybody on this machine ask.

    Raises:
        ConfigError: other machines could ask without a key, or without TLS; or the certificate cannot be loaded.
    """
    key = key_text(KEY_VARIABLE)
    if key is not None:
        check_secret(key, KEY_VARIABLE)
    if not is_this_machine(place.host) and (key is None or place.tls is None):
        missing = f"{KEY_VARIABLE} is not set" if key is None else "there is no certificate"
        raise ConfigError(
            f"models are served beyond this machine only with a key and TLS: {missing}",
            where=f"--host {place.host}",
            fix=f"{KEY_VARIABLE}_FILE=key.txt headway serve ... --host {place.host} --tls-cert FILE --tls-key FILE, or"
            " leave --host out",
        )
    if place.tls is not None:
        server_context(*place.tls)  # before the models are loaded
    return key


def find_version(source: Source, engine: EngineOptions, metrics: Metrics) -> Found:
    """Find the version of a model."""
    if is_reference(source.model):
        version = resolve(source.model, open_registry(source.registry, source.storage))
        label = str(version.version)
        return Found(
            version.manifest_hash, label, lambda: _load(local_folder(version), source, engine, metrics, label=label)
        )
    path = Path(source.model)
    label = source.served_name if source.step is None else f"{source.served_name} at step {source.step}"
    return Found(label, label, lambda: _load(path, source, engine, metrics, label=label))


def _load(path: Path, source: Source, options: EngineOptions, metrics: Metrics, *, label: str) -> Backend:
    """Load a model, and return when it can answer."""
    program = _program(options.engine)
    if program is not None:
        return _load_program(program, path, source, options, label=label)
    trained = load_trained(path, step=source.step, device="auto")
    engine = Engine(trained, options.rows, exact=options.exact)
    engine.start()
    assert engine.steps is not None
    most = engine.steps.sizes[-1]
    if most == 1:
        notice(f"{label}: one sequence at a time")
    else:
        ways = sorted(set(engine.steps.ways.values()))
        notice(f"{label}: up to {most} sequences in a batch; ways to multiply: {', '.join(ways)}")
    return NativeBackend(
        trained,
        engine,
        label,
        model=source.served_name,
        max_tokens=options.max_tokens,
        count=metrics.counted,
    )


def _load_program(program: str, path: Path, source: Source, options: EngineOptions, *, label: str) -> Backend:
    """Start vLLM on a Hugging Face folder; a run's checkpoint is exported to one first."""
    owned = None
    if (path / "checkpoints").is_dir():
        owned = tempfile.TemporaryDirectory(prefix="headway-serve-")
        folder = Path(owned.name) / "model"
        export_trained(load_trained(path, step=source.step), folder)
        path = folder
    return ProgramBackend(
        program,
        path,
        label,
        model=source.served_name,
        arguments=options.arguments,
        environment=os.environ,
        owned=owned,
    )


def _program(engine: EngineName) -> str | None:
    """Return the program behind the front; None for the engine of this process.

    Raises:
        ConfigError: vLLM is wanted, and not installed.
    """
    found = None if engine == "headway" else find_vllm()
    if engine == "vllm" and found is None:
        raise ConfigError(
            "vLLM is not installed", where="--engine vllm", fix="python -m pip install vllm, or --engine headway"
        )
    return found
