"""Weights in bf16 with masters, moments and gradients in host memory (`train.weights: bf16`), on one lent GPU.

At most twelve minutes, in parts that can be asked for one by one; each runs in processes of its own, has a limit, and
writes what it found to `--output` before the next one begins.

- `tests` (3 min): the suite's tests marked `gpu`
- `offload` (4 min): 3 B from weights made on the device: tokens per second and peak beside DeepSpeed's ZeRO-Offload;
  one save
- `large` (2 min): 8 B with moments in bf16: three steps, no save, with 24 GiB of the device's memory
- `kill` (1.5 min): a run of 350 M killed after a save and resumed: its state beside that of a run that was not
- `peers` (1.5 min): 1 B in bf16, compiled: tokens per second beside torchtitan, LitGPT and the Trainer of Hugging Face

    python benchmarks/gpu/host_weights.py --output host-weights.json
    python benchmarks/gpu/host_weights.py --parts offload large --output host-weights.json
    python benchmarks/gpu/host_weights.py --wheels wheels/         # peers that are not installed, as wheels
    python benchmarks/gpu/host_weights.py --tiny                   # all of it small; without a GPU on an emulated one

Wheels are unpacked, not installed:

    pip download --no-deps -d wheels torchtitan==0.2.1 litgpt==0.5.13 lightning lightning-utilities pytorch-lightning \\
        torchmetrics jsonargparse tyro shtab typeguard docstring-parser torchdata tabulate
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from headway.checkpoint.save.messages import WriterSettings
from headway.checkpoint.save.writer import CheckpointWriter
from headway.config import Config, resolve, resolve_lanes
from headway.core.errors import HeadwayError
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory import plan_memory
from headway.models.build import build_without_memory
from headway.parallel.world import World
from headway.run.session.assemble import assemble
from headway.training.assembled import Assembled
from headway.training.step import TrainStep
from headway.training.task import LANGUAGE_MODELLING, Task

ROOT = Path(__file__).parents[2]
GIB = 2**30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Set where the device is emulated, which has no compiler.
EMULATED = "HEADWAY_TESTS_EMULATED_CUDA" in os.environ
#: Seconds that a part may take.
LIMITS = {"tests": 180, "offload": 240, "large": 120, "kill": 90, "peers": 90}
#: With `--tiny`, on machines of any speed.
TINY_SECONDS = 600
#: Memory of the card that `large` has to fit.
CARD_GIB = 24
#: Shapes of the Qwen3 and Llama 3 families, and what stands for each with `--tiny`.
SHAPES: dict[str, dict[str, Any]] = {
    "350m": {"dim": 1024, "layers": 24, "heads": 16, "kv_heads": 8, "ffn_dim": 3072, "vocab_size": 32768},
    "1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn_dim": 8192, "vocab_size": 128256},
    "3b": {"dim": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "ffn_dim": 8192, "vocab_size": 128256},
    "8b": {
        "dim": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn_dim": 12288, "vocab_size": 151936,
        "qk_norm": True,
    },
}  # fmt: skip
TINY = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 128, "vocab_size": 1024}


def shape_of(name: str, tiny: bool) -> dict[str, Any]:
    """Return a shape, or the tiny one in its place."""
    return TINY if tiny else SHAPES[name]


def config_of(shape: dict[str, Any], length: int, micro_batches: int, moments: str, device: str = "cuda") -> Config:
    """Return the config of one worker with weights in bf16."""
    return resolve(
        Config.model_validate(
            {
                "model": {**shape, "max_sequence_length": length},
                "optimizer": {"name": "adamw", "moments": moments},
                "train": {
                    "steps": 10, "sequence_length": length, "micro_batch": 1, "global_batch": micro_batches, "lanes": 1,
                    "weights": "bf16", "precision": "bf16", "activation_checkpointing": "full", "device": device,
                    "compile": False,
                },
                "parallel": {"strategy": "single", "workers": 1},
            }
        )
    )  # fmt: skip


def first_value(name: str, size: Sequence[int]) -> torch.Tensor:
    """Make a first value on the device: normally distributed matrices, norms of one."""
    made = torch.empty(tuple(size), device=DEVICE)
    return made.normal_(0, 0.02) if len(size) > 1 else made.fill_(1)


def assembled_on_device(config: Config) -> Assembled:
    """Assemble a run whose weights are made on the device, one tensor at a time."""
    assert config.model.vocab_size is not None
    model, _ = build_without_memory(config.model, vocab_size=config.model.vocab_size, seed=0)
    model.set_activation_checkpointing(config.train.activation_checkpointing)
    task = Task(model, None, LANGUAGE_MODELLING, first_value=first_value)  # type: ignore[arg-type]
    world = World(0, 1, 0, torch.device("cuda", 0))
    return assemble(config, task, world, resolve_lanes(config, 1), os.cpu_count() or 1)


def rows_of(config: Config) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of a step."""
    train = config.train
    size = (1, train.sequence_length)
    vocabulary = config.model.vocab_size
    assert vocabulary is not None
    return [
        {name: torch.randint(vocabulary, size, device=DEVICE) for name in ("ids", "targets")}
        for _ in range(train.global_batch_rows)
    ]


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Count the device's peak from now on."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def timed(steps: int, step: Callable[[], None]) -> list[float]:
    """Return the seconds of each step."""
    seconds = []
    for _ in range(steps):
        synchronize()
        began = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def measured(config: Config, seconds: list[float], warmup: int = 1) -> dict[str, Any]:
    """Return speed, device peak and resident memory after some steps."""
    tokens = config.train.tokens_per_step
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "tokens_per_second": tokens / statistics.median(seconds[warmup:]),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if DEVICE == "cuda" else 0.0,
        "resident_gib": resident / GIB,
        "step_seconds": seconds,
    }


