"""What follows training in a first hour: samples from the model, and its export."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from headway.core.console import notice
from headway.data.store import TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.training.evaluation.inference import TrainedModel, continue_text, export_trained, load_trained

#: Tokens of a prompt from the held-out text, and of what follows it.
_PROMPT_TOKENS = 12
_SAMPLES = 2


def sample_and_export(run: Path, store: Path, *, seed: int) -> None:
    """Let the model of a run continue texts of its store, and export it.

    Args:
        store: The token store.
    """
    trained = load_trained(run)
    sample(run, trained, prompts_of(store), seed=seed)
    export(run, trained)


def sample(run: Path, trained: TrainedModel, prompts: Sequence[str], *, seed: int) -> None:
    """Continue prompts with the model of a run, show the texts, and keep them in `samples.txt` of the run."""
    samples = []
    for prompt in prompts:
        pieces = continue_text(trained, prompt, max_new_tokens=64, temperature=0.7, top_p=0.95, seed=seed)
        samples.append(prompt + "".join(pieces))
    text = "\n\n".join(f"--- sample {number} ---\n{sample}" for number, sample in enumerate(samples, 1))
    (run / "samples.txt").write_text(text + "\n", encoding="utf-8")
    notice(text)


def export(run: Path, trained: TrainedModel) -> None:
    """Export the model of a run to the folder `export` of it."""
    export_trained(trained, run / "export")
    notice(f"{run / 'export'}")


def prompts_of(store_path: Path) -> list[str]:
    """Return the beginnings of the first held-out documents of a store, of training documents where none are."""
    store = TokenStore.open(store_path)
    split = "validation" if "validation" in store.splits else "train"
    source = store.sources(split)[0]
    bounds = store.shard_documents(split, source, 0).astype("int64").tolist()
    tokenizer = Tokenizer.load(store.tokenizer_folder)
    begin = len(store.begin_of_text)
    prompts: list[str] = []
    for start, end in pairwise(bounds):
        count = min(end - start - begin - 1, _PROMPT_TOKENS)
        if count > 0 and len(prompts) < _SAMPLES:
            prompts.append(tokenizer.decode(store.read(split, source, start + begin, count)))
    return prompts
