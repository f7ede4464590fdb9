"""Pretrained models that transformers computes: every family trains, resumes and leaves as it came."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import headway
from headway.api.start.preview import preview
from headway.checkpoint.format.manifest import read_manifest
from headway.config import Config, ModelConfig, dump_config, load_config, resolve, resolve_lanes
from headway.config.derived.identity import changes, identity
from headway.core.errors import CheckpointError, ConfigError, DataError, HeadwayError
from headway.data.feeding.token_feed import TokenFeed
from headway.models.build import build_any_model, build_model, build_pretrained, complete
from headway.models.facts import count_parameters, flops_per_token
from headway.models.hub.implementation import choose_implementation
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import RunOptions
from headway.run.session.completed import completed
from headway.training.evaluation.generation import generate
from headway.training.evaluation.inference import continue_text, evaluate_trained, export_trained, load_trained
from support.chat import MARKED, chat_tokenizer, conversation, write_records
from support.families import FAMILIES, VOCAB, CrashAt, write_family
from support.runs import config_values, manifest, state_hash, write_config, write_corpus
from support.runs import headway as command

transformers = pytest.importorskip("transformers")
PRESETS = ("cpt-24gb", "cpt-24gb-qlora", "cpt-24gb-full", "cpt-4x80gb", "cpt-4x80gb-deepspeed")
#: Enough kinds to run always: the rest is slow.
FEW = ("llama-3", "qwen2", "gemma-2", "gpt-2", "nemotron-h", "granite", "mixtral")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a token store."""
    folder = tmp_path_factory.mktemp("hub")
    write_corpus(folder)
    prepared = command("data", "prepare", write_config(folder))
    assert prepared.returncode == 0, prepared.stderr
    return folder


@pytest.fixture(scope="module")
def family(folder: Path) -> Callable[..., Path]:
    """The folder of a tiny model with a tokenizer and a chat template."""

    def written(name: str) -> Path:
        path = folder / "models" / name
        if not path.exists():
            write_family(name, path)
            for file in (folder / "store" / "tokenizer").glob("*.json"):
                (path / file.name).write_bytes(file.read_bytes())
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0].content }}"}
            (path / "tokenizer_config.json").write_text(json.dumps(settings))
        return path

    return written


def _config(folder: Path, run: str, model: dict[str, Any], **sections: Any) -> Config:
    sections = {"train": {"steps": 3, "global_batch": 2, "micro_batch": 2, **sections.pop("train", {})}, **sections}
    values = config_values(folder, **sections)
    return Config.model_validate({**values, "name": run, "model": {"implementation": "transformers", **model}})


def _first_rows(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    config, store = completed(resolve(config))
    grid = resolve_lanes(config, 1)
    batches = [b for lane in range(grid.lanes) for b in TokenFeed.of(config.row_settings, grid, store).batch(0, lane)]
    return torch.cat([b["ids"] for b in batches]), torch.cat([b["targets"] for b in batches])


def _losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_a_family_trains_from_the_loss_of_transformers_and_leaves_with_its_logits(
    name: str, folder: Path, family: Callable[..., Path]
) -> None:
    source, steps = family(name), 3 if name in FEW else 20
    config = _config(folder, f"family-{name}", {"from_pretrained": str(source)}, train={"steps": steps})
    run = headway.train(config).directory
    losses = _losses(run)
    assert len(losses) == steps and losses[-1] < losses[0]

    ids, targets = _first_rows(config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(ids).logits
    assert losses[0] == pytest.approx(float(F.cross_entropy(logits.flatten(0, 1), targets.flatten())), abs=1e-5)

    trained = load_trained(run)
    export_trained(trained, run / "export")
    out = transformers.AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(out(ids).logits, trained.model(ids), rtol=0, atol=1e-5)
        assert not torch.allclose(out(ids).logits, logits), "training has changed nothing"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / "export" / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "adapter"), [("nemotron-h", None), ("qwen3", {"rank": 4, "dropout": 0.1})], ids=["nemotron-h", "lora"]
)
def test_a_run_that_crashed_ends_in_the_same_state(
    name: str, adapter: dict[str, Any] | None, folder: Path, family: Callable[..., Path]
) -> None:
    model = {"from_pretrained": str(family(name)), **({"adapter": adapter} if adapter else {})}
    whole = headway.train(_config(folder, f"whole-{name}", model, train={"steps": 4})).directory
    config = _config(folder, f"crashed-{name}", model, train={"steps": 4})
    with pytest.raises(RuntimeError, match="as if killed"):
        headway.train(config, callbacks=[CrashAt(3)])
    assert state_hash(headway.train(config).directory) == state_hash(whole)


