"""Models of transformers with fewer bits per weight, through torchao, or with weights that are zero.

The format is that of `TorchAoConfig` of transformers: safetensors with the codes and scales of each matrix, and the
settings in config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from headway.config import ModelConfig
from headway.core.errors import ConfigError, missing_extra
from headway.core.files.foreign import read_json_or_empty
from headway.core.files.scratch import scratch_folder
from headway.models.finite import check_finite
from headway.models.hub.transformers_build import complete_from_transformers, explained, load_transformers, quiet
from headway.models.hub.transformers_model import TransformersModel
from headway.models.written import logits_as_stored, probe_logits

Quantization = Literal["int8", "int4", "fp8"]
Pruning = Literal["magnitude", "2:4"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Values that share a scale in int4.
INT4_GROUP = 128


@dataclass(frozen=True)
class Compression:
    """What is done to the linear layers of a model; its embeddings and output projection stay as they are."""

    quantize: Quantization | None = None
    prune: Pruning | None = None
    sparsity: float = 0.5
    """Share of each matrix that `magnitude` sets to zero."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of weights that are not quantized, and of the arithmetic."""

    def check(self, device: torch.device) -> None:
        """Check that this machine can do it.

        Raises:
            ConfigError: it cannot, or nothing is asked for, or a share is none.
        """
        if not 0.0 <= self.sparsity <= 1.0:  # also if it is NaN, which no bounds of an option catch
            raise ConfigError(
                f"a share of the weights is between 0 and 1, not {self.sparsity:g}",
                where=f"--sparsity {self.sparsity:g}",
                fix="--sparsity 0.5, or another share from 0 to 1",
            )
        if self.quantize is None and self.prune is None:
            raise ConfigError(
                "nothing is to be compressed",
                where="headway compress",
                fix="--quantize int8, int4 or fp8; --prune magnitude or 2:4",
            )
        if self.quantize is None:
            return
        if find_spec("torchao") is None:
            raise missing_extra("torchao", "torchao", f"--quantize {self.quantize}")
        if self.quantize != "int4":
            return
        if self.prune is not None:
            raise ConfigError(
                "int4 would not keep zeros: each group of weights has an offset of its own",
                where=f"--quantize int4, --prune {self.prune}",
                fix="--quantize int8 or fp8, which keep them",
            )
        if device.type != "cuda":
            raise ConfigError(
                "int4 needs a CUDA GPU: torchao packs 4-bit weights in the order in which its kernels read them there,"
                " and has no layout that a CPU could multiply with",
                where="--quantize int4",
                fix="run it on a machine with a GPU; or --quantize int8, here",
            )
        if self.dtype != "bf16":
            raise ConfigError(
                "torchao's kernels for int4 compute in bf16", where=f"--dtype {self.dtype}", fix="--dtype bf16"
            )
        if find_spec("accelerate") is None:  # transformers loads nothing straight to a GPU without it
            raise missing_extra("accelerate", "torchao,peft", "--quantize int4")


@dataclass(frozen=True)
class Shares:
    """Shares of all weights of a model."""

    quantized: float
    zero: float


def is_quantized(folder: Path) -> bool:
    """Return whether a folder holds a model whose weights torchao has quantized."""
    # A file that cannot be read is reported by whoever loads the model.
    settings = read_json_or_empty(folder / "config.json").get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == "torchao"


def check_not_quantized(folder: Path) -> None:
    """Check that the weights of a folder are not quantized yet: torchao's tensors can be neither pruned nor quantized.

    Raises:
        ConfigError: they are.
    """
    if is_quantized(folder):
        raise ConfigError(
            "the weights of this model are quantized already",
            where=str(folder),
            fix="compress the model that it was made from",
        )