def planned(config: Config) -> dict[str, float]:
    """Return what `headway plan` says of it."""
    plan = plan_memory(config, config.model, Layout.of(config, 1), "cuda")
    return {"planned_gib": plan.peak_bytes / GIB, "planned_host_gib": plan.host.total / GIB}


# Parts: each is called in a process of its own ------------------------------------------------------------------------


def part_tests(tiny: bool, folder: Path) -> dict[str, Any]:
    """Run the marked tests; with `--tiny` those of this strategy only."""
    where = ["tests/unit/parallel"] if tiny else ["tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode not in (0, 5):  # 5: none is there
        return {"n/a": f"exit {done.returncode}: {done.stdout[-1500:]}"}
    return {"result": "".join(last)}


def part_headway(tiny: bool, folder: Path) -> dict[str, Any]:
    """Train 3 B by Headway, and save once: how long training waits, and the step after it."""
    length = 64 if tiny else 4096
    config = config_of(shape_of("3b", tiny), length, 4, "fp32")
    made = assembled_on_device(config)
    reset_peak()
    found = measured(config, timed(4, lambda: _step(made, config))) | planned(config)
    writer = CheckpointWriter(WriterSettings(folder / "checkpoints", keep=1))
    began = time.perf_counter()
    waited = writer.submit(4, made.state.blocks(), {"step": 4}, {"attempt": 1})
    after = timed(1, lambda: _step(made, config))[0]
    writer.wait()
    whole = time.perf_counter() - began
    writer.close()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    save = {"waited_seconds": waited, "next_step_seconds": after, "whole_seconds": whole}
    return found | {"save": {**save, "resident_gib": resident / GIB}}


def _step(made: Assembled, config: Config) -> None:
    TrainStep(made).run({0: rows_of(config)})


def part_deepspeed(tiny: bool, folder: Path) -> dict[str, Any]:
    """Train the same decoder by DeepSpeed's ZeRO-2 with the optimizer in host memory, its weights in bf16."""
    import deepspeed

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    config = config_of(shape_of("3b", tiny), 64 if tiny else 4096, 4, "fp32")
    vocabulary = config.model.vocab_size
    assert vocabulary is not None
    model, _ = build_without_memory(config.model, vocab_size=vocabulary, seed=0)
    model.set_activation_checkpointing("full")
    model = model.to(torch.bfloat16).to_empty(device=DEVICE)
    model.make_buffers()
    for name, p in model.named_parameters():
        p.data.copy_(first_value(name, p.shape))
    settings = {
        "train_batch_size": config.train.global_batch_rows,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    update: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-5, betas=(0.9, 0.95), weight_decay=0.1)
    if DEVICE == "cuda":
        # Built by a compiler when it is first used; without one the update is that of PyTorch.
        with suppress(Exception):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            update = DeepSpeedCPUAdam(model.parameters(), 1e-5, betas=(0.9, 0.95), weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=update, config=settings)

    def step() -> None:
        for batch in rows_of(config):
            engine.backward(engine(batch["ids"], batch["targets"]) / config.train.sequence_length)
            engine.step()

    reset_peak()
    return measured(config, timed(4, step)) | {"update": type(update).__name__}


def part_large(tiny: bool, folder: Path) -> dict[str, Any]:
    """Train 8 B within the memory of a card of 24 GiB: three steps."""
    config = config_of(shape_of("8b", tiny), 64 if tiny else 4096, 2 if tiny else 4, "bf16")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, CARD_GIB * GIB / total))
    made = assembled_on_device(config)
    reset_peak()
    found = measured(config, timed(3, lambda: _step(made, config))) | planned(config)
    return found | {"fits": found["reserved_gib"] < CARD_GIB}


