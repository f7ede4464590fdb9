"""Optimizers: what an update is, what is kept of it, and that resuming from what is kept changes no bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headway.config import Config, resolve
from headway.config.schema import OptimizerConfig
from headway.core.eight_bit import block_size
from headway.core.errors import ConfigError
from headway.core.requirements import install_command
from headway.run.session.parts import check_installed_for
from headway.training.optimizer import build_optimizer, materialize, muon, set_learning_rate, update
from headway.training.optimizer.adafactor import ProjectionAdafactor
from headway.training.optimizer.eager import eager
from headway.training.optimizer.lion import Lion
from headway.training.optimizer.offload import HostOffload
from headway.training.setup.available import slow_precision
from headway.training.setup.precision import muon_products
from headway.training.setup.shard_invariance import check_shard_invariance
from headway.training.state import TrainState

CPU = torch.device("cpu")
NAMES = ("adamw", "muon", "lion", "adafactor", "adamw8bit")


def optimizer_config(name: str, **values: object) -> OptimizerConfig:
    if name == "adamw8bit":
        pytest.importorskip("torchao", reason="pip install '.[torchao]'")
    return OptimizerConfig.model_validate({"name": name, "learning_rate": 0.01, **values})


def make_model() -> nn.Sequential:
    """Matrices large enough for 8 bits, a norm, and an output projection."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64), nn.Linear(64, 3))


def make_state(config: OptimizerConfig, updates: Callable[[torch.Tensor], bool] = lambda p: True) -> TrainState:
    model = make_model()
    return TrainState(model, build_optimizer(config, model, CPU, updates))


def train(state: TrainState, first: int, last: int) -> float:
    loss = 0.0
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step % 2)
        x = torch.randn(16, 64, generator=generator)
        state.model.zero_grad()
        error = (state.model(x) - x[:, :3].sin()).square().mean()
        error.backward()
        set_learning_rate(state.optimizer, 0.01 * (1 - step / 100))
        state.optimizer.step()
        loss = float(error.detach())
    return loss


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: block.local for name, block in state.blocks().items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_stops_and_resumes_has_the_bits_of_one_that_does_not(name: str) -> None:
    config = optimizer_config(name)
    whole = make_state(config)
    train(whole, 0, 3)
    saved = {name: tensor.clone() for name, tensor in tensors(whole).items()}
    train(whole, 3, 6)
    resumed = make_state(config)
    blocks = resumed.prepare_to_load()
    assert blocks.keys() == saved.keys()
    for key, block in blocks.items():
        block.local.copy_(saved[key])
    train(resumed, 3, 6)
    after = tensors(resumed)
    assert not [key for key, tensor in tensors(whole).items() if not torch.equal(tensor, after[key])]


@pytest.mark.parametrize("name", NAMES)
def test_having_state_before_the_first_step_changes_no_bit_of_a_run(name: str) -> None:
    config = optimizer_config(name)
    whole, ready = make_state(config), make_state(config)
    train(whole, 0, 2)
    ready.prepare_to_load()
    saved = {key: tensor.clone() for key, tensor in tensors(ready).items()}
    ready.prepare_to_load()
    for key, tensor in tensors(ready).items():
        assert torch.equal(tensor, saved[key]), f"{key} is what it was when it was saved"
    train(ready, 0, 2)
    for key, tensor in tensors(whole).items():
        assert torch.equal(tensor, tensors(ready)[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_falls(name: str) -> None:
    state = make_state(optimizer_config(name))
    first = train(state, 0, 1)
    assert train(state, 1, 30) < first / 2


@pytest.mark.parametrize("name", NAMES)
def test_workers_that_update_parts_update_the_whole(name: str) -> None:
    config = optimizer_config(name)
    whole = make_state(config)
    parts = []
    for rank in range(2):
        model = make_model()
        mine = {p for number, p in enumerate(model.parameters()) if number % 2 == rank}
        parts.append(TrainState(model, build_optimizer(config, model, CPU, mine.__contains__)))
    train(whole, 0, 1)
    for part in parts:
        train(part, 0, 1)
    owned = {key: t for part in parts for key, t in tensors(part).items() if key.startswith("optimizer.")}
    expected = {key: t for key, t in tensors(whole).items() if key.startswith("optimizer.")}
    assert sum(len([k for k in tensors(part) if k.startswith("optimizer.")]) for part in parts) == len(expected)
    assert owned.keys() == expected.keys()
    assert not [key for key, t in expected.items() if not torch.equal(t, owned[key])]
    for number, (name_, p) in enumerate(whole.model.named_parameters()):
        assert torch.equal(p, parts[number % 2].model.get_parameter(name_))


def test_lion_follows_algorithm_2() -> None:
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = Lion([{"params": [weight], "weight_decay": 0.3}], lr=0.01, betas=(0.9, 0.99))
    expected, moment = weight.detach().clone(), torch.zeros(5, 3, dtype=torch.float64)
    for _ in range(4):
        weight.grad = torch.randn(5, 3, dtype=torch.float64)
        direction = torch.sign(0.9 * moment + 0.1 * weight.grad)
        expected = expected - 0.01 * (direction + 0.3 * expected)
        moment = 0.99 * moment + 0.01 * weight.grad
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], moment)