def test_one_changed_bit_of_the_pretrained_model_refuses_the_resume(folder: Path, tmp_path: Path) -> None:
    source = write_family("qwen3", tmp_path / "model")
    config = _config(folder, "bit", {"from_pretrained": str(source), "adapter": {"rank": 2}}, train={"steps": 4})
    with pytest.raises(RuntimeError):
        headway.train(config, callbacks=[CrashAt(3)])
    weights = source / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DataError, match="pretrained model has changed"):
        headway.train(config)


def test_a_checkpoint_of_an_adapter_holds_what_is_trained(folder: Path, family: Callable[..., Path]) -> None:
    model = {"from_pretrained": str(family("qwen3")), "adapter": {"rank": 4}}
    run = headway.train(_config(folder, "size", model)).directory
    trained = load_trained(run).model
    weights = [p for p in trained.parameters() if p.requires_grad]
    newest = max((run / "checkpoints").iterdir())
    tensors = {name: t for file in newest.glob("*.safetensors") for name, t in load_file(file).items()}
    assert all("lora_" in name for name in tensors), tensors.keys()
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert held <= 1.05 * 3 * sum(p.nbytes for p in weights)
    assert manifest(run)["context"]["pretrained"]


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("qwen3", {"rank": 4}),
        ("qwen3", {"rank": 4, "also_trained": ["embed_tokens"]}),
        ("qwen2", {"rank": 4, "method": "dora", "targets": ["q_proj", "down_proj"]}),
        ("nemotron-h", {"rank": 4, "method": "rslora", "targets": ["q_proj", "v_proj"]}),
        ("llama-tied", {"rank": 4, "targets": ["q_proj", "lm_head"]}),
        ("llama-tied", {"rank": 4, "targets": ["embed_tokens"]}),
        ("mixtral", {"rank": 4}),
    ],
    ids=["lora", "tied-embeddings", "dora", "rslora", "tied-head", "tied-embedding", "experts"],
)
def test_an_adapter_loads_in_peft_and_merges_to_the_same_logits(
    name: str, adapter: dict[str, Any], folder: Path, family: Callable[..., Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    source = family(name)
    run = headway.train(_config(folder, tmp_path.name, {"from_pretrained": str(source), "adapter": adapter})).directory
    trained = load_trained(run)
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        live = trained.model(ids)
        base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        assert not torch.allclose(base(ids).logits, live, atol=1e-4)
        export_trained(trained, tmp_path / "adapter")
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        torch.testing.assert_close(adapted(ids).logits, live, rtol=0, atol=1e-5)
        export_trained(trained, tmp_path / "merged", merge=True)
        torch.testing.assert_close(load_trained(tmp_path / "adapter").model(ids), live, rtol=0, atol=1e-5)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        torch.testing.assert_close(merged(ids).logits, live, rtol=0, atol=1e-5)
    assert not list((tmp_path / "merged").glob("adapter*"))


def test_an_adapter_of_peft_is_trained_further(folder: Path, family: Callable[..., Path], tmp_path: Path) -> None:
    model = {"from_pretrained": str(family("qwen3")), "adapter": {"rank": 4}}
    export_trained(load_trained(headway.train(_config(folder, "first-part", model)).directory), tmp_path / "adapter")
    config = _config(folder, "second-part", {"from_pretrained": str(tmp_path / "adapter")})
    run = headway.train(config).directory
    assert _losses(run)[0] < _losses(folder / "runs" / "first-part")[0]
    tensors = load_file(next(max((run / "checkpoints").iterdir()).glob("*.safetensors")))
    assert all("lora_" in name for name in tensors)
    export_trained(load_trained(run), tmp_path / "further")
    settings = json.loads((tmp_path / "further" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == model["from_pretrained"]


def test_eval_and_generate_work(folder: Path, family: Callable[..., Path]) -> None:
    source = family("nemotron-h")
    run = headway.train(_config(folder, "out", {"from_pretrained": str(source)})).directory
    found = evaluate_trained(run, rows=2)
    assert 0 < found["loss"] < 10
    for place in (run, source):
        options = {"max_new_tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 0}
        assert "".join(continue_text(load_trained(place), "red green", **options))


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("llama-3", True), ("mistral", True), ("nemotron-h", True), ("gpt-2", True), ("bamba", False), ("mamba-2", False)],
)
def test_generation_keeps_states_that_lead_to_the_same_logits(
    name: str, keeps: bool, family: Callable[..., Path]
) -> None:
    config = ModelConfig(from_pretrained=family(name), implementation="transformers")
    model: Any = build_pretrained(config)
    ids, new, passed = list(range(7, 17)), 12, list[int]()
    hook = model.causal.get_input_embeddings().register_forward_hook(lambda *a: passed.append(a[1][0].shape[1]))
    found = list(generate(model, ids, max_new_tokens=new, temperature=0))
    hook.remove()
    for token in found:
        with torch.no_grad():
            assert int(model.eval()(torch.tensor([ids]))[0, -1].argmax()) == token
        ids.append(token)
    assert (sum(passed) <= 10 + (new - 1) + 11 + 12) == keeps, passed


#: Families that carry something from one packed document into the next. The initial weights of the small ones let less
#: through than products in 16 bits are rounded by.
LEAKING = ("nemotron-h", "lfm-2", "jamba", "falcon-h1", "bloom", "mamba-2", "gpt-oss")
APART = ("qwen3", "llama-3", "mistral", "gemma-2", "gpt-2", "mixtral", "qwen3-moe", "deepseek-v3")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LEAKING)
def test_a_model_that_mixes_packed_documents_is_refused(
    name: str, precision: str, folder: Path, tmp_path: Path
) -> None:
    # With small weights little leaks, as in models that are trained.
    changes = {} if name == "nemotron-h" else {"initializer_range": 0.02}
    model = {"from_pretrained": str(write_family(name, tmp_path / "model", **changes))}
    config = _config(folder, tmp_path.name, model, data={"document_mask": True}, train={"precision": precision})
    with pytest.raises(ConfigError, match=r"does not tell packed documents apart: .*gradients .* reach the one before"):
        headway.train(config)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", APART)
def test_a_model_that_keeps_packed_documents_apart_trains(
    name: str, precision: str, folder: Path, family: Callable[..., Path]
) -> None:
    train = {"precision": precision, "steps": 1, "activation_checkpointing": "full" if name == "qwen3" else "none"}
    model = {"from_pretrained": str(family(name))}
    config = _config(folder, f"mask-{name}-{precision}", model, data={"document_mask": True}, train=train)
    run = headway.train(config).directory
    proofs = manifest(run)["context"]["model_proofs"]
    assert proofs["leak"] < (1e-3 if precision == "fp32" else 2e-2)


class Poison(headway.Callback):
    """Makes one weight infinite after the last step, as a fault of a machine may."""

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        with torch.no_grad():
            weight = next(p for p in job.state.model.parameters() if p.ndim == 2 and p.requires_grad)
            weight[1, 1] = float("inf") if step == 3 else weight[1, 1]


@pytest.mark.parametrize("adapter", [None, {"rank": 2}], ids=["native", "adapter"])
def test_a_run_whose_weights_are_not_finite_is_not_used(
    adapter: dict[str, Any] | None, folder: Path, family: Callable[..., Path], tmp_path: Path
) -> None:
    model = {"from_pretrained": str(family("qwen3")), "implementation": "auto", "adapter": adapter}
    config = _config(folder, tmp_path.name, model, evaluation={"every": None})
    run = headway.train(config, callbacks=[Poison()]).directory
    for verb in (("generate", run, "--prompt", "red"), ("export", run, tmp_path / "out")):
        ended = command(*verb)
        assert ended.returncode == 4 and "a weight is not finite: model." in ended.stderr, ended.stderr
        assert "checkpoints list" in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("deepspeed_zero3", marks=pytest.mark.slow)])