def load_quantized(folder: Path, device: torch.device) -> TransformersModel:
    """Load a model whose weights torchao has quantized, in evaluation mode.

    Raises:
        ConfigError: transformers cannot load it, or torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise missing_extra("torchao", "torchao", "a model that torchao has quantized")
    library = load_transformers()
    with explained(folder):
        found = library.AutoConfig.from_pretrained(folder, local_files_only=True)
        network = _load(folder, device, dtype="auto")
    # Of torchao's tensors the scales decide: their codes are integers, or floats that have no infinity.
    check_finite(((name, getattr(p, "scale", p)) for name, p in network.named_parameters()), folder)
    config = complete_from_transformers(ModelConfig(from_pretrained=folder), found)
    return TransformersModel(config, network).eval()


def write_compressed(source: Path, folder: Path, wanted: Compression, device: torch.device) -> torch.Tensor:
    """Write the model of a folder into an empty folder, compressed; its tokenizer is not copied.

    Returns:
        What the compressed model computes while it is in memory: logits of `headway.models.written`, in fp32 if the
        weights have whole values, else as it computes.

    Raises:
        ConfigError: transformers cannot load it, or it has no linear layers that can be compressed.
    """
    settings: dict[str, Any] = {"dtype": _DTYPES[wanted.dtype]}
    quantizes = {**settings, "quantization_config": _torchao_settings(wanted.quantize)} if wanted.quantize else settings
    with explained(source):
        network = _load(source, device, **(settings if wanted.prune else quantizes))
        if not linear_layers(network):
            raise ConfigError(
                f"{type(network).__name__} has no linear layers, only matrices of other kinds",
                where=str(source),
                fix="leave it as it is; --dtype bf16 of `headway export` halves it",
            )
        if wanted.prune is not None:
            prune(network, wanted.prune, wanted.sparsity)
        if wanted.prune is not None and wanted.quantize is not None:
            # transformers quantizes while it loads, so the zeros go through a file.
            with scratch_folder("headway-pruned-") as pruned:
                network.save_pretrained(pruned)
                network = _load(pruned, device, **quantizes)
        config = complete_from_transformers(ModelConfig(from_pretrained=source), network.config)
        model = TransformersModel(config, network)
        expected = logits_as_stored(model) if wanted.quantize is None else probe_logits(model)
        network.save_pretrained(folder)
    return expected


def _load(folder: Path, device: torch.device, **options: Any) -> Any:
    if device.type != "cpu":
        options["device_map"] = {"": device}
    return load_transformers().AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, **options
    )


def _torchao_settings(kind: Quantization) -> Any:
    with quiet():
        import torchao.quantization as torchao  # type: ignore[import-not-found, import-untyped, unused-ignore]

    makes = {
        "int8": lambda: torchao.Int8WeightOnlyConfig(version=2),
        "fp8": lambda: torchao.Float8WeightOnlyConfig(),
        # This layout needs nothing but PyTorch; the others need kernels of another package.
        "int4": lambda: torchao.Int4WeightOnlyConfig(group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d"),
    }
    return load_transformers().TorchAoConfig(makes[kind]())


def linear_layers(network: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of a model of transformers by name, but not its output projection."""
    head = network.get_output_embeddings()
    modules = network.named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.Linear) and module is not head}


@torch.no_grad()
def prune(network: Any, kind: Pruning, sparsity: float) -> None:
    """Set the weights of least magnitude in each linear layer to zero (Han et al. 2015).

    Args:
        network: A model of transformers.
        kind: `magnitude`: a share of each matrix. `2:4`: two of four neighbours in each row, for which GPUs have
            kernels (Mishra et al. 2021).
        sparsity: The share.

    Raises:
        ConfigError: the rows of a matrix do not consist of whole groups of four.
    """
    layers = linear_layers(network)
    for name, layer in layers.items():
        if kind == "2:4" and layer.in_features % 4:
            raise ConfigError(
                f"rows of {layer.in_features} weights do not consist of whole groups of four",
                where=f"--prune 2:4, {name}",
                fix="--prune magnitude",
            )
    for layer in layers.values():
        # A row for all weights among which the smallest are chosen.
        groups = layer.weight.view(-1, 4) if kind == "2:4" else layer.weight.view(1, -1)
        zeros = 2 if kind == "2:4" else int(sparsity * layer.weight.numel())
        groups.scatter_(1, groups.abs().topk(zeros, largest=False).indices, 0.0)


def measure(model: nn.Module) -> Shares:
    """Measure which shares of a model's weights are quantized, and zero; zeros in int4 cannot be told."""
    quantized = zeros = total = 0
    for p in model.parameters():
        codes = getattr(p, "qdata", None)  # of torchao's tensors
        values = p if codes is None else codes
        total += p.numel()
        quantized += 0 if codes is None else p.numel()
        if values.numel() == p.numel():
            zeros += p.numel() - int(torch.count_nonzero(values.float()))
    return Shares(quantized / total, zeros / total)