def test_lion_updates_many_chunks_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for elements in (2**25, 100):
        monkeypatch.setattr("headway.training.optimizer.lion._TOGETHER", elements)
        states.append(make_state(optimizer_config("lion")))
        train(states[-1], 0, 3)
    a, b = map(tensors, states)
    assert not [key for key in a if not torch.equal(a[key], b[key])]


def test_lion_has_betas_of_its_own_unless_told() -> None:
    assert optimizer_config("lion").betas == (0.9, 0.99)
    assert optimizer_config("lion", betas=(0.95, 0.98)).betas == (0.95, 0.98)
    assert optimizer_config("adamw").betas == (0.9, 0.95)


@pytest.mark.parametrize("threads", [1, 2])
def test_lion_does_not_depend_on_cuts_here(threads: int) -> None:
    config = optimizer_config("lion")
    check_shard_invariance(lambda model, device: build_optimizer(config, model, device), CPU, threads)


def test_moments_in_8_bits_are_plain_tensors_of_a_quarter_of_the_size() -> None:
    def moments(name: str) -> dict[str, torch.Tensor]:
        state = make_state(optimizer_config(name))
        materialize(state.optimizer)
        return {
            key: t for key, t in tensors(state).items() if key.startswith("optimizer.exp_avg") and "0.weight" in key
        }

    small, full = moments("adamw8bit"), moments("adamw")
    assert {type(tensor) for tensor in small.values()} == {torch.Tensor}
    assert small["optimizer.exp_avg.codes.0.weight"].dtype == torch.uint8
    parts = sum(t.nbytes for key, t in small.items() if "qmap" not in key)
    assert parts < 0.27 * sum(t.nbytes for t in full.values())


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match="needs torchao") as error:
        build_optimizer(OptimizerConfig(name="adamw8bit"), make_model(), CPU)
    assert install_command("torchao") in error.value.fix


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_updates_in_host_memory_are_those_of_the_device(name: str) -> None:
    """From CPU to CPU, where both have the same kernels; then resumed, and with a weight changed by someone else."""
    config = optimizer_config(name)

    def offloaded() -> TrainState:
        model, twin = make_model(), make_model()

        def build(copies: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            for (module, key), copy in zip(places(twin), copies, strict=True):
                setattr(module, key, copy)
            return build_optimizer(config, twin, CPU)

        return TrainState(model, HostOffload(list(model.parameters()), build, CPU))

    plain, host = make_state(config), offloaded()
    train(plain, 0, 3)
    train(host, 0, 3)
    assert_same(plain, host)
    saved = {key: tensor.clone() for key, tensor in tensors(host).items()}
    for state in (plain, host):
        with torch.no_grad():
            next(state.model.parameters()).mul_(0.5)
        train(state, 3, 6)
    assert_same(plain, host)
    resumed = offloaded()
    for key, block in resumed.prepare_to_load().items():
        block.local.copy_(saved[key])
    with torch.no_grad():
        next(resumed.model.parameters()).mul_(0.5)
    train(resumed, 3, 6)
    assert_same(plain, resumed)


def places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(module, key) for module in model.modules() for key, _ in module.named_parameters(recurse=False)]


def assert_same(a: TrainState, b: TrainState) -> None:
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys()
    assert not [key for key in one if not torch.equal(one[key], other[key])]


def test_offload_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="in host memory already"):
        build_optimizer(OptimizerConfig(offload=True), make_model(), CPU)


@pytest.mark.parametrize(("name", "reason"), [("adafactor", "means of whole rows"), ("adamw8bit", "256")])
def test_what_needs_whole_rows_is_refused_where_they_are_cut(name: str, reason: str) -> None:
    config = {"train": {"steps": 2}, "model": {"preset": "4m"}, "optimizer": {"name": name}}
    with pytest.raises(ConfigError, match=reason) as error:
        resolve(Config.model_validate({**config, "parallel": {"tensor": 2, "workers": 2}}))
    assert "optimizer." in error.value.fix
    resolve(Config.model_validate({**config, "parallel": {"strategy": "zero3", "workers": 2}}))


