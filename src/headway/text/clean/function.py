"""A user's function as a cleaning step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headway.config.sections.clean import PythonStep, ScoreStep
from headway.core.code_identity import code_identity
from headway.core.errors import DataError
from headway.core.functions import load_function
from headway.text.clean.base import Step, named, shown_number
from headway.text.clean.counts import Drop


class _UserFunction(Step):
    """The base of steps that call `package.module:function` with each text.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, config: PythonStep | ScoreStep) -> None:
        super().__init__()
        self._name = config.function
        self._where = f"data.clean: {config.step}.function"
        self._module, self._function = load_function(config.function, self._where)

    def call(self, text: str) -> Any:
        """Call the function with a text."""
        try:
            return self._function(text)
        except Exception as error:
            raise self.error(text, f"failed: {type(error).__name__}: {error}") from error

    def error(self, text: str, what: str) -> DataError:
        """Return the error for what the function did with a text."""
        return DataError(f"the cleaning function {self._name} {what}", where=named(text), fix="repair the function")

    def describe(self) -> dict[str, Any]:
        """Return the identity of the function. Changes of modules that its own one imports are not detected."""
        return {"source": code_identity(self._function, self._module, self._where)}


class PythonFunction(_UserFunction):
    """A step whose function returns the new text, or true or false to keep or drop the document."""

    def apply(self, text: str) -> str | Drop:
        """Call the function; it decides on both drop and change."""
        result = self._result(text)
        return Drop("dropped by the function", f"dropped by {self._name}") if result is None else result

    def change(self, text: str) -> str:
        """Call the function again, since its result is filter and change in one."""
        result = self._result(text)
        if result is None:
            raise self.error(text, "dropped a document that it kept before: its result must depend only on the text")
        return result

    def _result(self, text: str) -> str | None:
        result = self.call(text)
        if result is None or isinstance(result, bool | np.bool_):  # comparisons of NumPy numbers return np.bool_
            return text if result else None
        if isinstance(result, str):
            return str(result)
        raise self.error(text, f"returned {type(result).__name__}, not text, true, false or None")


class Score(_UserFunction):
    """A step that keeps the documents whose score by the function lies within bounds."""

    def __init__(self, config: ScoreStep) -> None:
        super().__init__(config)
        self._least = -math.inf if config.at_least is None else config.at_least
        self._below = math.inf if config.below is None else config.below

    def apply(self, text: str) -> str | Drop:
        """Return the text, or why its score is out of bounds."""
        score = self.call(text)
        if isinstance(score, bool) or not isinstance(score, int | float | np.number) or not math.isfinite(score):
            raise self.error(text, f"returned {score!r:.40}, not a finite number")
        if score < self._least:
            return Drop("score too low", f"score {shown_number(float(score))} is below {self._least:g}")
        if score >= self._below:
            return Drop("score too high", f"score {shown_number(float(score))} is not below {self._below:g}")
        return text
