"""The runs whose final state is recorded, and the name of a state computed from the files alone."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from support.runs import headway

HERE = Path(__file__).parent
#: A config, its texts, the token store made of them, and a run that was stopped after 8 of 10 steps.
KEPT = HERE / "kept"
#: What its end is recorded as.
KEPT_RUN = "kept"
#: A module that is not a language model, trained from Python.
TRAINER_RUN = "trainer"
RECORDED_STATES = HERE / "golden" / "states.json"

#: What a run trains unless it says otherwise: 4 steps of a model with 13k parameters and dropout.
VALUES: dict[str, Any] = {
    "runs": "runs",
    "seed": 5,
    "data": {
        "sources": [{"path": "texts/counting.jsonl", "weight": 3}, {"path": "texts/tales.jsonl", "weight": 1}],
        "store": "store",
        "tokenizer": {"vocab_size": 270},
        "validation": 0.1,
        "workers": 1,
    },
    "model": {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 32, "dropout": 0.1},
    "train": {"steps": 4, "sequence_length": 32, "global_batch": 8, "micro_batch": 1, "lanes": 4, "device": "cpu"},
    "optimizer": {"learning_rate": 1e-2},
    "parallel": {"threads": 1},
    "checkpoint": {"every": "2 steps"},
    "evaluation": {"rows": 8},
    "supervise": {"max_failures": 1},
    "telemetry": {"report": False},
}


@dataclass(frozen=True)
class Start:
    """One `headway train` of a run."""

    overrides: tuple[str, ...] = ()
    faults: str = ""
    exit_code: int = 0


#: Stopped as a scheduler does, after step 3.
STOPPED = Start(faults="stop@step=3", exit_code=75)
#: The worker dies after step 3 and the supervisor starts it again.
KILLED = Start(faults="kill@step=3")


@dataclass(frozen=True)
class Run:
    """A run of some steps.

    Args:
        overrides: What differs from `VALUES`.
        starts: Commands until it is done.
        same_as: Another run that has the same state by promise.
        slow: Whether it is left to `make test-all`.
    """

    overrides: tuple[str, ...] = ()
    starts: tuple[Start, ...] = (Start(),)
    same_as: str | None = None
    slow: bool = False


def _workers(number: int, strategy: str, *more: str) -> tuple[str, ...]:
    return (f"parallel.workers={number}", f"parallel.strategy={strategy}", *more)


_ELASTIC = ("determinism=elastic",)
_PACKED = ("data.packing=best_fit", "data.document_mask=true", "train.micro_batch=2")
_EXPERTS = (
    "model.experts=4",
    "model.shared_experts=1",
    "model.dense_layers=1",
    "model.expert_ffn_dim=16",
    "model.router_score=sigmoid",
    "model.balance_bias_rate=0.01",
)
_RAMP = (
    *_ELASTIC,
    "train.batch_ramp=[{global_batch: 4, until: 2 steps}]",
    "data.mixture.stages=[{start: 3 steps, sequence_length: 16, weights: {counting: 1, tales: 1}}]",
    "schedule={unit: tokens, batch_scaling: sqrt}",
)
_ADAFACTOR = ("optimizer.name=adafactor", "schedule.name=wsd", "model.qk_norm=true")
_MUON = ("optimizer.name=muon", "train.precision=bf16", "train.activation_checkpointing=selective")
_ROLLBACK = ("health.on_nonfinite=rollback", "train.steps=6")

RUNS: dict[str, Run] = {
    # One state on any number of workers, under every strategy, whatever dies.
    "elastic": Run(_ELASTIC),
    "elastic-ddp-killed": Run((*_ELASTIC, *_workers(2, "ddp")), (Start(faults="kill@step=3%1"),), "elastic"),
    "elastic-zero1": Run((*_ELASTIC, *_workers(2, "zero1")), same_as="elastic", slow=True),
    "elastic-zero2": Run((*_ELASTIC, *_workers(2, "zero2")), same_as="elastic", slow=True),
    "elastic-zero3-then-single": Run(
        _ELASTIC, (Start(_workers(2, "zero3"), STOPPED.faults, STOPPED.exit_code), Start()), "elastic", slow=True
    ),
    "elastic-hsdp": Run((*_ELASTIC, *_workers(4, "hsdp", "parallel.replicate=2")), same_as="elastic", slow=True),
    # One state for the same workers.
    "single": Run(),
    "single-killed": Run(starts=(KILLED,), same_as="single", slow=True),
    "single-stopped": Run(starts=(STOPPED, Start()), same_as="single", slow=True),
    "ddp": Run(_workers(2, "ddp")),
    "ddp-stopped": Run(_workers(2, "ddp"), (STOPPED, Start()), "ddp", slow=True),
    "zero3": Run(_workers(2, "zero3"), slow=True),
    "zero3-killed": Run(_workers(2, "zero3"), (Start(faults="kill@step=3%0"),), "zero3", slow=True),
    "tensor": Run(_workers(2, "auto", "parallel.tensor=2"), slow=True),
    "context": Run(_workers(2, "auto", "parallel.context=2")),
    "pipeline": Run(_workers(2, "auto", "parallel.pipeline=2"), slow=True),
    "packed": Run(_PACKED, slow=True),
    "packed-killed": Run(_PACKED, (KILLED,), "packed"),
    "experts": Run(_EXPERTS),
    "experts-stopped": Run(_EXPERTS, (STOPPED, Start()), "experts", slow=True),
    "experts-shared": Run((*_EXPERTS, *_workers(2, "ddp", "parallel.expert=2")), slow=True),
    "ramp": Run(_RAMP),
    "ramp-ddp-stopped": Run((*_RAMP, *_workers(2, "ddp")), (STOPPED, Start()), "ramp", slow=True),
    "muon-bf16": Run((*_MUON, "optimizer.projections=whole")),
    "muon-apart": Run(_MUON),
    "muon-apart-stopped": Run(_MUON, (STOPPED, Start()), "muon-apart", slow=True),
    "lion-fp16": Run(
        ("optimizer={name: lion, learning_rate: 1e-3}", "train.precision=fp16", "schedule.name=rsqrt", *_PACKED)
    ),
    "adafactor-wsd": Run((*_ADAFACTOR, "optimizer.projections=whole"), slow=True),
    "adafactor-apart": Run(_ADAFACTOR, slow=True),
    "adafactor-apart-stopped": Run(_ADAFACTOR, (STOPPED, Start()), "adafactor-apart", slow=True),
    "skipped": Run(starts=(Start(faults="nan@gradient=2"),)),
    "rolled-back": Run(_ROLLBACK, (Start(faults="nan@gradient=3"),)),
    "rolled-back-stopped": Run(
        _ROLLBACK, (Start(faults="nan@gradient=3,stop@step=4", exit_code=75), Start()), "rolled-back", slow=True
    ),
    "deepspeed": Run(_workers(2, "deepspeed_zero2"), slow=True),
    "compiled": Run(("train.compile=true",), slow=True),
    TRAINER_RUN: Run(),
}


def processor() -> str:
    """Return what the bits of a state depend on besides the code: PyTorch's build and the kind of processor."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    first = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    kind = " ".join(first[name] for name in ("vendor_id", "cpu family", "model") if name in first)
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {kind or platform.processor()}"


