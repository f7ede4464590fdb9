"""Files, bases and overrides to one config; and what is said when they are wrong."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config import Config, Interval, ModelConfig, TrainConfig, changes, load_config, override, resolve
from headway.config.loading import document
from headway.config.loading.complaints import known_keys, suggestion
from headway.config.loading.foreign_keys import our_names, sentences
from headway.config.loading.load import PRESETS
from headway.config.loading.reference import line_of
from headway.core.errors import ConfigError
from headway.core.format import printable
from support.waits import LONG

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path | str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value


# What a config comes to


@pytest.mark.parametrize(
    "path",
    [*sorted(CONFIGS.glob("*.yaml")), *sorted(path.stem for path in PRESETS.glob("*.yaml"))],
    ids=lambda path: str(path)[-20:],
)
def test_every_config_that_comes_with_headway_is_right(path: Path | str) -> None:
    config = load_config(path)
    assert config.train.steps
    assert config == resolve(config)


def test_a_resolved_config_leaves_nothing_open(write: Any) -> None:
    config = load_config(
        write("name: n\ntrain: {tokens: 1M, sequence_length: 100, global_batch: 1k tokens}\ndata: {sources: a/b.jsonl}")
    )
    assert (config.train.steps, config.train.tokens, config.train.global_batch) == (1000, None, 10)
    assert config.data.store == Path("data/n")
    assert config.data.sources[0].name == "b"
    assert (config.model.kv_heads, config.model.head_dim) == (3, 32)


def test_stages_need_no_length_of_training_where_nothing_is_trained(write: Any) -> None:
    stages = "stages: [{start: 0.6, weights: {a: 1}}, {start: 0.9, weights: {a: 2}}]"
    path = write(f"data: {{sources: [{{path: a, weight: 1}}], mixture: {{{stages}}}}}")
    config = load_config(path, trains=False)
    assert config.train.steps is None and [stage.start for stage in config.data.mixture.stages] == [0.6, 0.9]
    assert load_config(path, ["train.tokens=1M"], trains=False).train.steps
    assert "none of train.steps, train.tokens and train.epochs" in refusal(path).what
    assert "begins at step 1 comes after" in refusal(path, "train.steps=1").what
    with pytest.raises(ConfigError, match="there is no source 'b'"):
        load_config(path, ["data.mixture.stages.1.weights={a: 1, b: 1}"], trains=False)


def test_the_steps_of_a_number_of_tokens_are_rounded_up(write: Any) -> None:
    path = write("train: {tokens: 1001, sequence_length: 10, global_batch: 10}")
    assert load_config(path).train.steps == 11


def test_a_store_path_may_have_braces_of_its_own(write: Any) -> None:
    path = write("name: n\ntrain: {steps: 1}\ndata: {store: 'x/{name}/{y}'}")
    assert load_config(path).data.store == Path("x/n/{y}")


def test_sources_of_equal_names_are_told_apart(write: Any) -> None:
    path = write("train: {steps: 1}\ndata: {sources: [a/t.txt, b/t.txt, {path: c, name: t-2}]}")
    names = [source.name for source in load_config(path).data.sources]
    assert names == ["t", "t-3", "t-2"]


def test_bases_are_merged_key_by_key_and_lists_are_replaced(write: Any) -> None:
    write("train: {steps: 5, sequence_length: 64}\ndata: {sources: [a, b]}\noptimizer: {eps: 1e-5}", "ground.yaml")
    write("base: ground.yaml\ntrain: {steps: 6}\ndata: {sources: [c]}", "middle.yaml")
    config = load_config(write("base: middle.yaml\ntrain: {global_batch: 4}"))
    assert (config.train.steps, config.train.sequence_length, config.train.global_batch) == (6, 64, 4)
    assert [source.path for source in config.data.sources] == ["c"]
    assert config.optimizer.eps == 1e-5


def test_a_null_that_is_written_out_takes_the_place_of_a_section(write: Any) -> None:
    write("train: {steps: 5}\ncheckpoint: {remote: {url: 'file:///x'}}\n", "ground.yaml")
    assert load_config(write("base: ground.yaml\ncheckpoint:\n  remote:\n")).checkpoint.remote is not None
    assert load_config(write("base: ground.yaml\ncheckpoint: {remote: null}\n")).checkpoint.remote is None


def test_what_rounds_gradients_belongs_to_the_mathematics_of_a_run() -> None:
    plain = override(Config.model_validate({"train": {"steps": 1}}), ["seed=1"])
    halved = override(plain, ["parallel.reduce_precision=bf16"])
    assert [text.split()[0] for text in changes(plain, halved)] == ["parallel.reduce_precision"]
    assert changes(plain, override(plain, ["parallel.powersgd_rank=8", "parallel.prefetch=2"])) == []
    each, once = (override(plain, [f"parallel.reduce_every={every}"]) for every in ("micro_batch", "step"))
    assert [text.split()[0] for text in changes(each, once)] == ["parallel.reduce_every"]


def test_a_base_is_looked_up_beside_the_file_that_names_it(write: Any, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write("train: {steps: 7}", "sub/ground.yaml")
    write("base: ground.yaml", "sub/middle.yaml")
    assert load_config(write("base: sub/middle.yaml")).train.steps == 7


def test_overrides_take_yaml_values_and_later_ones_win(write: Any) -> None:
    path = write("train: {steps: 5}")
    overrides = ["train.steps=6", "train.steps=7", "data.sources=[a.jsonl, b.txt]", "data.sources.1.format=text"]
    config = load_config(path, overrides)
    assert config.train.steps == 7
    assert [(source.path, source.format) for source in config.data.sources] == [("a.jsonl", "auto"), ("b.txt", "text")]


def test_an_override_reaches_into_a_source_given_by_its_path(write: Any) -> None:
    path = write("train: {steps: 5}\ndata: {sources: corpus}")
    assert load_config(path, ["data.sources.0.format=text"]).data.sources[0].format == "text"


def test_a_section_with_only_comments_changes_nothing(write: Any) -> None:
    config = load_config(write("base: quickstart\ntrain:\n  # steps: 5\ndata:\n  tokenizer:\nmodel:"))
    assert config == load_config("quickstart")
    path = write("train: {steps: 1}\nmodel:\ndata:\n  tokenizer:\n")
    assert load_config(path).data.tokenizer.vocab_size == 8192


def test_a_share_of_all_is_not_one_step(write: Any) -> None:
    path = write("train: {steps: 1}\nschedule: {warmup: 1.0, decay: 1}")
    schedule = load_config(path).schedule
    assert (schedule.warmup, schedule.decay) == (1.0, Interval(1, "steps"))
    assert isinstance(load_config(path, ["schedule.warmup=50%"]).schedule.warmup, float)


def test_steps_given_later_take_the_place_of_tokens_and_the_other_way_round(write: Any) -> None:
    path = write("train: {tokens: 1M}")
    assert load_config(path, ["train.steps=3"]).train.steps == 3
    above = write("base: run.yaml\ntrain: {steps: 4}", "above.yaml")
    assert load_config(above).train.steps == 4
    assert (
        load_config(above, ["train.tokens=64k", "train.global_batch=1", "train.sequence_length=1000"]).train.steps == 64
    )


def test_a_preset_given_later_takes_the_place_of_a_whole_shape(write: Any) -> None:
    path = write("train: {steps: 1}\nmodel: {preset: 8b, layers: 3, dropout: 0.1}")
    model = load_config(path, ["model.preset=4m"]).model
    assert model == ModelConfig(preset="4m", dropout=0.1, kv_heads=3, head_dim=32)
    assert load_config(path, ["model.preset=4m", "model.layers=2"]).model.layers == 2
    assert load_config(path, ["model.from_pretrained=folder"]).model.dim is None


def test_yaml_scalars_are_read_as_people_mean_them(write: Any) -> None:
    path = write("determinism: off\nname: 1e3x\ntrain: {steps: 1_000}\noptimizer: {learning_rate: 1e-3}")
    config = load_config(path, ["schedule.warmup=5e-2", "runs=2024-01-01"])
    assert config.determinism == "off"
    assert config.optimizer.learning_rate == 1e-3
    assert config.schedule.warmup == 0.05
    assert config.train.steps == 1000
    assert config.runs == Path("2024-01-01")


def test_anchors_and_merge_keys(write: Any) -> None:
    path = write(
        "evaluation: &e\n  every: 5\n  rows: 3\ntrain: {steps: 1}\ncheckpoint:\n  <<: {every: 9, keep: 2}\n  keep: 1"
    )
    config = load_config(path)
    assert config.checkpoint.every == Interval(9, "steps")
    assert config.checkpoint.keep == 1


def test_override_of_a_config_made_in_python() -> None:
    config = Config(train=TrainConfig(tokens=100_000))
    changed = override(config, ["train.steps=3", "model.preset=1m"])
    assert (changed.train.steps, changed.model.dim) == (3, 96)
    assert override(changed, ["model.preset=10m"]).model.dim == 256
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        override(config, ["train.stepz=3"])


# What is refused


def test_an_unknown_key_is_told_with_its_line_and_the_nearest_known_one(write: Any) -> None:
    path = write("name: x\n\ntrain:\n  stepz: 5\n")
    error = refusal(path)
    assert error.what == "unknown key 'train.stepz'"
    assert error.where == f"{path}:4"
    assert error.fix == "did you mean train.steps?"


def test_an_unknown_key_in_an_override_is_told_with_the_override(write: Any) -> None:
    error = refusal(write("train: {steps: 1}"), "train.stepz=50")
    assert error.where == "override 'train.stepz=50'"


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("train.learning_rate", "it lives at optimizer.learning_rate"),
        ("workers", "it lives at data.workers or parallel.workers"),
        ("train.step", "did you mean train.steps?"),  # though cleaning steps have a key of that name
        ("step", "it lives at data.clean.step"),  # said once, not for each of them
        ("train.batch_size", sentences()["batch_size"]),  # as others call it
        ("lr", sentences()["lr"]),
        ("data.sources.0.formt", "did you mean data.sources.format?"),
        ("optimizer.learning_rat", "did you mean optimizer.learning_rate?"),
        ("model.lerning_rate", "did you mean optimizer.learning_rate?"),
        ("evaluation.zzz", "known keys here: every, rows, benchmarks"),
        ("train.step", "did you mean train.steps?"),
        ("data.step", "it lives at data.clean.step"),
        ("evaluation.5", "known keys here: every, rows, benchmarks"),
    ],
)
def test_where_an_unknown_key_belongs(write: Any, key: str, fix: str) -> None:
    assert refusal(write("train: {steps: 1}\ndata: {sources: [a]}"), f"{key}=1").fix == fix


def test_all_problems_are_told_at_once(write: Any) -> None:
    path = write("foo: 1\ntrain:\n  stepz: 5\n  lanes: many\n  precision: fp4\noptimizer: {learning_rate: -1}")
    error = refusal(path, "seed=-1")
    lines = error.what.splitlines()
    assert lines[0] == "6 problems in the config:"
    assert len(lines) == 7
    for key, place in [("foo", ":1"), ("stepz", ":3"), ("lanes", ":4"), ("precision", ":5"), ("learning_rate", ":6")]:
        assert any(key in line and f"{path}{place}" in line for line in lines), key
    assert any("seed" in line and "override 'seed=-1'" in line for line in lines)


def test_a_value_that_could_be_two_kinds_is_one_problem(write: Any) -> None:
    error = refusal(write("train: {steps: 1, lanes: many}"))
    assert error.what == "train.lanes: should be a valid integer or 'auto' (given: 'many')"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("train.steps=abc", "train.steps (count; default not set): Optimizer steps, e.g. `1000` or `2k`."),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate (number; default `0.0003`): Peak learning rate;"),
        ("data.sources.0.weight=much", "data.sources.0.weight (number; default not set): Share of the training rows,"),
        ("data.clean=[{step: length, min_characters: few}]", "data.clean.0.min_characters (integer; default not set):"),
        ("callbacks=5", "callbacks (list of text; default none): Your own callbacks, as `package.module:Class`,"),
    ],
)
def test_a_wrong_type_is_answered_with_the_line_of_the_key(write: Any, given: str, line: str) -> None:
    """A wheel holds no docs, so the error does not point at them."""
    with pytest.raises(ConfigError) as caught:
        load_config(write("base: quickstart"), [given])
    assert caught.value.fix is not None and caught.value.fix.startswith(line)
    assert ".md" not in caught.value.fix
    with pytest.raises(ConfigError) as several:
        load_config(write("base: quickstart"), [given, "train.max_grad_norm=none"])
    assert line in several.value.what and "docs/" not in several.value.render()


def test_every_key_has_a_line() -> None:
    """Except sections, which have a table of their own."""
    for key in known_keys():
        line = line_of(key)
        assert line is None or (line.startswith(f"{key} (") and "](" not in line and not line.endswith(": ")), key
    assert line_of("train") is None and line_of("train.nothing") is None


def test_values_are_told_where_the_last_file_gave_them(write: Any) -> None:
    ground = write("train: {steps: 1}\nseed: -1", "ground.yaml")
    assert refusal(write("base: ground.yaml\nname: x")).where == f"{ground}:2"
    above = write("base: ground.yaml\n\n\nseed: -2")
    assert refusal(above).where == f"{above}:4"


def test_keys_that_contradict_each_other_are_both_told(write: Any) -> None:
    path = write("train:\n  steps: 1\n  global_batch: 8\n")
    error = refusal(path, "train.micro_batch=3")
    assert error.where == f"{path}:3, override 'train.micro_batch=3'"


def test_sections_that_contradict_each_other_are_both_told(write: Any) -> None:
    path = write("train:\n  steps: 1\n  global_batch: 8\n")
    error = refusal(path, "parallel.workers=3")
    assert error.where == f"{path}:3, override 'parallel.workers=3'"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("name: x", "none of train.steps, train.tokens and train.epochs"),
        ("train: {steps: 1, tokens: 5}", "steps and tokens each give the length"),
        ("train: {steps: 1, sequence_length: 4096}", r"train\.sequence_length is 4096.*meant for 2048"),
        ("train: {steps: 1}\nparallel: {workers: 2, strategy: single}", "'single' cannot use 2 data-parallel workers"),
        ("train: {steps: 1}\nparallel: {workers: 3}", "32 rows cannot be shared evenly by 3 workers"),
        ("train: {steps: 1, lanes: 8}\nparallel: {workers: 3}", "8 lanes cannot be shared evenly by 3 workers"),
        ("train: {steps: 1}\ndata: {sources: [{path: a, name: x}, {path: b, name: x}]}", "2 sources are named 'x'"),
        ("train: {steps: 1, sequence_length: 100, global_batch: 250 tokens}", "not a whole number of rows"),
        ("train: {steps: 1}\nmodel: {preset: 5m}", "unknown model preset '5m'"),
        ("train: {steps: 1}\nmodel: {dim: 64}", "set a preset"),
        ("train: {steps: 1}\nmodel: {preset: 4m, heads: 5}", "not divisible"),
        ("train: {steps: 1}\nschedule: {warmup: 10 min}", "not a time"),
        ("train: {steps: 1}\nevaluation: {every: 10 min}", "not a time"),
        ("train: {steps: 1}\nschedule: {warmup: 1.5}", "less than or equal to 1"),
        ("train: {tokens: -5}", "greater than or equal to 1"),
        ("optimizer: {betas: [0.9, 1.0]}", "less than 1"),
        ("optimizer: {momentum: 1.0}", "less than 1"),
        ("model: {preset: 4m, rope_theta: 0}", "greater than 0"),
        ("model: {preset: 4m, norm_eps: -1e-5}", "greater than or equal to 0"),
        ("train: {tokens: .inf}", "whole number"),
        ("train: {steps: 1}\noptimizer: {learning_rate: .inf}", "finite"),
        ("train: 5", "must be a section"),
        ("train: {steps: 1}\ndata: {sources: []}", "at least 1 item"),
        ("train: {steps: 1}\nname: ../up", "letters, digits"),
        ("train: {steps: 1}\nname: 2024", "valid string"),
        ("1: 2", "unknown key '1'"),
        ("train: {steps: true}", "steps is a number, not true"),
        ("train: {steps: 1}\ncheckpoint: {keep: true}", "keep is a number, not true"),
        ("train: {steps: 1}\ntelemetry: {usd_per_hour: false}", "usd_per_hour is a number, not false"),
        ("train: {steps: 1}\nschedule: {warmup: x%}", "'x' is not a quantity"),
        ("train: {steps: 1}\nschedule: {warmup: 500 %}", "'500 %' is not a share"),
        ("train: {steps: 1}\ncheckpoint: {every: 1.5 s}", "not a whole number of seconds"),
        ("train: {steps: 1}\nparallel: {workers: ':2'}", "':2' is not a range of workers"),
        ("train: {steps: 1}\ndata: {sources: }", "at least 1 item"),
        ("train: {steps: 1}\nruns: ~nobody.here/runs", "'~nobody.here/runs' has no meaning here"),
        ("train: {steps: 1}\ndata: {tokenizer: {path: hf://a/b/c}}", "is named hf://organisation/name"),
    ],
)
def test_what_cannot_be_is_refused(write: Any, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_config(write(text))


def test_a_model_to_continue_brings_its_tokenizer(write: Any, tmp_path: Path) -> None:
    for name, file in (("a", "tokenizer.json"), ("b", "tekken.json"), ("without", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    path = write("train: {steps: 1}")

    def given(*words: str) -> Any:
        return load_config(path, words).data.tokenizer.path

    hub, (a, b, without) = "hf://org/name@main", (tmp_path / name for name in ("a", "b", "without"))
    assert given() is None
    assert (given(f"model.from_pretrained={a}"), given(f"model.from_pretrained={b}")) == (a, b)
    assert given(f"model.from_pretrained={without}") is None, "a vocabulary is trained, as for any other shape"
    assert given("model.from_pretrained=absent") == Path("absent")
    assert given(f"model.from_pretrained={hub}") == hub == given(f"data.tokenizer.path={hub}")
    assert given(f"model.from_pretrained={hub}", f"data.tokenizer.path={a}") == a
    assert given(f"model.from_pretrained={a}", "data.remote=s3://bucket/store") is None
    config = override(load_config(path, [f"model.from_pretrained={a}"]), [f"model.from_pretrained={b}"])
    assert config.data.tokenizer.path == b


@pytest.mark.parametrize(
    "words", ["data.begin_of_text=always", "data.sources=[{path: a.jsonl, format: chat}]"], ids=["begin", "chat"]
)
def test_what_needs_a_given_tokenizer_takes_that_of_a_model(write: Any, words: str) -> None:
    path = write("train: {steps: 1}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path"):
        load_config(path, [words])
    load_config(path, [words, "model.from_pretrained=hf://org/name"])
    load_config(path, [words, "data.remote=s3://bucket/store"])


def test_a_pretrained_checkpoint_brings_its_own_longest_sequence(write: Any) -> None:
    path = write("train: {steps: 1, sequence_length: 4096}\nmodel: {from_pretrained: folder}")
    assert load_config(path).train.sequence_length == 4096


def test_a_number_as_a_name_is_to_be_quoted(write: Any) -> None:
    assert refusal(write("train: {steps: 1}\nname: 2024")).fix == 'quote it: "2024"'
    assert refusal(write("train: {steps: 1}\nname: 1e4")).fix == 'quote it: "1e4"', "as it was written"


@pytest.mark.parametrize("value", ["1e4", "007.0", "true", "*.jsonl", "{question} {answer}", "{name}/x", "'"])
def test_text_in_an_override_is_quoted_for_yaml_and_the_shell(write: Any, value: str) -> None:
    """What the fix says, typed as it stands, gives the text."""
    path, key = write("train: {steps: 1}\ndata: {sources: [a]}"), "data.sources.0.subset"
    fix = refusal(path, f"{key}={value}").fix
    assert fix is not None
    (argument,) = shlex.split(fix.partition(": ")[2])
    assert load_config(path, [argument]).data.sources[0].subset == value


def test_leading_zeros_stay_text(write: Any) -> None:
    assert load_config(write("train: {steps: 1}\nname: 007")).name == "007"


def test_what_holds_nothing_but_comments_is_left_out(write: Any) -> None:
    text = "train: {steps: 1, batch_ramp: }\ndata:\n  clean:\n    # - unicode\n  mixture: {stages: }"
    config = load_config(write(text))
    assert config.data.clean == config.data.mixture.stages == config.train.batch_ramp == []


def test_a_home_folder_is_meant(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    config = load_config(write("train: {steps: 1}\nruns: ~/runs"), ["data.store=~/stores/{name}"])
    assert config.runs == Path("/home/ada/runs")
    assert config.data.store == Path("/home/ada/stores/run")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("optimizer.name=lion", "optimizer.name=adamw"),
        ("optimizer.name=adamw", "optimizer.name=lion"),
        ("model.preset=4m", "model.heads=3"),
        ("model.preset=8x7b", "model.preset=16m-moe"),
    ],
)
def test_what_followed_from_a_value_goes_with_it(write: Any, first: str, then: str) -> None:
    path = write("train: {steps: 1}")
    assert override(load_config(path, [first]), [then]) == load_config(path, [first, then])


@pytest.mark.parametrize("workers", ["", "many", "0"])
def test_a_world_without_a_size_is_refused(write: Any, workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("train: {steps: 1}")
    monkeypatch.setenv("WORLD_SIZE", workers)
    assert load_config(path).parallel.workers == 1, "without a rank nobody has started this process as one of several"
    monkeypatch.setenv("RANK", "0")
    assert "no number of workers" in refusal(path).what


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("a: b: c", "not YAML", ":1:5"),
        ("a:\n\t- 1", "not YAML", ":2:1"),
        ("name: x\nname: y", "'name' is given twice", ":1 and "),
        ("train: {steps: 1, steps: 2}", "'steps' is given twice", ":1"),
        ("name: !!python/name:os.system", "not YAML", ":1:7"),
        ("name: !!python/object/apply:os.system ['true']", "plain data only", ":1"),
        ("name: !!set {a, b}", "plain data only", ":1"),
        ("seed: !!int abc", "'abc' is not a valid int", ":1"),
        ("seed: " + "9" * 5000, "is not a valid int", ":1"),
        ("name: x\n---\nname: y", "not YAML", ":2:1"),
        ("? [a]\n: b", "a key must be a word", ":1"),
        ("a: &a [*a]", "alias", ""),
        ("[" * 5000, "nested too deeply", ""),
        ("a: \x01", "not YAML", ""),
        ("", "empty", ""),
        ("# only a comment", "empty", ""),
        ("- a\n- b", "must be a mapping", ""),
        ("just text", "must be a mapping", ""),
        ("base: [a]", "one file or preset", ":1"),
        ("base: nowhere.yaml", "no such config file", ""),
    ],
)
def test_files_that_are_no_config(write: Any, text: str, what: str, line: str) -> None:
    path = write(text)
    error = refusal(path)
    assert what in error.what
    assert str(path) + line in str(error.where)
    assert error.fix


def test_a_missing_file_a_folder_and_a_file_that_is_no_text(tmp_path: Path) -> None:
    fix = str(refusal(tmp_path / "none.yaml").fix)
    assert "built-in preset: cpt-24gb, " in fix and fix.endswith("gpu, gpu-1b, laptop, quickstart")
    error = refusal(tmp_path)
    assert "folder" in error.what
    assert "config.yaml" not in str(error.fix)
    (tmp_path / "config.yaml").touch()
    assert str(tmp_path / "config.yaml") in str(refusal(tmp_path).fix)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00name")
    assert "cannot read" in refusal(tmp_path / "binary.yaml").what


def test_a_file_that_is_based_on_itself(write: Any) -> None:
    write("base: b.yaml", "a.yaml")
    error = refusal(write("base: a.yaml", "b.yaml"))
    assert "b.yaml -> a.yaml -> b.yaml" in error.what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train.steps", "form key.path=value"),
        ("=5", "form key.path=value"),
        ("train..steps=5", "form key.path=value"),
        ("train.steps=[1", "not YAML"),
        ("data.sources.3.format=text", "no list item"),
        ("data.sources.x=1", "no list item"),
        ("data.sources.-1=a", "no list item"),
        ("train.steps.x=1", "train.steps"),
        ("base=gpu", "unknown key 'base'"),
    ],
)
def test_wrong_overrides(write: Any, text: str, what: str) -> None:
    error = refusal(write("train: {steps: 1}\ndata: {sources: [a]}"), text)
    assert what in error.what
    assert error.where == f"override '{text}'"


def test_an_override_cannot_base_a_config_on_another_one(write: Any) -> None:
    assert "write `base:` in a file" in str(refusal(write("train: {steps: 1}"), "base=gpu").fix)


def test_a_config_from_a_pipe_of_the_shell() -> None:
    """`headway train <(generate)`."""
    reads, writes = os.pipe()
    os.write(writes, b"base: quickstart\nname: generated\n")
    os.close(writes)
    try:
        assert load_config(Path(f"/dev/fd/{reads}"), ["train.steps=3"]).name == "generated"
    finally:
        os.close(reads)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "device", "terabyte"])
@pytest.mark.parametrize("named", ["itself", "base"])
def test_what_never_ends_is_no_config(tmp_path: Path, kind: str, named: str) -> None:
    path = tmp_path / "odd.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    (tmp_path / "above.yaml").write_text("base: odd.yaml\nname: x\n")
    error = refusal(path if named == "itself" else tmp_path / "above.yaml")
    assert str(path) == error.where
    assert ("at most 4.0 MiB are read" if kind == "terabyte" else "is not a regular file") in error.what


def test_configs_based_on_each_other_without_end_are_refused(write: Any) -> None:
    for number in range(60):
        write(f"base: {number + 1}.yaml", f"{number}.yaml")
    write("name: x", "60.yaml")
    assert "more than 50 configs" in refusal(write("base: 0.yaml")).what


_NINE = range(9)
_BOMBS = {
    "lists": "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    "mappings": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in _NINE)}}}\n" for n in range(1, 12)),
    "wide merges": f"a: &a {{{', '.join(f'k{k}: 1' for k in range(1000))}}}\nb: {{<<: [{', '.join(['*a'] * 1000)}]}}",
    "plain values": f"a: [{'1,' * 20_000}]",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", _BOMBS)
def test_few_lines_that_stand_for_much_fill_no_memory(write: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(document, "_MOST_VALUES", 10_000)  # else it takes seconds
    made = 0
    make = document.Entry.__init__

    def counted(*arguments: Any, **named: Any) -> None:
        nonlocal made
        made += 1
        make(*arguments, **named)

    monkeypatch.setattr(document.Entry, "__init__", counted)
    error = refusal(write(_BOMBS[name]))
    assert f"more than {document._MOST_VALUES:,} values" in error.what and "run.yaml:" in str(error.where)
    assert made <= 2 * document._MOST_VALUES, "an entry is made, and its place set"


def test_merges_within_merges_stay_as_small_as_what_they_name(write: Any) -> None:
    """Each level names the one within ten times: without care, 10 ** 40 values."""
    levels = range(40)
    text = (
        "".join(f"[&a{n} {{<<: " for n in reversed(levels)) + "{x: 1}" + "".join(f"}}{f', *a{n}' * 9}]" for n in levels)
    )
    assert document.parse(f"<<: {text}", "it").plain() == {"x": 1}


def test_keys_of_what_is_merged_are_looked_at_too(write: Any) -> None:
    assert "'x' is given twice" in refusal(write("train: {<<: {x: 1, x: 2}}")).what
    assert "a key must be a word" in refusal(write("train: {<<: {[x]: 1}}")).what


def test_a_number_that_would_take_for_ever_to_read_is_none(write: Any) -> None:
    """Of base 60, in YAML 1.1."""
    assert "is not a valid int" in refusal(write("seed: !!int 1" + ":1" * 100_000)).what


@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\u202eb", "größer, 文字", "a\x7fb\n\tc", "\u2028"])
def test_a_config_is_shown_exactly_and_steers_no_terminal(text: str) -> None:
    shown = document.to_yaml({"a": text, "b": [1e-4, "off"]})
    assert printable(shown, keep="\n") == shown
    assert document.parse(shown, "it").plain() == yaml.safe_load(shown) == {"a": text, "b": [1e-4, "off"]}


def test_depth_is_limited_as_in_json() -> None:
    assert document.parse("[" * 100 + "]" * 100, "it")
    with pytest.raises(ConfigError, match="nested too deeply"):
        document.parse("[" * 102 + "]" * 102, "it")


def test_python_users_are_told_too() -> None:
    with pytest.raises(ConfigError, match="none of"):
        resolve(Config())
    with pytest.raises(ConfigError, match="2 problems"):
        resolve(Config(train=TrainConfig(sequence_length=10_000)))


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, headway.config as c; c.load_config('quickstart'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG)


def test_names_of_other_trainers_lead_to_keys_that_there_are() -> None:
    known = set(known_keys())
    assert len(sentences()) >= 60 and known.issuperset(our_names().values())
    # Only the limit of a source has a name that others give to the length of training.
    assert {key.rpartition(".")[2] for key in known} & set(our_names()) == {"max_epochs"}


def test_a_sentence_on_a_foreign_name_begins_with_the_key_it_leads_to() -> None:
    for name, key in our_names().items():
        words = sentences()[name]
        assert key in words or key.rpartition(".")[2] in words, name


@pytest.mark.parametrize("name", ["output_dir", "lora_alpha", "report_to"])
def test_a_foreign_name_is_not_taken_for_a_key_that_looks_alike(name: str) -> None:
    fix = suggestion(name) or ""
    assert not fix.startswith("did you mean")
    assert all(key not in fix for key in ("output_bias", "load_ahead", "telemetry.report"))


@pytest.mark.parametrize("name", ["train.shuffle_seed", "optimizer.amsgrad_mode", "model.rope_kind"])
def test_nothing_is_suggested_for_a_name_that_is_like_none(name: str) -> None:
    assert not (suggestion(name) or "").startswith("did you mean")


def test_counts_may_be_written_short(write: Any) -> None:
    short = ["train.steps=2k", "train.sequence_length=2k", "model.max_sequence_length=128k"]
    config = load_config(write("base: laptop"), [*short, "data.tokenizer.vocab_size=32k"])
    assert (config.train.steps, config.train.sequence_length) == (2000, 2048)
    assert (config.model.max_sequence_length, config.data.tokenizer.vocab_size) == (131_072, 32_000)


def test_epochs_replace_the_length_of_a_base_and_become_steps(write: Any) -> None:
    path = write("base: quickstart\ntrain: {epochs: 2.5, sequence_length: 64, global_batch: 8}")
    train = load_config(path).train
    assert (train.steps, train.epochs) == (None, 2.5)
    assert train.over(rows=100).steps == 32  # 250 rows, eight by eight
    assert load_config(path, ["train.steps=7"]).train.epochs is None


def test_a_name_that_is_none_is_answered_in_words(write: Any) -> None:
    error = refusal(write("train: {steps: 1}"), "name=my run")
    assert error.what.startswith("name: should be letters, digits, '.', '_' and '-'")
    step = "data.clean=[{step: python, function: strip}]"
    assert "data.clean.0.function: should be package.module:function" in refusal(write("train: {steps: 1}"), step).what


def test_a_text_of_another_form_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    """Also where the form has no words of its own, as the name of a variable."""
    with pytest.raises(ConfigError, match="should match the regular expression"):
        load_config("quickstart", ["launch.environment={a-b: c}"])
