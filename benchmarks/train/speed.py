"""Training speed beside what users would pick instead: whole commands, the same model, data, precision and batch.

`headway train` as a user starts it, but for checkpoints and evaluations, against loops with the Trainer of Hugging
Face, Lightning, Accelerate, LitGPT and one in nanoGPT's manner, and against `ceiling.py`, the best loop that we know
how to write by hand. All begin from the same weights and see the same rows in the same order; the mean loss of all
steps must come out the same. Each is tried with and without torch.compile first, alone, and then takes part as it is
fastest.

How fast a machine is may change from one minute to the next, by more than contenders differ. So in a round all commands
are under way at the same time and take turns: one computes a few steps, while the others are stopped (SIGSTOP), then
the next one. Medians over rounds are shown.

- tokens/s: over all steps after `--warmup` that began and ended in one turn, all between steps included. The first step
  of every turn does not count.
- first step: from the start of the command to the end of the first step, the others being stopped or not there yet.
- memory: the largest sum of what all processes of the command have for themselves and share (PSS), looked at every
  quarter of a second while it was alone; the median and the range of `--peaks` runs.

The peers need an environment of their own: `pip install transformers accelerate lightning litgpt safetensors`.

    python benchmarks/train/speed.py --peers peers/bin/python
    python benchmarks/train/speed.py --preset 4m --vocabulary 8192 --rounds 7 --output speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from contender import Command, Measured, run

sys.path.insert(0, str(Path(__file__).parent / "peers"))

PEERS = ("transformers", "lightning", "accelerate", "litgpt", "nanogpt")
#: Ours besides the command itself.
OWN = ("ceiling", "products")
#: What Headway's speed is to be of the best peer's and of the hand-written loop's.
LEAST_OF_PEERS, LEAST_OF_CEILING = 1.3, 0.95
#: Of a peer's first step, what ours may take.
MOST_OF_FIRST_STEP = 0.5
LEARNING_RATE, MAX_GRAD_NORM, BETAS = 3e-4, 1.0, (0.9, 0.95)
#: Between mean losses; rounding is a thousand times smaller.
LOSS_TOLERANCE = 0.01
_STEPS_OF_A_TURN = 5
#: Of each way, in turns: the machine may be busy with something else in one of them.
_TRIALS = 2


class Workload:
    """What all train on, in a folder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tokens_per_step = options.rows * options.sequence_length
        self.steps = options.warmup + options.steps
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(self._settings()))
        subprocess.run([sys.executable, "-m", "headway", "data", "prepare", str(self.config)], check=True)
        self._export()

    def _settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "name": "speed",
            "runs": str(self.folder / "runs"),
            "data": {
                "sources": ["stdlib:"],
                "store": str(self.folder / "store"),
                "bad_documents": "skip",
                "tokenizer": {"vocab_size": options.vocabulary},
            },
            "model": {"preset": options.preset},
            "train": {
                "steps": self.steps,
                "sequence_length": options.sequence_length,
                "global_batch": options.rows,
                "micro_batch": options.rows,
                "precision": options.precision,
                "max_grad_norm": MAX_GRAD_NORM,
                "device": "cpu",
            },
            "optimizer": {"name": "adamw", "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "betas": list(BETAS)},
            "schedule": {"name": "constant", "warmup": 1},
            "checkpoint": {"every": "1000000 steps"},
            # It is stopped while others have their turn.
            "supervise": dict.fromkeys(("hang_seconds", "start_seconds", "save_seconds", "data_seconds"), 3600),
            "evaluation": {"every": None},
        }

    def _export(self) -> None:
        """The first weights and the rows of all steps, for those who are not us."""
        from headway.config import load_config, resolve_grid
        from headway.data.feeding.token_feed import TokenFeed
        from headway.data.remote_store import open_store
        from headway.models.build import build_model
        from headway.models.huggingface.export import export_model

        config = load_config(self.config, [])
        store = open_store(config.data)
        grid = resolve_grid(config, 1)
        feed = TokenFeed.of(config.row_settings, grid, store)
        steps = []
        for step in range(self.steps):
            batches = [batch for lane in range(grid.lanes) for batch in feed.batch(step, lane)]
            ids = np.concatenate([batch["ids"].numpy() for batch in batches])
            targets = np.concatenate([batch["targets"].numpy() for batch in batches])
            steps.append(np.concatenate((ids, targets[:, -1:]), axis=1).astype(np.int32))
        np.save(self.folder / "rows.npy", np.stack(steps))
        model = build_model(config.model, vocab_size=store.vocab_size, seed=config.seed)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        export_model(model, self.folder / "model")

    def job(self, name: str, compiled: bool) -> Path:
        """For a contender that is not us."""
        from workload import Job

        job = Job(
            model=str(self.folder / "model"),
            rows=str(self.folder / "rows.npy"),
            result=str(self.folder / f"{name}.json"),
            precision=self.options.precision,
            compile=compiled,
            threads=self.options.threads,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            betas=BETAS,
        )
        path = self.folder / f"{name}-job.json"
        path.write_text(json.dumps(asdict(job)))
        return path


