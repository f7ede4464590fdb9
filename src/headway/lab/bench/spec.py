"""What a launcher tells the workers of a cell, in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.lab.bench.results import CellResult, Measurement, Status


@dataclass(frozen=True)
class Spec:
    """The specification of one measurement of a cell."""

    result: CellResult
    """The result so far, with one repeat that has not ended."""
    config: Config
    data: str
    vocab_size: int
    warmup_steps: int
    steps: int
    profiled_steps: int

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Parse the output of `dump`."""
        value = json.loads(path.read_bytes())
        result = CellResult.model_validate(value.pop("result"))
        config = Config.model_validate(value.pop("config"))
        return cls(result, config, **value)

    def dump(self) -> dict[str, Any]:
        """Return the specification for JSON."""
        config = self.config.model_dump(mode="json")
        return {**vars(self), "result": self.result.model_dump(mode="json"), "config": config}

    def ended(self, status: Status, reason: str | None = None, measured: Measurement | None = None) -> CellResult:
        """Return the result with the end of its only repeat."""
        (repeat,) = self.result.repeats
        end = repeat.model_copy(update={"status": status, "reason": reason, "measured": measured})
        return self.result.model_copy(update={"repeats": [end]})
