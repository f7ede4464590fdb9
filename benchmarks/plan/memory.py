"""Peak memory of training steps, by strategy, beside what `headway plan` says.

Measured are the bytes that PyTorch's allocator has handed out at a time, from the memory events of its profiler:
weights, gradients, moments, activations and every temporary of a kernel, but neither the Python process nor what gloo
allocates by itself.
Two steps are taken of a real model through the real training step, one or a few workers over gloo, on the CPU.

    python benchmarks/plan/memory.py
    python benchmarks/plan/memory.py --strategies context pipeline --precisions fp32
    python benchmarks/plan/memory.py --strategies ddp zero3 --models tiny --output memory.json
    python benchmarks/plan/memory.py --strategies deepspeed_zero2 deepspeed_zero3-offload --bucket 200000
    python benchmarks/plan/memory.py --strategies deepspeed_zero2 deepspeed_zero3 --bucket 200000 --models adapter
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from headway.config import Config, resolve, resolve_lanes, resolve_mesh
from headway.core.format import format_bytes
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory import plan_memory
from headway.models.build import build_model, complete
from headway.models.facts import part_costs
from headway.models.hub.frozen import freeze_as_configured
from headway.models.hub.transformers_build import build_transformers_model
from headway.models.hub.transformers_model import TransformersModel
from headway.parallel.stages import plan_stages, stages_of_worker
from headway.parallel.strategy import Engine, make_strategy
from headway.parallel.world import World, open_world
from headway.training.assembled import Assembled
from headway.training.optimizer import build_optimizer
from headway.training.setup.determinism import apply_determinism
from headway.training.setup.precision import convert_to_fp8
from headway.training.staged import make_pipeline
from headway.training.state import TrainState
from headway.training.step import TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task

#: Small, and unlike each other: vocabulary, layers or activations take most of the memory.
MODELS: dict[str, dict[str, Any]] = {
    "vocabulary": {"dim": 192, "layers": 2, "heads": 6, "kv_heads": 3, "ffn_dim": 512, "vocab_size": 16384},
    "layers": {"dim": 320, "layers": 8, "heads": 5, "kv_heads": 5, "ffn_dim": 896, "vocab_size": 2048},
    "activations": {
        "dim": 128, "layers": 6, "heads": 4, "kv_heads": 2, "ffn_dim": 512, "vocab_size": 1024, "tie_embeddings": True,
    },
    "experts": {
        "dim": 160, "layers": 5, "heads": 5, "kv_heads": 5, "ffn_dim": 512, "vocab_size": 2048, "experts": 8,
        "experts_per_token": 2, "expert_ffn_dim": 256, "shared_experts": 1, "dense_layers": 1,
    },
    "tiny-experts": {
        "dim": 96, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 256, "vocab_size": 2048, "experts": 4,
        "expert_ffn_dim": 128, "dense_layers": 1,
    },
    "tiny": {"dim": 96, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 256, "vocab_size": 2048},
    # For fp8, whose products take a processor a hundred times as long as those of fp32.
    "narrow": {"dim": 32, "layers": 3, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "vocab_size": 256},
}  # fmt: skip
#: Models of transformers, made for the measurement, with an adapter.
PRETRAINED: dict[str, dict[str, Any]] = {
    "adapter": {
        "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3,
        "intermediate_size": 512, "vocab_size": 4096,
    },
    "adapter-vocabulary": {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 384, "vocab_size": 16384,
    },
}  # fmt: skip
ROWS = {
    "adapter": 2,
    "adapter-vocabulary": 1,
    "experts": 2,
    "tiny-experts": 2,
    "vocabulary": 1,
    "layers": 1,
    "activations": 8,
    "tiny": 2,
    "narrow": 2,
}
STRATEGIES = {
    "single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "zero3-each": 2, "hsdp": 4, "hsdp-each": 4, "elastic": 2,
    "elastic-zero3": 2,
}  # fmt: skip
#: DeepSpeed's, without and with moments in host memory, which on the CPU is where everything is.
DEEPSPEED = {f"deepspeed_zero{stage}{offload}": 2 for stage in (1, 2, 3) for offload in ("", "-offload")}
#: Ways to share a row or a model. Not those of tensor parallelism: what its collectives were given is let go of by
#: gloo's threads, which `outlive_gloo` does not reach there.
MESHES: dict[str, dict[str, int]] = {
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
    "pipeline-context": {"pipeline": 2, "context": 2},
}
LENGTH = 256
OPTIMIZERS = ("adamw", "muon", "lion", "adafactor", "adamw8bit")


@dataclass(frozen=True)
class Case:
    """One measurement."""

    strategy: str
    """As in the config; "elastic" and "elastic-zero3" are `ddp` and `zero3` with determinism=elastic, "-each" reduces
    gradients in every micro-batch. Or a mesh."""
    model: str
    precision: str
    checkpointing: str
    micro_batches: int
    """Of one worker."""
    optimizer: str = "adamw"
    bucket: int | None = None
    """Elements that DeepSpeed sums at a time; None for its own choice, which of a small model is all there is."""

    @property
    def workers(self) -> int:
        """Processes."""
        alike = STRATEGIES | DEEPSPEED
        return alike.get(self.strategy) or math.prod(MESHES[self.strategy].values())

    def config(self) -> Config:
        """What a user would write."""
        elastic = self.strategy.startswith("elastic")
        rows, mesh = ROWS[self.model], MESHES.get(self.strategy, {})
        data = self.workers // math.prod(mesh.values())
        if self.model in PRETRAINED:
            model = {
                "from_pretrained": str(pretrained_folder(self.model)),
                "implementation": "transformers",
                "adapter": {"rank": 8},
            }
        else:
            model = {**MODELS[self.model], "max_sequence_length": LENGTH}
        train = {
            "steps": 2,
            "sequence_length": LENGTH,
            "micro_batch": rows,
            "global_batch": rows * self.micro_batches * data,
            "lanes": data * (self.micro_batches if elastic else 1),
            "precision": self.precision,
            "activation_checkpointing": self.checkpointing,
            "device": "cpu",
        }
        each = self.strategy.endswith("-each")
        own = self.strategy.removeprefix("elastic-").removesuffix("-offload").removesuffix("-each")
        parallel = {
            "strategy": "auto" if mesh else {"elastic": "ddp"}.get(own, own),
            "workers": self.workers,
            **mesh,
            "reduce_every": "micro_batch" if each else "auto",
            "threads": 1,
            "deepspeed_config": deepspeed_json(self.bucket) if self.bucket is not None else None,
        }
        optimizer = {"name": self.optimizer, "offload": self.strategy.endswith("-offload")}
        values = {"model": model, "train": train, "parallel": parallel, "optimizer": optimizer}
        config = resolve(Config.model_validate({**values, "determinism": "elastic" if elastic else "run"}))
        if self.model not in PRETRAINED:
            return config
        return config.model_copy(update={"model": complete(config.model, PRETRAINED[self.model]["vocab_size"])})


def pretrained_folder(name: str) -> Path:
    """A folder with a model of random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = Path(tempfile.gettempdir()) / f"headway-plan-{name}"
    if not (folder / "model.safetensors").exists():
        AutoModelForCausalLM.from_config(LlamaConfig(**PRETRAINED[name])).save_pretrained(folder)
    return folder