def test_documents_are_proven_apart_where_weights_are_sharded(
    strategy: str, folder: Path, family: Callable[..., Path], tmp_path: Path
) -> None:
    data, train = {"document_mask": True}, {"steps": 1, "micro_batch": 1}
    parallel = {"workers": 2, "strategy": strategy}
    leaking = write_family("jamba", tmp_path / "model", initializer_range=0.02)
    for name, source in (("apart", family("qwen3")), ("leak", leaking)):
        model = {"from_pretrained": str(source)}
        config = _config(folder, f"{name}-{strategy}", model, data=data, train=train, parallel=parallel)
        if name == "apart":
            headway.train(config)
            continue
        with pytest.raises(ConfigError, match="gradients of its logits reach the one before"):
            headway.train(config)


def test_logits_that_are_scaled_or_capped_are_not_computed_from_hidden_states(
    folder: Path, family: Callable[..., Path]
) -> None:
    from headway.models.hub.transformers_build import build_transformers_model

    ids = torch.randint(VOCAB, (1, 16))
    found = {}
    for name in ("qwen3", "gemma-2", "granite", "gpt-2"):
        config = _config(folder, "x", {"from_pretrained": str(family(name))}).model
        model = build_transformers_model(complete(config, VOCAB), seed=0).eval()
        with torch.no_grad():
            found[name] = model.logits_are_projected(ids)
    assert found == {"qwen3": True, "gemma-2": False, "granite": False, "gpt-2": True}