def test_sums_over_the_rows_of_shards_are_neither_elastic_nor_in_host_memory() -> None:
    config = {
        "train": {"steps": 2},
        "parallel": {"strategy": "zero3", "workers": 2},
        "optimizer": {"name": "adafactor"},
    }
    with pytest.raises(ConfigError, match="round differently"):
        resolve(Config.model_validate({**config, "determinism": "elastic"}))
    for name in ("adafactor", "adamw8bit"):
        with pytest.raises(ConfigError, match=f"{name} .* host memory"):
            resolve(Config.model_validate({**config, "optimizer": {"name": name, "offload": True}}))
    resolve(
        Config.model_validate({**config, "determinism": "elastic", "parallel": {"strategy": "zero2", "workers": 2}})
    )


def test_muon_shares_directions_where_workers_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is kept in host memory lies elsewhere than its mesh; "meta" stands for the host here."""

    class Mesh:
        ndim, device_type = 1, "cpu"

        def size(self) -> int:
            return 2

        def get_local_rank(self) -> int:
            return 1

        def get_group(self) -> None:
            return None

    class Matrix:
        shape, device_mesh = torch.Size((4, 3)), Mesh()

    sent: list[torch.Tensor] = []
    monkeypatch.setattr(muon, "is_dtensor", lambda _: True)
    monkeypatch.setattr(muon, "local_part", lambda _: torch.zeros(2, 3, device="meta"))
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, group: sent.append(tensor))
    sharded = muon.ProjectionMuon([nn.Parameter(torch.zeros(4, 3))])
    direction = sharded._shared(None, Matrix(), 0)
    assert direction.device == CPU and direction.shape == (4, 3) and sent == [direction]


@pytest.mark.parametrize("shape", [(24, 16), (3, 8, 12), (40,)])
def test_adafactor_on_shards_is_pytorchs(shape: tuple[int, ...]) -> None:
    """One worker has all the rows here; several are tried in the tests with processes."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(4))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    groups = [{"params": [p], "weight_decay": 0.1} for p in (ours, theirs)]
    optimizers = (ProjectionAdafactor(groups[:1], lr=0.05), torch.optim.Adafactor(groups[1:], lr=0.05))
    for gradient in gradients:
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    kept, expected = optimizers[0].state[ours], optimizers[1].state[theirs]
    assert {key: tensor.shape for key, tensor in kept.items()} == {key: t.shape for key, t in expected.items()}


def test_moments_in_host_memory_are_of_whole_parameters_or_of_shards_but_not_of_parts() -> None:
    config = {"train": {"steps": 2}, "optimizer": {"offload": True}, "model": {"preset": "4m"}}
    resolve(Config.model_validate({**config, "parallel": {"strategy": "zero3", "workers": 2}}))
    with pytest.raises(ConfigError, match="tensor-parallel workers have parts of them"):
        resolve(Config.model_validate({**config, "parallel": {"tensor": 2, "workers": 2}}))


@pytest.mark.parametrize(
    ("values", "what"), [({"optimizer": {"name": "adamw8bit"}}, "adamw8bit"), ({"train": {"precision": "fp8"}}, "fp8")]
)
def test_a_missing_library_is_said_before_there_is_a_run(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, dict[str, object]], what: str
) -> None:
    monkeypatch.setattr("headway.run.session.parts.find_spec", lambda name: None)
    train = {"steps": 1, **values.get("train", {})}
    config = resolve(Config.model_validate({**values, "train": train}))
    with pytest.raises(ConfigError, match=f"{what}' needs torchao") as error:
        check_installed_for(config)
    assert install_command("torchao") in error.value.fix
    check_installed_for(resolve(Config.model_validate({"train": {"steps": 1}})))


