"""Models keep what they declare, and a model that does not is found; who asks for a declaration asks its protocol."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import headway
from headway.config import ModelConfig
from headway.core import model_protocol
from headway.core.errors import ConfigError
from headway.models import conformance
from headway.models.build import build_model
from headway.models.conformance import check_model
from headway.training.task import language_model_loss, language_model_stage

ROOT = Path(__file__).parents[3]
PROTOCOLS = {
    name: protocol
    for name, protocol in vars(model_protocol).items()
    if isinstance(protocol, type) and protocol.__module__ == model_protocol.__name__
}
MEMBERS = {
    member
    for protocol in PROTOCOLS.values()
    for member in (*vars(protocol), *getattr(protocol, "__annotations__", ()))
    if not member.startswith("_")
}


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(0, 64, (2, 8), generator=generator) for key in ("ids", "targets")}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True, "dropout": 0.1},
        {
            "experts": 4,
            "experts_per_token": 2,
            "expert_ffn_dim": 12,
            "dense_layers": 1,
            "shared_experts": 1,
            "router_score": "sigmoid",
            "router_z_loss": 0.01,
        },
        {
            "layer_pattern": "M*-",
            "mamba": {"heads": 4, "head_dim": 8, "state_dim": 4, "groups": 2, "chunk": 4},
            "rotary_fraction": 0.0,
            "activation": "relu2",
        },
        {
            "norm": "layernorm1p",
            "activation": "relu2",
            "qkv_bias": True,
            "output_bias": True,
            "ffn_bias": True,
            "rotary_fraction": 0.5,
        },
        {"post_norms": True, "rope_scaling": {"kind": "yarn", "factor": 2, "original_length": 4}, "qkv_bias": True},
        {
            "embedding_scale": 4.0,
            "norm": "rmsnorm1p",
            "post_norms": True,
            "activation": "geglu",
            "qk_norm": True,
            "attention_pattern": "SFN",
            "sliding_window": 3,
            "local_rope_theta": 50.0,
            "attention_softcap": 2.0,
            "logit_softcap": 1.0,
            "tie_embeddings": True,
        },
        {
            "pre_norms": False,
            "post_norms": True,
            "qk_norm": True,
            "qk_norm_over": "projection",
            "residual_scale": 0.3,
            "attention_scale": 0.2,
            "logit_divisor": 3.0,
        },
    ],
    ids=["dense", "tied", "experts", "hybrid", "nemotron", "glm", "gemma", "olmo and granite"],
)
def test_the_decoder_keeps_everything_that_a_model_can_declare(changes: dict[str, Any]) -> None:
    shape = ModelConfig(vocab_size=64, dim=16, layers=3, heads=2, ffn_dim=32, init_std=0.2, **changes)
    model = build_model(shape, vocab_size=64, seed=1)
    assert [name for name, kind in PROTOCOLS.items() if not isinstance(model, kind)] == ["ScalesRates", "KeptElsewhere"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stages = [range(1), range(1, 2), range(2, 3)]
    check_model(model, language_model_loss, batch(), stages=stages, stage_forward=language_model_stage)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_every_declaration_has_a_check() -> None:
    assert set(conformance._CHECKS) == set(PROTOCOLS.values())
    assert len(PROTOCOLS) == 14 and {"wrap_units", "draws_by_position", "after_step"} <= MEMBERS


def test_the_image_classifier_of_the_examples_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / "examples").exists():
        pytest.skip("the examples are not part of this copy")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import image_classifier  # type: ignore[import-not-found]

    monkeypatch.setitem(sys.modules, "image_classifier", image_classifier)
    samples = [image_classifier.Shapes(4, seed=1)[index] for index in range(4)]
    check_model(
        image_classifier.build_model(),
        image_classifier.loss,
        {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]},
    )


class Toy(nn.Module):
    """Two layers between an embedding and an output projection; subclasses declare something wrongly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 64)
        self.register_buffer("table", torch.ones(8), persistent=False)
        self.counted = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.table
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


class ForeignRandom(Toy):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * torch.rand((), generator=GENERATOR)


GENERATOR = torch.Generator().manual_seed(0)


class ExtraState(Toy):
    def get_extra_state(self) -> Any:
        return {"calls": 1}