#: Families that the native decoder computes.
NATIVE = (
    "llama-tied",
    "llama-3",
    "mistral",
    "qwen2",
    "qwen3",
    "nemotron",
    "nemotron-h",
    "mixtral",
    "qwen3-moe",
    "glm-4-moe",
    "smollm-3",
    "granite",
    "olmo-2",
    "gemma-2",
    "gemma-3",
)


@pytest.mark.parametrize("name", NATIVE)
def test_the_native_decoder_computes_the_logits_of_transformers(name: str, family: Callable[..., Path]) -> None:
    ids = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(family(name)).eval()
    config = ModelConfig(from_pretrained=family(name))
    mine = build_model(config, vocab_size=VOCAB, seed=0).eval()
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(mine(ids), expected, rtol=1e-5, atol=1e-5)


def test_auto_takes_the_native_decoder_where_it_computes_the_model(folder: Path, family: Callable[..., Path]) -> None:
    def chosen(name: str, **keys: Any) -> str:
        model = _config(folder, "x", {"from_pretrained": str(family(name)), "implementation": "auto", **keys}).model
        return choose_implementation(model)

    assert chosen("qwen3") == "native"
    assert chosen("qwen3", adapter={"rank": 2}) == "transformers"
    assert {name: chosen(name) for name in FAMILIES if name in NATIVE} == dict.fromkeys(NATIVE, "native")
    assert chosen("gpt-2") == chosen("phi-3") == "transformers"
    with pytest.raises(ConfigError, match="Phi3ForCausalLM"):
        chosen("phi-3", implementation="native")


def test_code_that_comes_with_a_model_and_may_run_computes_it(tmp_path: Path) -> None:
    """The native decoder computes the class of that name, which the code may replace."""
    source = write_family("llama-3", tmp_path / "model")

    def chosen(classes: dict[str, str], **keys: Any) -> str:
        values = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**values, "auto_map": classes}))
        return choose_implementation(ModelConfig(from_pretrained=source, **keys))

    own = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    assert chosen(own, trust_remote_code=True) == "transformers"
    assert chosen(own) == chosen({"AutoTokenizer": "own.Own"}, trust_remote_code=True) == "native"