def part_kill(tiny: bool, folder: Path) -> dict[str, Any]:
    """Train twice: once through, once killed right after its first save and resumed; compare the last weights."""
    config = {
        "runs": str(folder / "runs"),
        "data": {
            "sources": [{"path": "stdlib:", "limit": "2 MB"}], "store": str(folder / "store"), "bad_documents": "skip",
            "tokenizer": {"vocab_size": 1024},
        },
        "model": {**shape_of("350m", tiny), "max_sequence_length": 256},
        "optimizer": {"name": "adamw", "learning_rate": 1e-4},
        "train": {
            "steps": 6, "sequence_length": 256, "global_batch": 4, "micro_batch": 2, "weights": "bf16",
            "precision": "bf16", "activation_checkpointing": "full", "compile": False, "device": "cuda",
        },
        "parallel": {"workers": 1},
        "checkpoint": {"every": "2 steps"},
        "evaluation": {"every": None},
        "telemetry": {"report": False},
    }  # fmt: skip
    shas = {}
    for name in ("whole", "killed"):
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"name": name, **config}))
        command = [sys.executable, "-m", "headway", "train", str(file)]
        if name == "killed":
            _kill_after_save(command, folder / "runs" / name / "checkpoints")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"n/a": f"{name}: exit {done.returncode}: {done.stderr[-800:]}"}
        newest = max((folder / "runs" / name / "checkpoints").glob("step-*"))
        shas[name] = json.loads((newest / "manifest.json").read_text())["state_sha256"]
    return {"equal": shas["whole"] == shas["killed"], **shas}