class Frozen(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class OverlappingUnits(Toy):
    def wrap_units(self) -> list[nn.Module]:
        return [self.layers, self.layers[0]]


class ForeignUnit(Toy):
    def wrap_units(self) -> list[nn.Module]:
        return [nn.Linear(2, 2)]


class NormAsProduct(Toy):
    def product_parameters(self) -> list[nn.Parameter]:
        return [self.layers[0].weight, self.norm.weight]


class ForgottenBuffer(Toy):
    def make_buffers(self) -> None:
        pass


class PlanWithAGap(Toy):
    def tensor_plan(self, workers: int) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput

        whole = PrepareModuleInput(input_layouts=(None,), desired_input_layouts=(None,))
        return {"embedding": ColwiseParallel(), "layers.*": ColwiseParallel(), "norm": ColwiseParallel(), "head": whole}


class PlanWithAWrongName(Toy):
    def tensor_plan(self, workers: int) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import SequenceParallel

        return {"": SequenceParallel(), "heads": SequenceParallel()}


class WrongSignature(Toy):
    def tensor_plan(self) -> dict[str, Any]:
        return {}


class HalfTheLoss(Toy):
    share = 1.0

    def share_positions(self, group: Any) -> None:
        self.share = 0.5

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.share


class Undecided(Toy):
    draws_by_position = "perhaps"


class Staged(Toy):
    """Keeps everything in every stage, and so shares more than it declares."""

    def keep_stages(self, stages: Any) -> None:
        pass

    def stage_output(self, ids: torch.Tensor, workers: int = 1) -> torch.Tensor:
        return torch.empty(*ids.shape, 4, device="meta")

    def shared_between_stages(self) -> list[torch.Tensor]:
        return []


def stage(model: Any, batch: Mapping[str, Any], x: torch.Tensor | None, layers: range) -> torch.Tensor:
    x = model.embedding(batch["ids"]) if x is None else x
    for index in layers:
        x = model.layers[index](x).tanh()
    if layers.stop < 2:
        return x
    return nn.functional.cross_entropy(model.head(x).flatten(0, 1), batch["targets"].flatten())  # without the norm


class ExpertsOfDifferentNumber(Toy):
    def expert_units(self) -> list[nn.Module]:
        return [self.head]

    def share_experts(self, workers: Any, row_sharers: Any) -> None:
        self.head = nn.Linear(8, 64)


class UnscaledLoss(Toy):
    """Has a gradient of its own that does not follow the scale."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient + 1)
        return x

    def scale_losses(self, scale: float) -> None:
        pass


class StickyCounts(Toy):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.counted = ids.numel()
        return super().forward(ids)

    def take_counts(self) -> torch.Tensor:
        return torch.tensor([self.counted])

    def after_step(self, counts: torch.Tensor, updated: bool) -> dict[str, float]:
        with torch.no_grad():
            self.head.bias += 1
        return {"counted": counts}  # type: ignore[dict-item]


class FloatCounts(StickyCounts):
    def take_counts(self) -> torch.Tensor:
        return torch.tensor([0.5])


class ProjectionOfAnother(Toy):
    def output_projection(self) -> torch.Tensor:
        return torch.zeros(64, 8)


class LeavesOutWhatIsTrained(Toy):
    def kept_elsewhere(self) -> set[str]:
        return set(dict(self.named_parameters()))


@pytest.mark.parametrize(
    ("broken", "problems"),
    [
        (ForeignRandom, ["differs between two passes"]),
        (ExtraState, ["_extra_state"]),
        (Frozen, ["no parameter is trainable"]),
        (OverlappingUnits, ["Shardable: units of wrap_units share parameters"]),
        (ForeignUnit, ["Shardable: wrap_units gives Linear"]),
        (NormAsProduct, ["HasProductParameters: .* autocast does not cast"]),
        (ForgottenBuffer, ["make_buffers does not compute 'table'"]),
        (PlanWithAGap, ["leaves out 'head.weight'", "leaves out 'head.bias'"]),
        (PlanWithAWrongName, ["names 'heads'"]),
        (WrongSignature, [r"TensorParallelizable: tensor_plan\(workers\) cannot be called"]),
        (HalfTheLoss, ["ContextParallelizable: after share_positions"]),
        (Undecided, ["draws_by_position is 'perhaps'"]),
        (Staged, ["shared_between_stages of stage 0", "stage_output promises", "do not compute the loss"]),
        (ExpertsOfDifferentNumber, ["share_experts with no other worker"]),
        (UnscaledLoss, ["ScalesLosses: .* not twice as large"]),
        (
            StickyCounts,
            [
                "same counts again",
                "twice as much",
                "changes the state on a step that is skipped",
                "not numbers by name",
            ],
        ),
        (FloatCounts, ["not int64"]),
        (LeavesOutWhatIsTrained, ["kept_elsewhere names .*, which is trained"]),
        (ProjectionOfAnother, ["output_projection gives no matrix"]),
    ],
)
def test_a_model_that_breaks_a_promise_is_found(broken: type[Toy], problems: list[str]) -> None:
    check_model(Toy(), loss, batch())
    for problem in problems:
        with pytest.raises(ConfigError, match=problem) as error:
            check_model(broken(), loss, batch(), stages=[range(1), range(1, 2)], stage_forward=stage)
        assert error.value.where is not None and broken.__name__ in error.value.where


def asked_by_name(source: str) -> list[str]:
    """Members of protocols that code looks up by their names."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) > 1]
    return [
        name.value
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        if isinstance(name := node.args[1], ast.Constant) and name.value in MEMBERS
    ]


def test_no_declaration_is_looked_up_by_its_name() -> None:
    assert asked_by_name("getattr(model, 'wrap_units', None)\nhasattr(model, 'take_counts')\ngetattr(m, 'weight')") == [
        "wrap_units",
        "take_counts",
    ]
    source = Path(headway.__file__).parent
    texts = {str(path.relative_to(source)): path.read_text("utf-8") for path in source.rglob("*.py")}
    asking = {path: text for path, text in texts.items() if "getattr(" in text or "hasattr(" in text}
    assert len(texts) > 400 and len(asking) > 20
    assert {path: names for path, text in asking.items() if (names := asked_by_name(text))} == {}


def test_an_object_that_declares_nothing_is_no_protocol() -> None:
    assert not any(isinstance(Toy(), protocol) for protocol in PROTOCOLS.values())
    assert isinstance(SimpleNamespace(scale_losses=print), model_protocol.ScalesLosses)
