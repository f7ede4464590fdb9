"""What verbs of the command line do, as functions: `prepare`, `evaluate`, `compare`, `generate`, `export`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.api.results import Run
from headway.config import Config, load_config
from headway.config.sections.data import vocabulary_problems
from headway.lab.compare.evidence import Margin
from headway.text.preparing.prepare import prepare as prepare_store

if TYPE_CHECKING:
    from headway.text.preparing.report import PrepareReport

#: A run, its directory, or a Hugging Face folder.
Model = Run | str | Path


def prepare(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    workers: int | None = None,
    force: bool = False,
    repair: bool = False,
    **keys: Any,
) -> PrepareReport:
    """Turn the text of a config into its token store, or bring the store up to date. `train` does it where none is.

    Args:
        config: As for `load_config`.
        workers: Processes; `data.workers` when not given. The store's bytes do not depend on it. With more than one, a
            script needs the usual `if __name__ == "__main__":` guard.
        force: Prepare again even if nothing has changed, with a new vocabulary.
        repair: Also hash existing shards, and prepare damaged ones again.
        keys: Overrides, as for `load_config`.

    Raises:
        HeadwayError: with the reason; see its `exit_code`.
    """
    loaded = load_config(config, trains=False, **keys)
    for problem in vocabulary_problems(loaded.data, loaded.model.from_pretrained):
        raise problem
    return prepare_store(loaded.data, workers=workers, force=force, repair=repair, run=loaded.run_directory)


def evaluate(
    model: Model,
    *,
    step: int | None = None,
    store: str | Path | None = None,
    split: Literal["train", "validation"] = "validation",
    rows: int | None = None,
    sequence_length: int | None = None,
) -> dict[str, Any]:
    """Compute loss (nats per token) and perplexity of a trained model on held-out text.

    Args:
        model: A run, its directory, or a Hugging Face folder.
        step: Step of the checkpoint; the newest one when not given.
        store: Folder of the token store; the run's own when not given.
        split: Split of the store.
        rows: Most rows to use; all when not given.
        sequence_length: Tokens per row; as in training when not given.

    Returns:
        `loss`, `perplexity`, `tokens`, `step`, and so on, as `headway eval --json` prints them.

    Raises:
        HeadwayError: with the reason; see its `exit_code`.
    """
    from headway.training.evaluation.inference import evaluate_trained

    settings = {"split": split, "rows": rows, "sequence_length": sequence_length}
    return evaluate_trained(_path(model), step=step, store_path=None if store is None else Path(store), **settings)


def generate(
    model: Model,
    prompt: str = "",
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """Continue a text with a trained model, and return what it adds.

    Args:
        model: A run, its directory, or a Hugging Face folder. It is loaded for each call.
        prompt: The text to continue.
        max_new_tokens: Most tokens to add.
        temperature: 0 always takes the likeliest token.
        top_p: Sample among the likeliest tokens with this share of the probability.
        seed: Equal seeds give equal texts.
        step: Step of the checkpoint; the newest one when not given.

    Raises:
        HeadwayError: with the reason; see its `exit_code`.
    """
    from headway.training.evaluation.inference import continue_text, load_trained

    trained = load_trained(_path(model), step=step, device="auto")
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    return "".join(continue_text(trained, prompt, **sampling))  # type: ignore[arg-type]


def export(
    run: Model,
    folder: str | Path | None = None,
    *,
    step: int | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> Path:
    """Write a trained model as a Hugging Face folder: safetensors, config, tokenizer.

    Args:
        run: A run, or its directory.
        folder: Folder to write; `export` in the run directory when not given.
        step: Step of the checkpoint; the newest one when not given.
        dtype: Dtype of the stored weights.

    Returns:
        The folder.

    Raises:
        HeadwayError: with the reason; see its `exit_code`.
        OSError: the folder cannot be written.
    """
    from headway.training.evaluation.inference import export_trained, load_trained

    written = _path(run) / "export" if folder is None else Path(folder)
    export_trained(load_trained(_path(run), step=step), written, dtype)
    return written


def compare(
    *models: Model,
    data: str | Path | None = None,
    documents: int = 10_000,
    sequence_length: int | None = None,
    margin: str | None = None,
) -> dict[str, Any]:
    """Compare models with the first one on the same documents.

    Args:
        models: Runs, their directories, Hugging Face folders, or groups of seeds: a folder of runs, or a pattern.
        data: Text or a token store; the runs' own when not given.
        documents: Most documents to evaluate.
        sequence_length: Tokens per row; the shortest of the models' when not given.
        margin: How much worse a model may be, such as `1%`, for `non_inferior`.

    Returns:
        `effect`, `interval`, `non_inferior`, and so on, as `headway compare --json` prints them.

    Raises:
        HeadwayError: with the reason; see its `exit_code`.
    """
    from headway.lab.compare.compare import Wanted, as_json, compare_models

    least = None if margin is None else Margin.parse(margin)
    wanted = Wanted(None if data is None else Path(data), documents, sequence_length, least)
    compared = compare_models([str(_path(model)) for model in models], wanted)
    if compared.why_not is not None:
        raise compared.why_not
    return as_json(compared)


def _path(model: Model) -> Path:
    return model.directory if isinstance(model, Run) else Path(model)
