"""Models whose masters are on the host and whose weights are on the device, made tensor by tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.streaming_peak import SHAPE, assembled, config
from headway.models.build import build_model
from headway.models.huggingface.checkpoint import INDEX
from headway.models.huggingface.config import to_huggingface
from headway.models.huggingface.weights import to_huggingface_tensors
from support.families import VOCAB, write_family
from support.gpu import needs_gpu

SCRIPT = Path(__file__).parents[3] / "distributed" / "streaming_peak.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder in the format of the Hub, in bf16 and in two files."""
    place = tmp_path_factory.mktemp("model")
    asked = config("fresh", "native", "fp32", str(place))
    model = build_model(asked.model, vocab_size=SHAPE["vocab_size"], seed=1)
    tensors = {name: t.detach().bfloat16() for name, t in to_huggingface_tensors(model.config, model.state_dict())}
    names = sorted(tensors)
    for number in range(2):
        save_file({name: tensors[name].contiguous() for name in names[number::2]}, place / f"{number}.safetensors")
    weight_map = {name: f"{index % 2}.safetensors" for index, name in enumerate(names)}
    (place / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (place / "config.json").write_text(json.dumps(to_huggingface(model.config, "bfloat16", {})))
    return place


@pytest.mark.parametrize(
    ("source", "implementation"),
    [
        ("hub", "native"),
        pytest.param("fresh", "native", marks=pytest.mark.slow),
        pytest.param("hub", "transformers", marks=pytest.mark.slow),
    ],
)
def test_host_has_masters_and_no_second_copy(source: str, implementation: str, folder: Path, tmp_path: Path) -> None:
    """Here the device is the host, so that weights in bf16 count too: half of the masters."""
    if implementation == "transformers":
        pytest.importorskip("transformers")
    given = str(folder) if source == "hub" else source
    command = [sys.executable, str(SCRIPT), given, implementation, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    whole, peak = map(int, done.stdout.split()[-2:])
    assert 1.4 * whole < peak < 2.2 * whole  # 1.5 of both sides, two tensors, and code that is loaded meanwhile


class OnDevice(TorchDispatchMode):
    """Notes type and shape of every tensor that an operation makes on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[torch.dtype, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.is_cuda:
            self.made.add((made.dtype, tuple(made.shape)))
        return made


@needs_gpu
def test_the_device_never_has_a_weight_in_fp32(tmp_path: Path) -> None:
    asked = config("fresh", "native", "bf16", str(tmp_path))
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"dim": 64, "layers": 2})})
    with OnDevice() as seen:
        made = assembled(asked, 64, "cuda")
    shapes = {tuple(p.shape) for p in made.task.model.parameters()}
    assert {shape for dtype, shape in seen.made if dtype == torch.bfloat16} >= shapes
    assert not {shape for dtype, shape in seen.made if dtype == torch.float32} & shapes
    masters = [block.local for name, block in made.state.blocks().items() if name.startswith("model.")]
    assert all(master.device.type == "cpu" and master.dtype == torch.float32 for master in masters)


@pytest.mark.parametrize("family", [None, "qwen3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_masters_are_the_weights_of_a_run_in_fp32(family: str | None, tmp_path: Path) -> None:
    """Also where weights are tied, or are converted while transformers loads them (stacked experts)."""
    source = "fresh"
    if family is not None:
        pytest.importorskip("transformers")
        source = str(write_family(family, tmp_path / "model", tie_word_embeddings=family == "qwen3"))
    states = []
    for weights in ("fp32", "bf16"):
        asked = config(source, "transformers", weights, str(tmp_path))
        if family is None:
            asked = asked.model_copy(update={"model": asked.model.model_copy(update={"dim": 64, "layers": 2})})
        made = assembled(asked, 64 if family is None else VOCAB)
        states.append({name: block.local for name, block in made.state.blocks().items()})
    exact, masters = states
    assert exact.keys() == masters.keys()
    assert all(torch.equal(exact[name], masters[name]) for name in exact)
    model = made.task.model
    parameters = dict(model.named_parameters())
    assert all(torch.equal(p, exact[f"model.{name}"].bfloat16()) for name, p in parameters.items())
    assert len(parameters) == len([name for name in masters if name.startswith("model.")])  # tied ones stay one