def pretrained_model(config: Config) -> TransformersModel:
    """A model of transformers with its adapter, its frozen weights as a run keeps them."""
    model = build_transformers_model(config.model, seed=0)
    model.loss_from_hidden = True
    freeze_as_configured(model, config.train.precision)
    return model


def deepspeed_json(bucket: int) -> Path:
    """A file with DeepSpeed's own choices for large models, all of them as much smaller as its buckets."""
    scale = bucket / 5e8
    settings = {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": int(5e7 * scale),
        "stage3_param_persistence_threshold": int(1e5 * scale),
        "stage3_max_live_parameters": int(1e9 * scale),
        "stage3_max_reuse_distance": int(1e9 * scale),
    }
    path = Path(tempfile.gettempdir()) / f"deepspeed-{bucket}.json"
    whole = path.with_suffix(f".{os.getpid()}")  # other workers read it meanwhile
    whole.write_text(json.dumps({"zero_optimization": settings}))
    return whole.replace(path)


def measure(case: Case, world: World) -> int:
    """Peak bytes of the worker that has most."""
    config = case.config()
    grid = resolve_lanes(config, world.mesh.data)
    apply_determinism(config.determinism)
    vocab_size = (MODELS | PRETRAINED)[case.model]["vocab_size"]
    # Loaded before the profiler starts, which does not see what the threads of transformers take and free.
    loaded = pretrained_model(config) if case.model in PRETRAINED else None
    gc.collect()  # what loading left in cycles would count as freed by the step
    there = 0 if loaded is None else sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers()))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stages, mine = None, None
        if world.mesh.pp > 1:
            costs = part_costs(config.model, LENGTH, vocab_size)
            stages = plan_stages(config.parallel, config.train, costs.layers, costs.embedding, costs.head)
            place = world.mesh.coordinates(world.rank)["pp"]
            mine = [stages[n] for n in stages_of_worker(place, world.mesh.pp, len(stages))]
        model = loaded or build_model(config.model, vocab_size=vocab_size, seed=0, stages=mine)
        model.train()
        model.set_activation_checkpointing(config.train.activation_checkpointing)
        if config.train.precision == "fp8":
            convert_to_fp8(model, LENGTH)  # PyTorch has the products for the CPU too
        strategy = make_strategy(config, model, world)
        settings = config.optimizer.model_copy(update={"offload": False})  # DeepSpeed keeps them there by itself
        optimizer = build_optimizer(
            settings, model, world.device, strategy.owns_for_update, elastic=config.determinism == "elastic"
        )
        engine = strategy if isinstance(strategy, Engine) else None
        if engine is not None:
            engine.take_over(optimizer)
        state = TrainState(model, optimizer, engine=engine)
        task = Task(model, None, LANGUAGE_MODELLING, stages=stages)  # type: ignore[arg-type]
        pipeline = make_pipeline(config.parallel, config.train.precision, task, world)
        for _ in range(2):
            batches = {
                lane: [random_rows(grid.micro_batch, vocab_size) for _ in range(grid.micro_batches)]
                for lane in grid.of_worker(world.data_rank, world.mesh.data)
            }
            TrainStep(Assembled(config, task, state, strategy, world, grid, pipeline)).run(batches)
            batches.clear()
    del model, loaded, strategy, optimizer, state, task, pipeline, engine
    gc.collect()  # sharded modules are in cycles; freed later, they would count as less in the next case
    return int(max(worker[0] for worker in world.gather([float(there + peak_bytes(profiler))])))