def _kill_after_save(command: list[str], checkpoints: Path) -> None:
    """Start a run in a process group of its own, and kill it when its first checkpoint is there."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not any(checkpoints.glob("step-*/manifest.json")):
        time.sleep(0.01)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def part_peer_headway(tiny: bool, folder: Path) -> dict[str, Any]:
    """Train 1 B by `headway train` with fp32 weights under autocast, compiled."""
    steps = 4 if tiny else 14
    length = 64 if tiny else 4096
    rows = 2 if tiny else 8
    compiled = not EMULATED
    config = {
        "name": "peer", "runs": str(folder / "runs"),
        "data": {
            "sources": [{"path": "stdlib:", "limit": "4 MB"}], "store": str(folder / "store"), "bad_documents": "skip",
            "tokenizer": {"vocab_size": 1024},
        },
        "model": {**shape_of("1b", tiny), "max_sequence_length": length},
        "train": {
            "steps": steps, "sequence_length": length, "global_batch": rows, "micro_batch": 1 if tiny else 2,
            "precision": "bf16", "compile": compiled, "device": "cuda",
        },
        "parallel": {"workers": 1},
        "checkpoint": {"every": "1000000 steps"}, "evaluation": {"every": None}, "telemetry": {"report": False},
    }  # fmt: skip
    file = folder / "peer.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "-m", "headway", "train", str(file)], capture_output=True, text=True)
    if done.returncode:
        return {"n/a": f"exit {done.returncode}: {done.stderr[-800:]}"}
    lines = (folder / "runs" / "peer" / "metrics.jsonl").read_text().splitlines()
    seconds = [record["speed/step_seconds"] for line in lines if "speed/step_seconds" in (record := json.loads(line))]
    return {"tokens_per_second": rows * length / statistics.median(seconds[steps // 2 :]), "step_seconds": seconds}


def part_peer_torchtitan(tiny: bool, folder: Path) -> dict[str, Any]:
    """Train torchtitan's Llama 3 (0.2.1), layers and loss compiled, as its `apply_compile` does."""
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    shape = shape_of("1b", tiny)
    with torch.device("cuda"):
        args = TransformerModelArgs(
            dim=shape["dim"], n_layers=shape["layers"], n_heads=shape["heads"], n_kv_heads=shape["kv_heads"],
            vocab_size=shape["vocab_size"], max_seq_len=4096, rope_theta=500000, multiple_of=1024,
            ffn_dim_multiplier=1.5,
        )  # fmt: skip
        model = Transformer(args)
        model.init_weights()
    for layer in model.layers.values():
        layer.compile(fullgraph=True)
    return _loop(model, lambda ids: model(ids), shape, tiny)


