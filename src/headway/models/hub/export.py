"""Export of models that transformers computes: the whole model, its adapter, or both merged."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import torch

from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.core.hub import is_on_hub, split_hub_name
from headway.models.hub.folder import base_folder, is_adapter, open_folder
from headway.models.hub.transformers_build import quiet
from headway.models.hub.transformers_model import TransformersModel
from headway.models.huggingface.checkpoint import copy_tokenizer
from headway.models.huggingface.export import all_stops
from headway.models.huggingface.folder import check_not_foreign, mark, published
from headway.models.written import FolderProof, check_same_logits, logits_as_stored, probe_logits

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_transformers_model(
    model: TransformersModel,
    folder: Path,
    tokenizer_folder: Path,
    *,
    dtype: Literal["fp32", "bf16"] = "fp32",
    tokenizer_json: bytes | None = None,
    chat_template: str | None = None,
    stop_ids: Collection[int] = (),
    merge: bool = False,
) -> None:
    """Write a model as a folder that transformers loads, or its adapter as one that peft loads.

    The tokenizer's settings are those of the pretrained model. The folder is complete or absent,
    as that of `headway.models.huggingface.export.export_model`.

    Args:
        model: On any device.
        folder: Output folder.
        tokenizer_folder: Contains the `tokenizer.json` of the data.
        dtype: Dtype of the stored weights.
        tokenizer_json: Overrides the file in the tokenizer's folder.
        chat_template: Overrides that of the pretrained model.
        stop_ids: As for `export_model`.
        merge: Add adapters to the weights that they adapt.

    Raises:
        ConfigError: the folder holds anything but an earlier export, or there is no adapter to merge.
        CheckpointError: the folder, or the merged model, does not compute what the model computes.
        OSError: the export cannot be written.
    """
    folder = folder.resolve()
    check_not_foreign(folder)
    source = model.config.from_pretrained
    assert source is not None
    pretrained = base_folder(source, with_code=model.config.trust_remote_code)
    if merge and not model.has_adapter:
        raise ConfigError("the model has no adapter to merge", where="headway merge", fix="headway export")
    network: Any = model.network
    if merge or dtype != "fp32":
        network = copy.deepcopy(network)  # the caller's model stays as it is
    if merge:
        network = _merged(model, network, folder)
    written = TransformersModel(model.config, network) if merge else model
    elsewhere = written.kept_elsewhere()  # what an adapter that is written alone adapts is not written
    expected = logits_as_stored(written, lambda name: torch.float32 if name in elsewhere else _DTYPES[dtype])
    frozen = {name: tensor for name, tensor in written.state_dict().items() if name in elsewhere}
    proof = FolderProof(folder, expected, model.config.trust_remote_code, frozen)
    with published(folder, proof) as building, quiet():
        network.to(_DTYPES[dtype])
        if model.has_adapter and not merge:
            for settings in network.peft_config.values() if not is_adapter(open_folder(source)) else ():
                settings.base_model_name_or_path = _name(source)
                settings.revision = split_hub_name(str(source))[1] if is_on_hub(source) else None
            # "auto" would ask the Hub whether the vocabulary has grown.
            network.save_pretrained(building, save_embedding_layers=False)
        else:
            if stop_ids and network.generation_config is not None:
                eos = network.generation_config.eos_token_id
                network.generation_config.eos_token_id = all_stops(eos, stop_ids)
                network.generation_config._from_model_config = False
            network.save_pretrained(building)
            for code in pretrained.glob("*.py") if model.config.trust_remote_code else ():
                shutil.copyfile(code, building / code.name)
        longest = model.config.max_sequence_length
        if (pretrained / "tokenizer.json").is_file():
            copy_tokenizer(pretrained, building, longest)
        else:
            copy_tokenizer(tokenizer_folder, building, longest)
        if tokenizer_json is not None:
            (building / "tokenizer.json").write_bytes(tokenizer_json)
        if chat_template is not None:
            (building / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        mark(building)


def _merged(model: TransformersModel, network: Any, folder: Path) -> Any:
    """Add the adapters of a copy of a model to the weights that they adapt, and check that it still computes the same.

    A matrix that an adapter changes is parted from the one that it is tied to, which the adapter does not change.
    """
    uses = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    settings = network.get_base_model().config
    for module in network.modules():
        adapted: Any = getattr(module, "base_layer", None)
        matrix = getattr(adapted, "weight", None)
        if matrix is None or uses[id(matrix)] < 2:
            continue
        uses[id(matrix)] -= 1
        adapted.weight = torch.nn.Parameter(matrix.detach().clone(), requires_grad=False)
        settings.tie_word_embeddings = settings.get_text_config().tie_word_embeddings = False
        notice(
            "an adapter changes one of two tied matrices: the folder has both, and tie_word_embeddings is false there"
        )
    with quiet():
        merged = network.merge_and_unload()
    found = probe_logits(TransformersModel(model.config, merged))
    check_same_logits(found, probe_logits(model), folder)
    return merged


def _name(source: Path | str) -> str:
    return split_hub_name(str(source))[0] if is_on_hub(source) else str(source)
