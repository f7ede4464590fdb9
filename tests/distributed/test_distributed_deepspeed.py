"""The strategies of DeepSpeed, against one worker and against a strategy of our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.checkpoint.store import CheckpointStore
from support.runs import run_workers, skip_without
from support.trials import STEPS, Trials, close

skip_without("deepspeed", "DeepSpeed is not installed: pip install '.[deepspeed]'")

STRATEGIES = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")


@pytest.mark.slow
def test_deepspeed_learns_what_one_worker_does(trials: Callable[..., Trials], tmp_path: Path) -> None:
    """Where mistakes stay silent: rows with unequally many tokens, several micro-batches, clipping, a shared matrix."""
    runs = trials(data={"packing": "pad"}, model={"tie_embeddings": True}, train={"lanes": 4, "max_grad_norm": 0.3})
    # Pieces so small that buckets, sub-groups and weights that are not kept whole all occur.
    zero = {"reduce_bucket_size": 1000, "sub_group_size": 2000, "stage3_param_persistence_threshold": 100}
    settings = tmp_path / "deepspeed.json"
    settings.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto", "gradient_clipping": 0.3}))
    runs.add("single", 1)
    names = [runs.add(s, 2, f"parallel.strategy={s}") for s in STRATEGIES]
    names.append(runs.add("zero2-alone", 1, "parallel.strategy=deepspeed_zero2"))
    names.append(runs.add("zero3-alone", 1, "parallel.strategy=deepspeed_zero3", "optimizer.offload=true"))
    for s in STRATEGIES:
        names.append(runs.add(f"{s}-offload", 2, f"parallel.strategy={s}", "optimizer.offload=true"))
        names.append(runs.add(f"{s}-json", 2, f"parallel.strategy={s}", f"parallel.deepspeed_config={settings}"))
    runs.run()
    expected, norms = runs.losses("single"), runs.metric("single", "train/grad_norm")
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.5
    assert len(set(runs.metric("single", "train/items"))) > 1 and min(norms) > 0.3
    for name in names:
        assert close(runs.losses(name), expected), name
        assert close(runs.metric(name, "train/grad_norm"), norms), name
        assert runs.metric(name, "evaluation/loss") == pytest.approx(runs.metric("single", "evaluation/loss"), abs=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_deepspeed_to_ddp_and_back(trials: Callable[..., Trials], tmp_path: Path) -> None:
    runs = trials(model={"dropout": 0.1})
    for s in ("ddp", *STRATEGIES):
        runs.add(s, 2, f"parallel.strategy={s}")
    runs.run()
    pairs = [(a, b) for s in STRATEGIES for a, b in ((s, "ddp"), ("ddp", s), (s, s))]
    names = [runs.add(f"{a}-{b}", 2, f"parallel.strategy={b}", copy_of=a) for a, b in pairs]
    for s in (*STRATEGIES, "zero3"):
        offloaded = [f"parallel.strategy={s}", "optimizer.offload=true"]
        names.append(runs.add(f"{s}-offload", 2, *offloaded, copy_of="deepspeed_zero1"))
    settings = tmp_path / "weights-too.json"
    settings.write_text(json.dumps({"zero_optimization": {"offload_param": {"device": "cpu"}}}))
    weights_too = [
        f"parallel.strategy={STRATEGIES[2]}",
        "optimizer.offload=true",
        f"parallel.deepspeed_config={settings}",
    ]
    names.append(runs.add("weights-too", 2, *weights_too, copy_of="ddp"))
    runs.run()
    expected = runs.losses("ddp")
    for name in names:
        assert close(runs.losses(name), expected), name
    # The same number of workers: the promise of `determinism: run`.
    for s in STRATEGIES:
        assert runs.hash(f"{s}-{s}") == runs.hash(s), s


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_left_out_everywhere(
    trials: Callable[..., Trials], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = trials()
    names = [runs.add("ddp", 2, "parallel.strategy=ddp")]
    names += [runs.add(s, 2, f"parallel.strategy={s}") for s in STRATEGIES]
    names += [runs.add(f"{s}-offload", 2, f"parallel.strategy={s}", "optimizer.offload=true") for s in STRATEGIES]
    # The runs share their processes, in which every one of them passes these points once more.
    orders = [f"nan@gradient={step}:{time}" for step in (3, 4) for time in range(1, len(names) + 1)]
    monkeypatch.setenv("HEADWAY_FAULTS", ",".join(orders))
    runs.run()
    skipped = runs.metric("ddp", "train/skipped_steps")
    assert skipped[1:5] == [0, 1, 2, 2] and skipped[-1] == 2
    for name in names:
        assert close(runs.losses(name), runs.losses("ddp")), name
        assert runs.metric(name, "train/skipped_steps") == skipped, name


@pytest.mark.slow
def test_a_trial_before_the_first_step_leaves_no_trace(trials: Callable[..., Trials]) -> None:
    """On GPUs every run has one, unless it is told not to."""
    runs = trials(train={"steps": 3})
    for s in ("deepspeed_zero2", "deepspeed_zero3"):
        runs.add(s, 1, f"parallel.strategy={s}")
        runs.add(f"{s}-tried", 1, f"parallel.strategy={s}", "train.trial_step=true")
    runs.run()
    for s in ("deepspeed_zero2", "deepspeed_zero3"):
        assert runs.hash(f"{s}-tried") == runs.hash(s), s


@pytest.mark.slow
def test_tensors_of_every_kind_are_kept_as_ddp_keeps_them(tmp_path: Path) -> None:
    run_workers(2, Path(__file__).with_name("deepspeed_worker.py"), tmp_path)
    stores = {path.name: CheckpointStore(path / "checkpoints") for path in tmp_path.iterdir()}
    saved = {name: store.load(store.info(4)) for name, store in stores.items()}
    expected = saved.pop("ddp")
    assert len(saved) == 2 * len(STRATEGIES)
    for name, tensors in saved.items():
        assert tensors.keys() == expected.keys(), name
        for key, tensor in tensors.items():
            assert tensor.dtype == expected[key].dtype, (name, key)
            torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6, msg=f"{name} {key}")