def part_peer_litgpt(tiny: bool, folder: Path) -> dict[str, Any]:
    """Train LitGPT's model (0.5.13), compiled as its `pretrain` does."""
    from litgpt.config import Config as LitConfig
    from litgpt.model import GPT

    shape = shape_of("1b", tiny)
    settings = LitConfig(
        n_layer=shape["layers"], n_head=shape["heads"], n_query_groups=shape["kv_heads"], n_embd=shape["dim"],
        head_size=shape["dim"] // shape["heads"], intermediate_size=shape["ffn_dim"], block_size=4096,
        padded_vocab_size=shape["vocab_size"], vocab_size=shape["vocab_size"], rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    with torch.device("cuda"):
        model = GPT(settings)
    called = model if EMULATED else torch.compile(model)
    return _loop(model, called, shape, tiny)


def _loop(
    model: torch.nn.Module, logits_of: Callable[[torch.Tensor], torch.Tensor], shape: dict[str, Any], tiny: bool
) -> dict[str, Any]:
    """Train by the loop of these libraries: autocast, fused AdamW, clipping."""
    rows, micro, length = (2, 1, 64) if tiny else (8, 2, 4096)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        for _ in range(rows // micro):
            ids = torch.randint(shape["vocab_size"], (micro, length + 1), device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                logits = logits_of(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            (loss * micro / rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = timed(4 if tiny else 12, step)
    half = seconds[len(seconds) // 2 :]
    return {"tokens_per_second": rows * length / statistics.median(half), "step_seconds": seconds}


def part_peer_trainer(tiny: bool, folder: Path) -> dict[str, Any]:
    """Train transformers' Llama by the Trainer of Hugging Face, compiled."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    shape = shape_of("1b", tiny)
    rows, micro, length = (2, 1, 64) if tiny else (8, 2, 4096)
    steps = 4 if tiny else 12
    with torch.device("cuda"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=shape["dim"], num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
                num_key_value_heads=shape["kv_heads"], intermediate_size=shape["ffn_dim"],
                vocab_size=shape["vocab_size"], max_position_embeddings=4096,
            )
        )  # fmt: skip
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            ends.append(time.perf_counter())

    settings = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro,
        max_steps=steps, learning_rate=3e-4, bf16=True, torch_compile=not EMULATED, optim="adamw_torch_fused",
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in torch.randint(shape["vocab_size"], (steps * rows, length))]
    Trainer(model=model, args=settings, train_dataset=data, callbacks=[Clock()]).train()
    seconds = [after - before for before, after in pairwise(ends)]
    return {"tokens_per_second": rows * length / statistics.median(seconds[steps // 2 :]), "step_seconds": seconds}


#: Part -> what runs in it, in this order.
WORK: dict[str, dict[str, Callable[[bool, Path], dict[str, Any]]]] = {
    "tests": {"marked": part_tests},
    "offload": {"headway": part_headway, "deepspeed": part_deepspeed},
    "large": {"headway": part_large},
    "kill": {"headway": part_kill},
    "peers": {
        "headway": part_peer_headway,
        "torchtitan": part_peer_torchtitan,
        "litgpt": part_peer_litgpt,
        "trainer": part_peer_trainer,
    },
}


def run_one(part: str, name: str, tiny: bool) -> None:
    """Run one piece of work in this process, and print its result as the last line."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = WORK[part][name](tiny, Path(folder))
        except (ImportError, RuntimeError, AttributeError, TypeError, HeadwayError) as error:
            traceback.print_exc()
            found = {"n/a": f"{type(error).__name__}: {error}"[:800]}
    print("\n" + json.dumps(found), flush=True)


def ask(part: str, name: str, seconds: float, arguments: argparse.Namespace, variables: dict[str, str]) -> Any:
    """Run one piece of work in a process of its own that may take so many seconds."""
    command = [sys.executable, __file__, "--one", part, name, *(["--tiny"] if arguments.tiny else [])]
    if name == "deepspeed" and DEVICE == "cpu":  # whose kernels do not run on an emulated device
        variables = {**os.environ, "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"n/a": f"not done within {seconds:.0f} s"}
    if process.returncode:
        return {"n/a": f"exit {process.returncode}: {errors.strip()[-800:]}"}
    return json.loads(output.splitlines()[-1])


@contextmanager
def variables_with(wheels: Path | None, tiny: bool) -> Iterator[dict[str, str]]:
    """Yield the environment of the work: unpacked wheels, and without a GPU the tests' emulated one."""
    variables = dict(os.environ)
    if not torch.cuda.is_available():
        if not tiny:
            raise SystemExit("there is no CUDA device here; --tiny tries everything on an emulated one")
        sys.path.insert(0, str(ROOT / "tests"))
        from cuda_in_memory.emulated_cuda import environment

        variables = environment() or {}
        if not variables:
            raise SystemExit("there is neither a CUDA device nor a compiler for an emulated one")
    with tempfile.TemporaryDirectory() as folder:
        for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), folder]))
        yield variables


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print a table for people."""
    for part, found in results.items():
        for name, one in found.items():
            if "n/a" in one:
                shown = f"n/a: {one['n/a'].strip().splitlines()[-1]}"
            else:
                plain = {key: value for key, value in one.items() if isinstance(value, (bool, float, str))}
                shown = ", ".join(f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in plain.items())
            print(f"{part:8} {name:11} {shown}")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; without a GPU on an emulated one")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels with peers that are not installed")
    parser.add_argument("--output", type=Path, help="also write everything as JSON, after every part")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        part, name = arguments.one
        run_one(part, name, arguments.tiny)
        return
    results: dict[str, dict[str, Any]] = {}
    with variables_with(arguments.wheels, arguments.tiny) as variables:
        for part in arguments.parts:
            until = time.monotonic() + (TINY_SECONDS if arguments.tiny else LIMITS[part])
            results[part] = {}
            for name in WORK[part]:
                print(f"{part}: {name} ...", file=sys.stderr, flush=True)
                results[part][name] = ask(part, name, until - time.monotonic(), arguments, variables)
                if arguments.output:
                    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "emulated"
                    facts = {"device": card, "torch": torch.__version__, "tiny": arguments.tiny}
                    arguments.output.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
