"""The section `task`: a function of the user's own that makes what is trained, in place of a language model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headway.config.base import FUNCTION_PATTERN, Section


class TaskConfig(Section):
    """A task of your own: the function makes model, dataset and loss ([own-task.md](own-task.md))."""

    function: Annotated[str, Field(pattern=FUNCTION_PATTERN)]
    """`package.module:function`, importable from the working directory: `function(config, options) -> headway.Task`.
    `task: package.module:function` says the same."""
    options: dict[str, Any] = {}
    """Options of the function, checked by the pydantic model or dataclass that its second parameter declares."""
    files: dict[str, str] = {}
    """The sources of the task, by path. Written by `headway launch` into the config that travels, never by hand."""