def choose(names: list[str], work: Workload) -> tuple[dict[str, bool], dict[str, list[Measured]], dict[str, str]]:
    """Which of them are faster compiled, alone; the runs that they had alone that way; and why others cannot take
    part."""
    chosen, alone, missing = {}, {}, dict[str, str]()
    ways = (False, True) if work.options.compile == "best" else (work.options.compile == "on",)
    for name in names:
        runs: dict[bool, list[Measured]] = {}
        for compiled in (False,) if name == "products" else ways * _TRIALS:
            done = runs.setdefault(compiled, [])
            if compiled and not done and not tried(name, compiled, work, missing):
                continue  # that one was for what is compiled to be in its cache
            done += tried(name, compiled, work, missing)
        best = max(runs, key=lambda compiled: max((one.tokens_per_second for one in runs[compiled]), default=0.0))
        if runs[best]:
            for _ in range(work.options.peaks - len(runs[best])):
                runs[best] += tried(name, best, work, missing)
            chosen[name], alone[name] = best, runs[best]
            missing.pop(name, None)
    return chosen, alone, missing


def tried(name: str, compiled: bool, work: Workload, missing: dict[str, str]) -> list[Measured]:
    """A run alone; none where it failed, with the reason in `missing`."""
    how = "compiled" if compiled else "eager"
    try:
        one = run(name, compiled, work)
    except RuntimeError as error:
        missing[name] = str(error).strip().splitlines()[-1]
        say(f"{name} {how}: {error}")
        return []
    say(f"{name} {how}, alone: {one.tokens_per_second:,.0f} tokens/s, {(one.peak_bytes or 0) / 2**30:.2f} GiB")
    return [one]


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def take_turns(chosen: dict[str, bool], work: Workload) -> dict[str, list[Measured]]:
    """All rounds, another contender first in each. One in which a contender fails, or was never seen at work for a
    whole step, counts for nobody: the others are there still.

    Raises:
        SystemExit: none counts.
    """
    names = list(chosen)
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(work.options.rounds):
        first, what = number % len(names), f"round {number + 1} of {work.options.rounds}"
        try:
            one = _a_round(names[first:] + names[:first], chosen, work)
        except RuntimeError as error:
            say(f"{what} counts for nobody: {error}")
            continue
        for name in names:
            found[name].append(one[name])
        say(f"{what}, tokens/s: {', '.join(f'{name} {one[name].tokens_per_second:,.0f}' for name in names)}")
    if not found["headway"]:
        raise SystemExit("no round was measured whole")
    return found


def _a_round(names: Sequence[str], chosen: dict[str, bool], work: Workload) -> dict[str, Measured]:
    commands = list[Command]()
    try:
        for name in names:
            commands.append(Command(name, chosen[name], work))
            commands[-1].wait_for(work.options.warmup)
            commands[-1].stop()
        while waiting := [command for command in commands if command.process.poll() is None]:
            for command in waiting:
                command.turn(_STEPS_OF_A_TURN)
        return {command.name: command.measured() for command in commands}
    finally:
        for command in commands:
            command.kill()


def summary(found: dict[str, list[Measured]], alone: dict[str, list[Measured]]) -> dict[str, dict[str, float]]:
    """Medians by contender, and of each round ours over theirs, of which the median too.

    Args:
        found: Of every contender as many rounds.
        alone: Where memory comes from, of which the range is there too.
    """
    rows = {}
    for name, runs in found.items():
        ours, peaks = found["headway"], [one.peak_bytes or 0 for one in alone[name]]
        rows[name] = {
            **{
                key: statistics.median(getattr(one, key) for one in runs)
                for key in ("tokens_per_second", "first_step_seconds", "mean_loss", "command_seconds")
            },
            "peak_bytes": statistics.median(peaks),
            "lowest_peak_bytes": min(peaks),
            "highest_peak_bytes": max(peaks),
            "headway_speed_ratio": statistics.median(
                a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, runs, strict=True)
            ),
            "headway_first_step_ratio": statistics.median(
                a.first_step_seconds / b.first_step_seconds for a, b in zip(ours, runs, strict=True)
            ),
        }
    return rows


