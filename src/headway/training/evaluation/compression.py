"""Compression of a trained model, with its loss on held-out text before and after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.core.files.scratch import scratch_folder
from headway.models.hub.compressed import Compression, check_not_quantized, measure, write_compressed
from headway.models.huggingface.checkpoint import copy_tokenizer
from headway.models.huggingface.folder import check_not_foreign, mark, published
from headway.parallel.world import pick_device
from headway.training.evaluation.inference import evaluate_model, export_trained, load_trained


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
        OSError: the folder cannot be written.
    """
    folder, device = folder.resolve(), pick_device("auto")
    wanted.check(device)
    check_not_foreign(folder)
    check_not_quantized(path)
    trained = load_trained(path, step=step, device=device)
    before = evaluate_model(trained, path, **settings)
    settings = {**settings, "sequence_length": before["sequence_length"]}
    with published(folder) as building, scratch_folder("headway-compress-") as scratch:
        source = path
        if trained.config is not None or trained.has_adapter:
            source = scratch
            export_trained(trained, scratch, merge=trained.has_adapter)
        facts = {"loss": before["loss"], "perplexity": before["perplexity"], **_facts(trained.model, source)}
        write_compressed(source, building, wanted, device)
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
