"""Pretrained models: one state under every strategy, and a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from headway.config import load_config
from headway.core.errors import ConfigError
from headway.run.session.completed import completed
from headway.training.evaluation.inference import continue_text, evaluate_trained, export_trained, load_trained
from support.families import VOCAB, write_family
from support.trials import Trials, close

transformers = pytest.importorskip("transformers")
#: Families that the native decoder computes.
NAMES = ("smollm-3", "granite", "olmo-2", "gemma-2", "gemma-3")
WAYS = [(2, "zero3")]
OTHER_WAYS = [(2, "ddp"), (2, "zero2"), (4, "zero1")]


def families(
    trials: Callable[..., Trials], corpus: Path, folder: Path, names: tuple[str, ...] = NAMES, **sections: Any
) -> tuple[Trials, dict[str, str]]:
    """Write a tiny pretrained model of each family; returns trials, and for each family the override that names it."""
    runs = trials(checkpoint={"every": "2 steps"}, **{"train": {"steps": 3, "global_batch": 4}, **sections})
    values, chosen = yaml.safe_load(runs.config.read_text()), {}
    runs.config.write_text(yaml.safe_dump({key: value for key, value in values.items() if key != "model"}))
    for name in names:
        source = write_family(name, folder / "models" / name)
        for file in (corpus / "store" / "tokenizer").glob("*.json"):
            (source / file.name).write_bytes(file.read_bytes())
        chosen[name] = f"model.from_pretrained={source}"
    return runs, chosen


@pytest.mark.parametrize("ways", [WAYS, pytest.param(OTHER_WAYS, marks=pytest.mark.slow)], ids=["one", "others"])
def test_a_pretrained_family_ends_in_one_state_and_leaves_with_its_logits(
    trials: Callable[..., Trials], ways: list[tuple[int, str]], corpus: Path, tmp_path: Path
) -> None:
    runs, chosen = families(trials, corpus, tmp_path, determinism="elastic")
    for name in NAMES:
        runs.add(f"{name}-1", 1, chosen[name])
        for workers, strategy in ways:
            runs.add(f"{name}-{strategy}-{workers}", workers, chosen[name], f"parallel.strategy={strategy}")
        # What one worker left at a checkpoint, several take further, as after a kill; they begin when it has ended.
        runs.add(f"{name}-resumed", workers, chosen[name], f"parallel.strategy={strategy}", copy_of=f"{name}-1")
    runs.run()

    for name in NAMES:
        hashes = {way: runs.hash(f"{name}-{way}") for way in ("1", "resumed", *(f"{s}-{n}" for n, s in ways))}
        assert len(set(hashes.values())) == 1, (name, hashes)
        losses = runs.losses(f"{name}-1")
        assert losses[-1] < losses[0], name
    if ways is not WAYS:
        return
    ids = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    for name in NAMES:
        run = tmp_path / "runs" / f"{name}-1"
        trained = load_trained(run)
        assert trained.config is not None and trained.config.model.implementation == "native"
        export_trained(trained, tmp_path / "exports" / name)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exports" / name, dtype=torch.float32)
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "models" / name, dtype=torch.float32)
        assert type(theirs) is type(base)
        with torch.no_grad():
            logits = theirs.eval()(ids).logits
            torch.testing.assert_close(trained.model(ids), logits, rtol=1e-5, atol=1e-5)
            assert not torch.allclose(base.eval()(ids).logits, logits, atol=1e-3), "training has changed nothing"
        # With a cache of keys and values, as transformers computes it without one.
        prompt = trained.tokenizer.encode_batch(["3: stone river"])[0]
        said = "".join(continue_text(trained, "3: stone river", max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0))
        for _ in range(12):
            with torch.no_grad():
                following = theirs(torch.tensor([prompt]), use_cache=False).logits[
                    0, -1, : trained.tokenizer.vocab_size
                ]
            prompt.append(int(following.argmax()))
        assert trained.tokenizer.decode(prompt) == "3: stone river" + said, name
        settings = {"store_path": corpus / "store", "rows": 4, "sequence_length": 32}
        assert (
            evaluate_trained(run, **settings)["loss"]
            == evaluate_trained(tmp_path / "exports" / name, **settings)["loss"]
        )


@pytest.mark.slow
def test_a_pretrained_family_is_shared_by_matrices_or_refused(
    trials: Callable[..., Trials], corpus: Path, tmp_path: Path
) -> None:
    runs, chosen = families(trials, corpus, tmp_path)
    shared = [name for name in NAMES if name != "olmo-2"]  # whose norms need all heads of a position
    for name in shared:
        runs.add(name, 1, chosen[name])
        runs.add(f"{name}-tensor", 2, chosen[name], "parallel.tensor=2", "parallel.strategy=ddp")
    runs.run()
    assert not [name for name in shared if not close(runs.losses(f"{name}-tensor"), runs.losses(name))]
    config = load_config(runs.config, [chosen["olmo-2"], "parallel={tensor: 2, workers: 2}"])
    with pytest.raises(ConfigError, match=r"parallel\.tensor"):
        completed(config)


@pytest.mark.slow
def test_models_of_transformers_end_in_one_state_under_every_strategy(
    trials: Callable[..., Trials], corpus: Path, tmp_path: Path
) -> None:
    train = {"steps": 2, "global_batch": 4, "micro_batch": 1, "lanes": 4}
    runs, chosen = families(trials, corpus, tmp_path, ("qwen3", "nemotron-h"), train=train, determinism="elastic")
    kinds = {  # tied embeddings, a frozen base, Mamba-2
        "tied": [chosen["qwen3"]],
        "adapter": [chosen["qwen3"], "model.adapter={rank: 4, dropout: 0.1}"],
        "hybrid": [chosen["nemotron-h"]],
    }
    ways = [(1, "single"), *product((2, 4), ("ddp", "zero1", "zero2", "zero3"))]
    for kind, (workers, strategy) in product(kinds, ways):
        overrides = ["model.implementation=transformers", *kinds[kind], f"parallel.strategy={strategy}"]
        runs.add(f"{kind}-{strategy}-{workers}", workers, *overrides)
    runs.run()
    for kind in kinds:
        hashes = {f"{strategy}-{n}": runs.hash(f"{kind}-{strategy}-{n}") for n, strategy in ways}
        assert len(set(hashes.values())) == 1, (kind, hashes)


DEEPSPEED = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")


def test_an_adapter_trains_under_deepspeed_as_under_ddp(
    trials: Callable[..., Trials], corpus: Path, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    peft = pytest.importorskip("peft")
    train = {"steps": 3, "global_batch": 4, "micro_batch": 1, "lanes": 4}
    runs, chosen = families(trials, corpus, tmp_path, ("llama-3",), train=train)
    adapter = [chosen["llama-3"], "model.adapter={rank: 4, dropout: 0.1}"]
    whole = [chosen["llama-3"], "model.implementation=transformers"]
    for strategy in ("ddp", *DEEPSPEED[1:]):
        runs.add(strategy, 2, *adapter, f"parallel.strategy={strategy}")
    for strategy in ("ddp", DEEPSPEED[2]):
        runs.add(f"whole-{strategy}", 2, *whole, f"parallel.strategy={strategy}")
    for before, after in (("ddp", DEEPSPEED[1]), (DEEPSPEED[2], "ddp"), (DEEPSPEED[2], DEEPSPEED[2])):
        runs.add(f"{before}-{after}", 2, *adapter, f"parallel.strategy={after}", copy_of=before)
    runs.run()

    for name in (*DEEPSPEED[1:], f"ddp-{DEEPSPEED[1]}", f"{DEEPSPEED[2]}-ddp"):
        assert close(runs.losses(name), runs.losses("ddp")), name
    assert close(runs.losses(f"whole-{DEEPSPEED[2]}"), runs.losses("whole-ddp"))
    # As many workers as before: the promise of `determinism: run`.
    assert runs.hash(f"{DEEPSPEED[2]}-{DEEPSPEED[2]}") == runs.hash(DEEPSPEED[2])
    for strategy in DEEPSPEED[1:]:
        run = tmp_path / "runs" / strategy
        trained = load_trained(run)
        export_trained(trained, tmp_path / "exports" / strategy)
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "llama-3", dtype=torch.float32)
        ids = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            before = base.eval()(ids).logits
            theirs = peft.PeftModel.from_pretrained(base, tmp_path / "exports" / strategy).eval()(ids).logits
            torch.testing.assert_close(trained.model(ids), theirs, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(before, theirs, atol=1e-3), "training has changed nothing"
        # The run computed this with the frozen weights that it had in memory, and here they come from their folder.
        found = evaluate_trained(run, store_path=corpus / "store", rows=5, sequence_length=32)["loss"]
        assert close(runs.metric(strategy, "evaluation/loss")[-1:], [found]), strategy


@pytest.mark.slow
def test_every_kind_of_pretrained_model_trains_under_deepspeed_as_under_ddp(
    trials: Callable[..., Trials], corpus: Path, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    train = {"steps": 4, "global_batch": 4, "micro_batch": 1, "lanes": 4}
    runs, chosen = families(trials, corpus, tmp_path, ("qwen3", "llama-3"), train=train)
    also = "also_trained: [embed_tokens], also_trained_rate: 0.1"
    kinds = {
        "adapter": [chosen["llama-3"], "model.adapter={rank: 4, dropout: 0.1}"],
        "tied": [chosen["qwen3"], f"model.adapter={{rank: 4, dropout: 0.1, {also}}}"],
        "int8": [chosen["llama-3"], "model.adapter={rank: 4, frozen_precision: int8}"],
        "transformers": [chosen["qwen3"], "model.implementation=transformers"],
        "native": [chosen["llama-3"], "model.implementation=native"],
    }
    for kind, strategy in product(kinds, ("ddp", *DEEPSPEED)):
        runs.add(f"{kind}-{strategy}", 2, *kinds[kind], f"parallel.strategy={strategy}")
    for kind, strategy in product(kinds, DEEPSPEED):
        for before, after in ((strategy, "ddp"), ("ddp", strategy), (strategy, strategy)):
            name = f"{kind}-{before}-{after}"
            runs.add(name, 2, *kinds[kind], f"parallel.strategy={after}", copy_of=f"{kind}-{before}")
    for strategy in DEEPSPEED:
        overrides = (*kinds["adapter"], f"parallel.strategy={strategy}", "optimizer.offload=true")
        runs.add(f"adapter-{strategy}-offload", 2, *overrides)
    runs.run()

    for kind, strategy in product(kinds, DEEPSPEED):
        expected, name = runs.losses(f"{kind}-ddp"), f"{kind}-{strategy}"
        for run in (name, f"{name}-ddp", f"{kind}-ddp-{strategy}", f"{name}-{strategy}"):
            assert close(runs.losses(run), expected), run
        assert runs.hash(f"{name}-{strategy}") == runs.hash(name), name
    for strategy in DEEPSPEED:
        assert close(runs.losses(f"adapter-{strategy}-offload"), runs.losses("adapter-ddp")), strategy
