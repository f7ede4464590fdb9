"""Compression of a trained model, with its loss on held-out text before and after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.core.files.scratch import scratch_folder
from headway.models.hub.compressed import Compression, check_not_quantized, measure, write_compressed
from headway.models.huggingface.checkpoint import copy_tokenizer
from headway.models.huggingface.folder import check_not_foreign, mark, published
from headway.models.written import check_same_logits, probe_logits
from headway.parallel.world import pick_device
from headway.training.evaluation.inference import evaluate_model, export_trained, load_trained

#: Largest distance of the logits of a quantized model from those of the model itself, relative to their length. Of six
#: tiny families int8 took 0.01 to 0.07 of it and fp8 0.03 to 0.08; another model's logits are 1 or more away.
QUANTIZED_TOLERANCE = 0.5


def compress_trained(
    path: Path, folder: Path, wanted: Compression, *, step: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Write a compressed model as a Hugging Face folder, and return its loss and size before and after.

    The loss after is that of the folder as it was written. It becomes visible only when that is known.

    Args:
        path: Run directory, or Hugging Face folder.
        folder: Output folder.
        wanted: What to do.
        step: Checkpoint of the run; the newest good one when not given.
        settings: Of `evaluate_model`: the store, and how much of it.

    Raises:
        ConfigError: this machine cannot do it, the model is quantized already, or the folder holds anything but an
            earlier export.
        CheckpointError: the folder does not compute what the compressed model computed, or a quantized one is far from
            the model itself.
        OSError: the folder cannot be written.
    """
    folder = folder.resolve()
    device = pick_device("auto")
    wanted.check(device)
    check_not_foreign(folder)
    check_not_quantized(path)
    trained = load_trained(path, step=step, device=device)
    before = evaluate_model(trained, path, **settings)
    settings = {**settings, "sequence_length": before["sequence_length"]}

    def prove(_: Path) -> None:
        check_same_logits(probe_logits(written.model), expected, folder)
        if wanted.prune is None:  # what pruning changes has no bound; its loss says how much it is
            check_same_logits(probe_logits(written.model), probe_logits(trained.model), folder, QUANTIZED_TOLERANCE)

    with published(folder, prove) as building, scratch_folder("headway-compress-") as scratch:
        source = path
        if trained.config is not None or trained.has_adapter:
            source = scratch
            export_trained(trained, scratch, merge=trained.has_adapter)
        facts = {"loss": before["loss"], "perplexity": before["perplexity"], **_facts(trained.model, source)}
        expected = write_compressed(source, building, wanted, device)
        copy_tokenizer(source, building, trained.model.config.max_sequence_length)
        mark(building)
        written = replace(load_trained(building, device=device), config=trained.config)
        after = evaluate_model(written, building, **settings)
        result = {"loss": after["loss"], "perplexity": after["perplexity"], **_facts(written.model, building)}
    return {
        "folder": str(folder),
        "step": trained.step,
        "quantize": wanted.quantize,
        "prune": wanted.prune,
        "tokens": before["tokens"],
        "before": facts,
        "after": result,
    }


def _facts(model: Any, folder: Path) -> dict[str, Any]:
    shares = measure(model)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"bytes": size, "quantized_share": shares.quantized, "zero_share": shares.zero}