def test_a_run_that_began_with_transformers_stays_with_it(folder: Path, family: Callable[..., Path]) -> None:
    """Whatever a later version computes itself."""

    def settings(implementation: str) -> Config:
        return _config(folder, "begun", {"from_pretrained": str(family("qwen3")), "implementation": implementation})

    assert completed(settings("auto"))[0].model.implementation == "native"
    saved = RunDirectory(settings("auto").run_directory).config_path
    saved.parent.mkdir(parents=True)
    saved.write_text(dump_config(completed(settings("transformers"))[0]))
    assert completed(settings("auto"))[0].model.implementation == "transformers"
    assert completed(settings("native"))[0].model.implementation == "native"


def test_a_run_that_began_natively_stays_so_whatever_code_its_model_has(
    folder: Path, family: Callable[..., Path], tmp_path: Path
) -> None:
    source = shutil.copytree(family("qwen3"), tmp_path / "model")

    def settings(run: str, implementation: str = "auto") -> Config:
        model = {"from_pretrained": str(source), "implementation": implementation, "trust_remote_code": True}
        return _config(folder, run, model)

    before = completed(settings("begun-natively"))[0]
    assert before.model.implementation == "native"
    values = json.loads((source / "config.json").read_text())
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (source / "config.json").write_text(json.dumps(values | own))
    with pytest.raises(ConfigError, match="does not run the code that comes with the model"):
        completed(settings("begins", "native"))
    saved = RunDirectory(before.run_directory).config_path
    saved.parent.mkdir(parents=True)
    saved.write_text(dump_config(before))
    for implementation in ("auto", "native"):
        resumed = completed(settings("begun-natively", implementation))[0]
        assert resumed.model == complete(resumed.model, VOCAB) and not changes(before, resumed)
        assert resumed.model.implementation == "native"


def test_keys_that_config_json_decides_are_refused(folder: Path, family: Callable[..., Path]) -> None:
    model = _config(folder, "x", {"from_pretrained": str(family("gemma-2")), "dropout": 0.1}).model
    with pytest.raises(ConfigError, match=r"model.dropout is set, but config.json"):
        complete(model, VOCAB)


@pytest.mark.parametrize(("file", "words"), [("model.nemo", "NeMo"), ("pytorch_model.bin", "pickled")])
def test_other_formats_are_refused_with_their_converter(file: str, words: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"x")
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    model = Config.model_validate({"model": {"from_pretrained": str(tmp_path)}}).model
    with pytest.raises(CheckpointError, match=words) as raised:
        complete(model, VOCAB)
    assert "convert" in str(raised.value)