def kept_copy(folder: Path) -> Path:
    """Copy what is kept, so that it can be trained on; returns the folder."""
    return Path(shutil.copytree(KEPT, folder, dirs_exist_ok=True))


def write_run_config(folder: Path, name: str = "run", values: Mapping[str, Any] = VALUES) -> Path:
    """Write the config of a run beside copies of the kept store and texts; returns its path."""
    for part in ("store", "texts"):
        if not (folder / part).exists():
            shutil.copytree(KEPT / part, folder / part)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, **values}), encoding="utf-8")
    return path


#: What runs name that load PyTorch's compiler or its distributed tensors: such commands begin with them loaded.
_HEAVY = re.compile("zero3|hsdp|tensor=|context=|pipeline=|expert=|muon")


def train(folder: Path, name: str) -> Path:
    """Do one of the runs; returns its newest checkpoint."""
    if name == TRAINER_RUN:
        return train_in_python(folder)
    run, config = RUNS[name], write_run_config(folder, name)
    for start in run.starts:
        words = (config.name, *run.overrides, *start.overrides)
        heavy = _HEAVY.search(" ".join(words)) is not None
        done = headway("train", *words, faults=start.faults, strategies=heavy, cwd=folder)
        assert done.returncode == start.exit_code, (name, done.returncode, done.stderr[-3000:])
    return newest_checkpoint(folder / "runs" / name)


