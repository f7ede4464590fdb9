"""Guards against buffers that a module changes while it trains: workers would change their copies differently."""

from __future__ import annotations

from torch import nn

from headway.core.errors import ConfigError


class BufferWatch:
    """Rejects a step whose forward pass changed a buffer of the state."""

    def __init__(self, module: nn.Module) -> None:
        persistent = module.state_dict(keep_vars=True).keys()
        self._buffers = [(name, *_owner(module, name)) for name, _ in module.named_buffers() if name in persistent]

    def begin(self) -> None:
        """Record the buffers before the first forward pass of a step.

        Between steps buffers may change, in the same way on every worker.
        """
        self._before = [(owner._buffers[key], owner._buffers[key]._version) for _, owner, key in self._buffers]  # type: ignore[union-attr]

    def check(self) -> None:
        """Compare the buffers after the last backward pass of a step.

        Raises:
            ConfigError: a buffer was overwritten or replaced.
        """
        for (name, owner, key), (before, version) in zip(self._buffers, self._before, strict=True):
            now = owner._buffers[key]
            if now is not before or now._version != version:  # type: ignore[union-attr]
                raise ConfigError(
                    "the model changes a buffer in its forward pass, differently on every worker",
                    where=f"buffer '{name}'",
                    fix="keep it constant while training, or use one worker without determinism=elastic",
                )


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key
