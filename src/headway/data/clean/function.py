"""A user's function as a cleaning step."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.config.clean import PythonStep
from headway.core.errors import DataError
from headway.core.functions import load_function, source_hash
from headway.data.clean.base import Step, named
from headway.data.clean.counts import Drop


class PythonFunction(Step):
    """A step that calls `package.module:function` with each text.

    The function returns the new text, or true or false to keep or drop the document.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, config: PythonStep) -> None:
        super().__init__()
        self._name = config.function
        self._module, self._function = load_function(config.function, "data.clean: python.function")

    def apply(self, text: str) -> str | Drop:
        """Call the function; it decides on both drop and change."""
        result = self._call(text)
        return Drop("dropped by the function", f"dropped by {self._name}") if result is None else result

    def change(self, text: str) -> str:
        """Call the function again, since its result is filter and change in one."""
        result = self._call(text)
        if result is None:
            raise self._error(text, "dropped a document that it kept before: its result must depend only on the text")
        return result

    def _call(self, text: str) -> str | None:
        try:
            result = self._function(text)
        except Exception as error:
            raise self._error(text, f"failed: {type(error).__name__}: {error}") from error
        if result is None or isinstance(result, bool | np.bool_):  # comparisons of NumPy numbers return np.bool_
            return text if result else None
        if isinstance(result, str):
            return str(result)
        raise self._error(text, f"returned {type(result).__name__}, not text, true, false or None")

    def _error(self, text: str, what: str) -> DataError:
        return DataError(f"the cleaning function {self._name} {what}", where=named(text), fix="repair the function")

    def describe(self) -> dict[str, Any]:
        """Return the hash of the module's source. Changes of imported modules are not detected."""
        return {"source": source_hash(self._module)}