def show(rows: dict[str, dict[str, float]], chosen: dict[str, bool], missing: dict[str, str]) -> None:
    """The table, and what of the targets is met."""
    columns = f"{'tokens/s':>9}{'headway is':>12}{'first step s':>14}{'headway is':>12}{'peak GiB':>10}{'range':>14}"
    print(f"{'':23}{columns}{'loss':>8}")
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["tokens_per_second"]):
        peaks = f"{row['lowest_peak_bytes'] / 2**30:.2f} to {row['highest_peak_bytes'] / 2**30:.2f}"
        print(
            f"{name:14}{'compiled' if chosen[name] else 'eager':9}{row['tokens_per_second']:9,.0f}"
            f"{row['headway_speed_ratio']:11.2f}x{row['first_step_seconds']:14.2f}{row['headway_first_step_ratio']:11.2f}x"
            f"{row['peak_bytes'] / 2**30:10.2f}{peaks:>14}{row['mean_loss']:8.3f}"
        )
    for name, why in missing.items():
        print(f"{name:14}n/a: {why}")
    peers = [name for name in rows if name in PEERS]
    best, ours = max((rows[n]["tokens_per_second"], n) for n in peers)[1] if peers else None, rows["headway"]
    verdicts = []
    if best:
        quickest = min(peers, key=lambda n: rows[n]["first_step_seconds"])
        smallest = min(peers, key=lambda n: rows[n]["peak_bytes"])
        memory = ours["peak_bytes"] / rows[smallest]["peak_bytes"]
        verdicts += [
            (f"speed of the best peer's ({best})", rows[best]["headway_speed_ratio"], LEAST_OF_PEERS, True),
            (f"first step of the quickest peer's ({quickest})", rows[quickest]["headway_first_step_ratio"],
             MOST_OF_FIRST_STEP, False),
            (f"memory of the smallest peer's ({smallest})", memory, 1.0, False),
        ]  # fmt: skip
    if "ceiling" in rows:
        ratio = rows["ceiling"]["headway_speed_ratio"]
        verdicts.append(("speed of the hand-written loop's", ratio, LEAST_OF_CEILING, True))
    if best and "products" in rows:
        most = rows[best]["headway_speed_ratio"] / rows["products"]["headway_speed_ratio"]
        print(f"speed of the best peer's that a step of nothing but its matrix products would have: {most:.2f}")
    for what, ratio, limit, at_least in verdicts:
        met = ratio >= limit if at_least else ratio <= limit
        print(f"{what}: {ratio:.2f}, {'met' if met else 'MISSED'} ({'at least' if at_least else 'at most'} {limit})")
    for name, row in rows.items():
        if name != "products" and abs(row["mean_loss"] - ours["mean_loss"]) > LOSS_TOLERANCE:
            print(f"{name} does not compute the same: mean loss {row['mean_loss']:.4f}, ours {ours['mean_loss']:.4f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="30m", help="model shape (headway models)")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rows", type=int, default=4, help="of a step")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20, help="that are measured")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peaks", type=int, default=3, help="runs alone that memory is taken from, at least")
    parser.add_argument("--compile", choices=["best", "on", "off"], default="best")
    parser.add_argument("--only", nargs="+", choices=[*OWN, *PEERS], help="beside us; default: all")
    parser.add_argument("--peers", default=None, help="Python that has transformers, accelerate, lightning and litgpt")
    parser.add_argument("--folder", type=Path, default=None, help="keeps the prepared data for the next time")
    parser.add_argument("--output", type=Path, default=None, help="JSON with all measurements")
    options = parser.parse_args()
    names = ["headway", *(options.only or [*OWN, *PEERS])]
    with tempfile.TemporaryDirectory(prefix="headway-speed-") as scratch:
        work = Workload(options, options.folder or Path(scratch))
        usable = [name for name in names if name not in PEERS or options.peers]
        chosen, alone, missing = choose(usable, work)
        missing |= {name: "no --peers" for name in names if name not in usable}
        found = take_turns(chosen, work)
    rows = summary(found, alone)
    load = os.getloadavg()[0]
    what = f"{work.parameters / 1e6:.1f} M parameters, {options.rows} x {options.sequence_length} tokens"
    medians = f"medians of {len(found['headway'])} rounds, of memory of {len(alone['headway'])} runs or more"
    print(f"{what}, {options.precision}, {options.threads} threads; {medians}; load {load:.1f}")
    show(rows, chosen, missing)
    if options.output:
        record = {
            "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "compiled": chosen,
            "missing": missing,
            "medians": rows,
            "rounds": {name: [asdict(one) for one in runs] for name, runs in found.items()},
            "alone": {name: [asdict(one) for one in runs] for name, runs in alone.items()},
            "load": load,
        }
        options.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