def random_rows(rows: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """A micro-batch of nothing in particular."""
    return {name: torch.randint(vocab_size, (rows, LENGTH)) for name in ("ids", "targets")}


def peak_bytes(profiler: Any) -> int:
    """The most that was allocated at a time since the profiler started."""
    total = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def outlive_gloo() -> None:
    """Let gloo's threads let go of what they were given before this one does.

    The profiler sees what this thread frees. What another thread frees would count as there for ever.
    """

    wait = dist.Work.wait

    def patient(work: dist.Work, *arguments: Any) -> Any:
        result = wait(work, *arguments)
        time.sleep(0.02)
        return result

    dist.Work.wait = patient  # type: ignore[method-assign]


def worker(path: Path) -> None:
    """Measure all cases of a file, as one of several processes; the first one writes the result."""
    torch.set_num_threads(1)
    outlive_gloo()
    work = json.loads(path.read_text())
    cases = [Case(**case) for case in work]
    found = []
    for mesh, some in groupby(cases, lambda case: resolve_mesh(case.config(), case.workers)):
        with open_world("cpu", 120, mesh) as world:
            found += [measure(case, world) for case in some]
    if world.is_first:
        path.write_text(json.dumps(found))


def measured(cases: list[Case]) -> list[int]:
    """Measure cases that take equally many workers, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps([asdict(case) for case in cases]))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cases[0].workers)]
        command = [sys.executable, *(torchrun if cases[0].workers > 1 else []), __file__, "--worker", str(path)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found: list[int] = json.loads(path.read_text())
    return found


def compare(case: Case, actual: int) -> dict[str, Any]:
    """One line of the table."""
    config = case.config()
    planned = plan_memory(config, config.model, Layout.of(config, case.workers), "cpu")
    error = planned.peak_bytes / actual - 1
    print(
        f"{case.strategy:16} {case.model:12} {case.precision} {case.checkpointing:9} {case.optimizer:9}"
        f" x{case.micro_batches}  measured {format_bytes(actual):>10}  planned {format_bytes(planned.peak_bytes):>10}"
        f"  {error:+6.1%}  {planned.peak.name}"
    )
    return {**asdict(case), "measured_bytes": actual, "planned_bytes": planned.peak_bytes, "error": error}


def main() -> None:
    """Measure, compare, and fail when one is too far off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=[*STRATEGIES, *DEEPSPEED, *MESHES], default=list(STRATEGIES))
    parser.add_argument(
        "--models", nargs="+", choices=[*MODELS, *PRETRAINED], default=["vocabulary", "layers", "activations"]
    )
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16", "fp16", "fp8"], default=["fp32", "bf16"])
    parser.add_argument("--checkpointing", nargs="+", choices=["none", "selective", "full"], default=["none", "full"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adamw"])
    parser.add_argument("--bucket", type=int, help="elements of DeepSpeed's buckets; its other sizes in proportion")
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    cases = [
        Case(*values, bucket=arguments.bucket)
        for values in product(
            arguments.strategies, arguments.models, arguments.precisions, arguments.checkpointing,
            arguments.micro_batches, arguments.optimizers,
        )
    ]  # fmt: skip
    for name in PRETRAINED.keys() & set(arguments.models):
        pretrained_folder(name)  # before several workers look for it
    results = []
    for workers in sorted({case.workers for case in cases}):
        some = [case for case in cases if case.workers == workers]
        if some:
            results += [compare(case, actual) for case, actual in zip(some, measured(some), strict=True)]
    errors = [abs(result["error"]) for result in results]
    print(f"{len(results)} cases: largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}")
    if arguments.output:
        arguments.output.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=2) + "\n")
    if max(errors) > arguments.tolerance:
        sys.exit(1)


if __name__ == "__main__":
    main()