def test_bf16_that_a_cpu_would_emulate_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = resolve(Config.model_validate({"train": {"steps": 1, "precision": "bf16"}}))
    for speed, told in ((4.0, None), (1.0, None), (0.5, "have 0.5 x the speed of fp32"), (0.0, "emulates them")):
        monkeypatch.setattr("headway.training.setup.available.cpu_bf16_speed", lambda speed=speed: speed)
        found = slow_precision(bf16.train, CPU)
        assert found is None if told is None else told in (found or "")
        assert slow_precision(bf16.train, torch.device("cuda", 0)) is None
        assert slow_precision(resolve(Config.model_validate({"train": {"steps": 1}})).train, CPU) is None


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_muon_orthogonalises_in_fp32_where_products_are(shape: tuple[int, int]) -> None:
    assert [muon_products(p) for p in ("fp32", "tf32")] == [torch.float32] * 2
    assert [muon_products(p) for p in ("bf16", "fp16", "fp8")] == [torch.bfloat16] * 3
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(shape, generator=generator), torch.randn(3, *shape, generator=generator)
    ends = []
    for products in (torch.bfloat16, torch.float32, torch.float64):
        model = nn.Sequential(nn.Embedding(2, 2), nn.Linear(shape[1], shape[0], bias=False), nn.Linear(2, 2))
        weight = model[1].weight
        wide = torch.float64 if products == torch.float64 else torch.float32
        weight.data = start.to(wide, copy=True)
        optimizer = build_optimizer(
            optimizer_config("muon"), model, CPU, lambda p, mine=weight: p is mine, products=products
        )
        for gradient in gradients:
            weight.grad = gradient.to(wide)
            optimizer.step()
        ends.append(weight.detach().double() - start)
    exact = ends[2]
    error = [float((end - exact).norm() / exact.norm()) for end in ends[:2]]
    assert error[1] < 1e-4 < 1e-3 < error[0] < 0.05


def test_shards_that_come_from_elsewhere_are_seen_too() -> None:
    """A model that its own code has sharded: the config says nothing of that."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = make_model()
        for module, key in places(model):
            setattr(module, key, nn.Parameter(distribute_tensor(getattr(module, key), mesh, [Shard(0)])))
        assert isinstance(build_optimizer(OptimizerConfig(name="adafactor"), model, CPU), ProjectionAdafactor)
        columns = nn.Linear(8, 8, bias=False)
        columns.weight = nn.Parameter(distribute_tensor(columns.weight, mesh, [Shard(1)]))
        for name in ("adafactor", "adamw8bit"):
            with pytest.raises(ConfigError, match=r"whole rows|256") as error:
                build_optimizer(OptimizerConfig(name=name), columns, CPU)
            assert "zero2" in error.value.fix
        muon = build_optimizer(optimizer_config("muon"), model, CPU)
        assert [part.__class__.__name__ for part in muon.parts] == ["AdamW", "ProjectionMuon"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((512, 256), 256),
        ((512, 384), 128),
        ((8, 704), 64),
        ((512, 96), None),
        ((8, 256), None),
        ((8192,), None),
        ((4, 8, 128), 128),
    ],
)
def test_blocks_of_8_bits_never_go_on_in_the_next_row(shape: tuple[int, ...], block: int | None) -> None:
    assert block_size(shape) == block


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_without_the_compiler_an_optimizer_computes_the_same(kind: type[torch.optim.Optimizer]) -> None:
    results = []
    for made in (kind, eager(kind)):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(7, 5))
        optimizer = made([p], lr=0.1)  # type: ignore[call-arg]
        for _ in range(3):
            (p.square().sum() * 0.5).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach(), *(t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_is_made_with_the_gradients_that_are_there() -> None:
    """They may be views into buckets, beside which a second set would be as large as the weights."""
    state = make_state(optimizer_config("adamw"))
    first, *others = state.model.parameters()
    first.grad = bucket = torch.ones_like(first)
    seen: list[torch.Tensor | None] = []
    step = state.optimizer.step

    def watched(*_: Any) -> None:
        seen.append(first.grad)
        step()

    state.optimizer.step = watched  # type: ignore[method-assign]
    materialize(state.optimizer)
    assert seen[0] is bucket and first.grad is bucket and not bucket.any()
    assert all(p.grad is None for p in others)
    moments = [t for name, t in tensors(state).items() if name.startswith("optimizer.")]
    assert moments and not any(t.any() for t in moments)


@pytest.mark.parametrize("name", NAMES)
def test_an_update_by_a_multiple_of_the_gradients_is_that_of_gradients_that_were_multiplied(name: str) -> None:
    state, other = (make_state(optimizer_config(name)) for _ in range(2))
    for one, factor in ((state, 1.0), (other, 8.0)):  # a power of two, so nothing is rounded
        for p in one.model.parameters():
            p.grad = torch.full_like(p, 0.25).cumsum(0) * factor
        update(one.optimizer, 0.5 / factor)
    for mine, theirs in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_adamw_takes_no_pass_over_the_gradients_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(optimizer_config("adamw"))
    for p in state.model.parameters():
        p.grad = torch.ones_like(p)
    monkeypatch.setattr(torch, "_foreach_mul_", None)
    update(state.optimizer, 0.5)