def train_in_python(folder: Path) -> Path:
    """Train a module of one's own with `headway.Trainer`, stopped once; returns the newest checkpoint."""
    import torch

    import headway as package

    def make() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    class Samples:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([float((index * k) % 7) for k in range(1, 5)])

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        error: torch.Tensor = model(batch).squeeze(-1) - batch.mean(-1)
        return error.square().mean()

    class StopAtThree(package.Callback):
        def on_step(self, job: object, step: int, metrics: dict[str, float]) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    values = {"name": TRAINER_RUN, **VALUES, "runs": str(folder / "runs"), "evaluation": {"every": "2 steps"}}
    del values["data"], values["model"]
    values["train"] = {**VALUES["train"], "steps": 6}
    config = package.Config.model_validate(values)
    try:
        package.Trainer(make(), Samples(), loss, config, validation=Samples(), callbacks=[StopAtThree()]).fit()
    except package.HeadwayError as stopped:
        assert stopped.exit_code == 75, stopped
    run = package.Trainer(make(), Samples(), loss, config, validation=Samples()).fit()
    assert run.step == 6 and run.validation_loss is not None
    return newest_checkpoint(run.directory)


def continue_kept(folder: Path, workers: int, strategy: str) -> str:
    """Continue a copy of the kept run to its end, with hashes of every state; returns what is said on the way."""
    words = (f"parallel.workers={workers}", f"parallel.strategy={strategy}", "telemetry.state_hash_every=1")
    done = headway("train", "config.yaml", *words, strategies=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def newest_checkpoint(run: Path) -> Path:
    """Return the folder of a run's newest checkpoint."""
    return max((run / "checkpoints").glob("step-*"))


_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "BOOL": 1}


def state_name(checkpoint: Path) -> str:
    """Compute the name of a checkpoint's state from its files, as docs/checkpoint-format.md describes it.

    The tensors are put together from all files by their global names, so the name does not depend on how they are
    spread, and the code that is tested has no part in it.
    """
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    opened = {file: _tensors(checkpoint / file) for file in manifest["files"]}
    lines: list[Any] = []
    for name, tensor in sorted(manifest["tensors"].items()):
        kind, shape = tensor["dtype"], tensor["shape"]
        whole = np.zeros(shape, f"V{_ITEM_BYTES[kind]}")
        for part in tensor["slices"]:
            found_kind, found = opened[part["file"]][name]
            assert found_kind == kind and list(found.shape) == part["shape"], (name, part)
            offset = part["offset"]
            if len(part["shape"]) == len(shape):
                whole[tuple(slice(o, o + n) for o, n in zip(offset, found.shape, strict=True))] = found
            else:
                (begin,) = offset
                whole.reshape(-1)[begin : begin + found.size] = found
        lines.append([name, kind, shape, hashlib.sha256(whole.tobytes()).hexdigest()])
    lines.append(manifest["cursor"])
    text = "\n".join(json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=False) for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def _tensors(file: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Read a safetensors file: dtype and elements of each tensor, the elements as bytes of their size."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:end]).items():
        if name != "__metadata__":
            begin, stop = (end + offset for offset in entry["data_offsets"])
            elements = np.frombuffer(content[begin:stop], f"V{_ITEM_BYTES[entry['dtype']]}")
            found[name] = entry["dtype"], elements.reshape(entry["shape"])
    return found
