"""Buffers that a module changes while it trains: every worker would change its own copy in its own way."""

from __future__ import annotations

from torch import nn

from headway.core.errors import ConfigError


class BufferWatch:
    """Refuses a step in which the forward pass has changed a buffer that belongs to the state."""

    def __init__(self, module: nn.Module) -> None:
        persistent = module.state_dict(keep_vars=True).keys()
        self._buffers = [(name, *_owner(module, name)) for name, _ in module.named_buffers() if name in persistent]

    def begin(self) -> None:
        """Before the first forward pass of a step. Between steps buffers may change, the same way on every worker."""
        self._before = [(owner._buffers[key], owner._buffers[key]._version) for _, owner, key in self._buffers]  # type: ignore[union-attr]

    def check(self) -> None:
        """After the last backward pass of a step.

        Raises:
            ConfigError: a buffer was overwritten or replaced.
        """
        for (name, owner, key), (before, version) in zip(self._buffers, self._before, strict=True):
            now = owner._buffers[key]
            if now is not before or now._version != version:  # type: ignore[union-attr]
                raise ConfigError(
                    "the model changes a buffer in its forward pass, which every worker would do in its own way",
                    where=f"buffer '{name}'",
                    fix="keep it constant while training, or use one worker without determinism=elastic",
                )


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key