def test_code_of_a_model_does_not_run_unless_asked_for(tmp_path: Path) -> None:
    values = {"model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "code.py").write_text("raise SystemExit('the code has run')")
    model = Config.model_validate({"model": {"from_pretrained": str(tmp_path)}}).model
    with pytest.raises(ConfigError, match="code of its own"):
        complete(model, VOCAB)


def test_damaged_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    source = write_family("granite", tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        headway.train(_config(folder, "damaged", {"from_pretrained": str(source)}))


def test_sizes_are_known_without_weights(folder: Path, family: Callable[..., Path]) -> None:
    """The dry run and an agent of several workers have no model in memory."""
    for name, adapter in (("qwen2", None), ("mixtral", None), ("qwen2", {"rank": 2})):
        model = {"from_pretrained": str(family(name)), "adapter": adapter}
        config, store = completed(resolve(_config(folder, "sizes", model)))
        built = build_any_model(config.model, vocab_size=store.vocab_size, seed=1)
        counts = count_parameters(config.model)
        assert counts.total == sum(p.numel() for p in built.parameters())
        assert counts.embedding == VOCAB * 32 * (1 if name == "qwen2" else 2)
        assert (counts.active < counts.total) == (name == "mixtral")
        assert flops_per_token(config.model, 32) == built.flops_per_token(32)
        assert "parameters" in preview(config, RunOptions())


def test_two_workers_train_what_one_does(folder: Path, family: Callable[..., Path]) -> None:
    model = {"from_pretrained": str(family("qwen2"))}
    train = {"lanes": 2, "micro_batch": 1}
    for run, parallel in (("sharded", {"workers": 2, "strategy": "zero3"}), ("alone", {})):
        headway.train(_config(folder, run, model, determinism="elastic", train=train, parallel=parallel))
    assert state_hash(folder / "runs" / "sharded") == state_hash(folder / "runs" / "alone")


def _plain_losses(source: Path, config: Config, steps: int) -> list[float]:
    """The losses of a loop of transformers and PyTorch on the rows of a config."""
    config, store = completed(resolve(config))
    grid = resolve_lanes(config, 1)
    feed = TokenFeed.of(config.row_settings, grid, store)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    update = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        batches = [batch for lane in range(grid.lanes) for batch in feed.batch(step, lane)]
        ids, targets = (torch.cat([b[key] for b in batches]) for key in ("ids", "targets"))
        loss = F.cross_entropy(model(ids).logits.flatten(0, 1).float(), targets.flatten())
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


#: As in `_plain_losses`.
PLAIN: dict[str, Any] = {
    "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0},
    "schedule": {"name": "constant", "warmup": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma-2", "nemotron-h", "mixtral"])
def test_losses_of_50_steps_are_those_of_a_plain_loop_of_transformers(
    name: str, folder: Path, family: Callable[..., Path]
) -> None:
    source, train = family(name), {"steps": 50, "max_grad_norm": None}
    config = _config(folder, f"plain-{name}", {"from_pretrained": str(source)}, train=train, **PLAIN)
    assert _losses(headway.train(config).directory) == pytest.approx(_plain_losses(source, config, 50), abs=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "glm-4-moe"])
def test_a_continued_mixture_is_trained_as_by_a_plain_loop(
    name: str, folder: Path, family: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, train = family(name), {"steps": 10, "max_grad_norm": None}
    model = {"from_pretrained": str(source), "implementation": "auto"}
    config = _config(folder, f"continued-{name}", model, train=train, **PLAIN)
    run = headway.train(config).directory
    assert choose_implementation(config.model) == "native"
    assert _losses(run) == pytest.approx(_plain_losses(source, config, 10), abs=1e-5)
    assert capsys.readouterr().err.count("nothing is added to the loss for the routers of experts") == 1
    biases = [b for name, b in load_trained(run).model.named_buffers() if name.endswith("selection_bias")]
    assert len(biases) == (1 if name == "glm-4-moe" else 0)
    assert not any(bias.any() for bias in biases)

    asked = {**model, "balance_loss": 0.02, **({"balance_bias_rate": 0.01} if biases else {})}
    config = _config(folder, f"balanced-{name}", asked, train=train, **PLAIN)
    run = headway.train(config).directory
    assert _losses(run) != pytest.approx(_plain_losses(source, config, 10), abs=1e-5)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("added for the routers"))
    assert "load-balancing loss with weight 0.02" in line and ("moves by 0.01 a step" in line) == bool(biases)
    assert "z-loss" not in line
    biases = [b for name, b in load_trained(run).model.named_buffers() if name.endswith("selection_bias")]
    assert all(bias.any() for bias in biases)


def test_a_run_that_began_with_balanced_experts_continues_with_them(folder: Path, family: Callable[..., Path]) -> None:
    """As left by a version that balanced experts unasked: such a run says so in its own config."""
    earlier = {"balance_loss": 0.01, "balance_bias_rate": 0.0, "router_z_loss": 0.001}
    model = {"from_pretrained": str(family("mixtral")), "implementation": "auto"}
    with pytest.raises(RuntimeError):
        headway.train(_config(folder, "earlier", {**model, **earlier}, train={"steps": 4}), callbacks=[CrashAt(2)])
    now = _config(folder, "earlier", model, train={"steps": 4})
    found = completed(resolve(now))[0].model
    assert {key: getattr(found, key) for key in earlier} == earlier
    whole = headway.train(_config(folder, "as-earlier", {**model, **earlier}, train={"steps": 4})).directory
    assert state_hash(headway.train(now).directory) == state_hash(whole)


@pytest.mark.parametrize(("name", "implementation"), [("qwen3", "native"), ("qwen3", "transformers")])
def test_configs_of_earlier_runs_keep_their_identity(
    name: str, implementation: str, folder: Path, family: Callable[..., Path]
) -> None:
    """They have the former default of a key that has no effect there."""
    now = _config(folder, "x", {"from_pretrained": str(family(name)), "implementation": implementation})
    now = completed(resolve(now))[0]
    values = now.model.model_dump(mode="json")
    assert values["router_z_loss"] is None
    then = now.model_copy(update={"model": ModelConfig.model_validate({**values, "router_z_loss": 0.001})})
    assert identity(then) == identity(now) and identity(now)["model.router_z_loss"] == 0.001
    assert complete(then.model, VOCAB) == then.model


KINDS = pytest.mark.parametrize(
    ("name", "adapter"),
    [("nemotron-h", None), ("qwen3", {"rank": 4, "dropout": 0.1}), ("qwen3", None)],
    ids=["nemotron-h", "lora", "tied"],
)


def _written(folder: Path, run: str, model: dict[str, Any], **sections: Any) -> Path:
    file = write_config(folder, name=run, **sections)
    values = yaml.safe_load(file.read_text())
    file = file.with_name(f"{run}.yaml")
    file.write_text(yaml.safe_dump({**values, "model": {"implementation": "transformers", **model}}))
    return file


@pytest.mark.slow
@KINDS
def test_verify_proves_kills_and_other_workers(
    name: str, adapter: dict[str, Any] | None, folder: Path, family: Callable[..., Path]
) -> None:
    file = _written(
        folder,
        f"verify-{name}-{'full' if adapter is None else 'adapter'}",
        {"from_pretrained": str(family(name)), **({"adapter": adapter} if adapter else {})},
        train={"steps": 4, "global_batch": 4, "micro_batch": 2, "lanes": 2},
        parallel={"workers": 1, "threads": 1, "strategy": "zero3"},
        determinism="elastic",
    )
    done = command("verify", file, "--steps", "4", "--other-workers", "2", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_presets_to_continue_a_model_are_configs() -> None:
    found = {name: load_config(name) for name in PRESETS}
    assert [config.model.adapter is not None for config in found.values()] == [True, True, False, False, False]
    assert [config.train.sequence_length for config in found.values()] == [4096, 4096, 4096, 8192, 8192]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", ["llama-3", "gpt-2"])
def test_layers_are_recomputed_to_the_same_bits_and_one_graph_serves_all_of_them(
    name: str, mode: Any, folder: Path, family: Callable[..., Path]
) -> None:
    config = _config(folder, "layers", {"from_pretrained": str(family(name))})
    ids, targets = _first_rows(config)

    def gradients(mode: Any, compiled: bool) -> dict[str, torch.Tensor]:
        model = build_any_model(config.model, vocab_size=VOCAB, seed=1)
        model.set_activation_checkpointing(mode)
        if compiled:
            model.compile(backend=counted)
        model(ids, targets).backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain, recomputed, compiled = gradients("none", False), gradients(mode, False), gradients(mode, True)
    offloaded = gradients("offload", False) if mode == "full" else recomputed
    for key, gradient in plain.items():
        assert torch.equal(recomputed[key], gradient) and torch.equal(offloaded[key], gradient), key
        torch.testing.assert_close(compiled[key], gradient)
    products = sum(node.op == "call_function" for graph in graphs for node in graph.graph.nodes)
    assert len(graphs) == 1 and products > 0


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager", "flex"])
def test_attention_is_passed_on_to_transformers_and_the_checkpoint_keeps_it(
    attention: str, folder: Path, family: Callable[..., Path]
) -> None:
    model = {"from_pretrained": str(family("llama-3")), "attention": attention}
    config = _config(folder, f"attention-{attention}", model)
    if attention == "flex":
        with pytest.raises(ConfigError, match="attention 'flex' has no backward pass on a CPU"):
            headway.train(config)
        built = build_any_model(config.model, vocab_size=VOCAB, seed=1)
        assert built.kernels()["attention"] == "flex_attention"  # type: ignore[union-attr]
        return
    run = headway.train(config).directory
    manifest = read_manifest(next(iter(sorted((run / "checkpoints").glob("step-*")))))
    kept = json.dumps(manifest.context)
    assert f'"attention": "{"sdpa" if attention == "auto" else attention}"' in kept
    assert load_trained(run).model.kernels()["attention"] == "sdpa", "reading takes what is there"  # type: ignore[union-attr]
    changed = _config(folder, config.name, {**model, "attention": "eager" if attention != "eager" else "sdpa"})
    with pytest.raises(HeadwayError, match=r"model\.attention"):
        headway.train(changed)


def test_attention_that_cannot_be_had_is_refused_before_anything_starts(
    folder: Path, family: Callable[..., Path]
) -> None:
    source = str(family("llama-3"))
    for attention, package in (("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3")):
        config = _config(folder, "flash", {"from_pretrained": source, "attention": attention})
        with pytest.raises(ConfigError, match=f"needs the package {package}, which is not installed"):
            headway.train(config)
        assert not (folder / "runs" / "flash").exists()
    native = _config(folder, "native", {"from_pretrained": source, "implementation": "native", "attention": "eager"})
    with pytest.raises(ConfigError, match="with attention of its own"):
        headway.train(native)
    with pytest.raises(ConfigError, match=r"model\.attention is for pretrained models only"):
        headway.train(Config.model_validate({**config_values(folder), "model": {"preset": "4m", "attention": "eager"}}))


def test_a_projection_that_is_frozen_costs_no_gradient() -> None:
    from headway.models.loss import linear_cross_entropy

    torch.manual_seed(0)
    x, weight, targets = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8), torch.randint(20, (6,))
    loss = linear_cross_entropy(x, weight, targets, chunk_rows=4)
    saved = [t for t in loss.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
    assert [t.shape for t in saved] == [x.shape]
    loss.backward()
    torch.testing.assert_close(x.grad, (torch.softmax(x @ weight.T, 1) - F.one_hot(targets, 20)) @ weight)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_losses_of_conversations_are_those_of_a_loop_with_labels(implementation: str, tmp_path: Path) -> None:
    """The mean over the trained tokens of the global batch, whose micro-batches have different numbers of them."""
    source = write_family("qwen3", tmp_path / "model", max_position_embeddings=256)
    chat_tokenizer(source, MARKED)
    conversations = [conversation(number, turns=1 + number % 3) for number in range(12)]
    write_records(tmp_path / "chats.jsonl", [{"messages": messages} for messages in conversations])
    values = config_values(
        tmp_path,
        data={
            "sources": [{"path": str(tmp_path / "chats.jsonl"), "format": "chat"}],
            "packing": "pad",
            "validation": 0.0,
        },
        train={
            "steps": 3,
            "sequence_length": 159,
            "global_batch": 6,
            "micro_batch": 1,
            "lanes": 2,
            "max_grad_norm": None,
        },
        optimizer={"learning_rate": 1e-3, "weight_decay": 0.0},
        schedule={"name": "constant", "warmup": 0.0},
    )
    model = {"from_pretrained": str(source), "implementation": implementation}
    config = Config.model_validate({**values, "model": model})
    ours = _losses(headway.train(config).directory)

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    labels_of: dict[tuple[int, ...], list[int]] = {}
    for messages in conversations:
        out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(out["input_ids"], out["assistant_masks"], strict=True)
        labels_of[tuple(out["input_ids"])] = [token if trained else -100 for token, trained in pairs]
    config, store = completed(resolve(config))
    grid = resolve_lanes(config, 1)
    feed = TokenFeed.of(config.row_settings, grid, store)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    update = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    theirs = []
    for step in range(3):
        ids = torch.cat([batch["ids"] for lane in range(grid.lanes) for batch in feed.batch(step, lane)])
        labels = torch.full_like(ids, -100)
        for row, tokens in enumerate(ids.tolist()):
            found = next(known for known in labels_of if tuple(tokens[: len(known)]) == known)
            labels[row, : len(found)] = torch.tensor(labels_of[found])
        loss = model(ids, labels=labels).loss
        update.zero_grad()
        loss.backward()
        update.step()
        theirs.append(loss.item())
    assert ours == pytest.approx(theirs, abs=1e-5)
