"""A run on a folder of text: what is read, the shape for compute and text, the vocabulary, and one dial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.api.start.recipe import recipe
from headway.api.start.recipe.corpus import is_text, look
from headway.api.start.recipe.recipe import Dial, Recipe, plan_run
from headway.api.start.recipe.rehearsal import Rehearsal, Sample
from headway.api.start.recipe.shapes import (
    MOST_EPOCHS,
    choice_for,
    depth_for,
    depth_for_size,
    parameters_of,
    vocabulary_for,
)
from headway.config import load_config
from headway.config.loading.document import to_yaml
from headway.core.errors import ConfigError, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "My texts!"
    folder.mkdir()
    (folder / "a.txt").write_text("words\n" * 100)
    (folder / "b.py").write_text("x = 1\n" * 100)
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(50)))
    (folder / "d.log").write_text("noise\n")
    (folder / "e.pdf").write_bytes(b"%PDF" + bytes(range(256)))
    return folder


def test_a_folder_is_read_with_its_code_and_says_what_it_leaves_out(folder: Path) -> None:
    corpus = look(str(folder))
    assert corpus.kinds == {".txt": 1, ".py": 1, ".jsonl": 1}
    assert corpus.also == ("*.py",) and corpus.name == "My-texts"
    said = corpus.describe()
    assert "1 .pdf: convert them first" in said and ".log" in said
    # The entry is one that a config takes, and reads these files and no others.
    source = corpus.source(None)
    assert source == {"path": str(folder), "also": ["*.py"]}
    file = folder.parent / "run.yaml"
    file.write_text(to_yaml({"data": {"sources": [source]}, "train": {"steps": 1}, "model": {"preset": "1m"}}))
    assert load_config(file).data.sources[0].also == ["*.py"]


def test_a_limit_never_cuts_the_first_document(tmp_path: Path) -> None:
    for number, size in enumerate((5000, 100, 100)):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    corpus = look(str(tmp_path))
    assert corpus.source(1000)["limit"] == "5001 bytes"
    assert "limit" not in corpus.source(10_000)
    assert corpus.is_one_piece


def test_a_sample_has_whole_lines_of_files_spread_over_the_text(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(100):
        (texts / f"{number:03d}.jsonl").write_text((json.dumps({"text": "y" * 1000}) + "\n") * 300)
    source = look(str(texts)).sample(tmp_path / "sample")
    files = sorted(Path(source["path"]).iterdir())
    assert 30 <= len(files) <= 60
    for file in files:
        assert file.stat().st_size <= 200_000
        assert all(json.loads(line)["text"] for line in file.read_text().splitlines())


def test_a_folder_without_text_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match="known ending"):
        look(str(tmp_path))


def test_what_is_text_and_what_is_a_config(folder: Path) -> None:
    assert is_text(folder) and is_text(folder / "a.txt")
    assert not is_text(folder / "e.pdf") and not is_text(folder / "missing")


@pytest.mark.parametrize("given", [{}, {"minutes": 1.0, "depth": 2}, {"parameters": 10, "depth": 2}])
def test_the_dial_is_one(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="one dial"):
        Dial(**given)  # type: ignore[arg-type]


def test_more_compute_gives_a_deeper_model_until_the_text_bounds_it() -> None:
    much = [depth_for(10.0**power, 1e12, 16_384) for power in range(11, 22)]
    assert much == sorted(much) and much[0] == 1 and much[-1] > 20
    # Hoffmann et al. 2022: 6 N D with D = 20 N. At 1e18 FLOPs N is 91 M.
    assert parameters_of(depth_for(1e18, 1e12, 16_384), 16_384) == pytest.approx(91e6, rel=0.3)
    little = [depth_for(10.0**power, 1e5, 1024) for power in range(11, 22)]
    assert max(little) <= 3
    assert parameters_of(max(little), 1024) <= MOST_EPOCHS * 1e5


def test_small_models_follow_the_table_and_large_ones_the_published_rules() -> None:
    small, large = choice_for(2, 4096, 3e6), choice_for(12, 32_768, 2e9)
    assert (small.optimizer, small.rate, small.batch) == ("muon", 8e-3, 2048)
    flops = large.flops_per_token * 2e9
    assert large.rate == pytest.approx(0.3118 * flops**-0.125, rel=0.05)
    assert large.batch == pytest.approx(0.2920 * flops**0.3271, rel=0.5)
    assert large.batch % large.length == 0


def test_a_size_gives_the_nearest_depth() -> None:
    for depth in (2, 6, 12):
        assert depth_for_size(parameters_of(depth, 8192) * 1.02, 8192) == depth


def test_a_larger_text_gets_a_larger_vocabulary() -> None:
    sizes = [vocabulary_for(10.0**power) for power in range(4, 11)]
    assert sizes == sorted(sizes) and sizes[0] == 1024 and sizes[-1] == 32_768


# The plan, with a machine of a known speed --------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Plans a run on text of so many megabytes, on a machine that takes so many FLOPs a second."""

    def plan(
        dial: Dial, *overrides: str, mb: float = 5, flops: float = 2e11, precision: str = "bf16", gpu: bool = False
    ) -> Recipe:
        texts = tmp_path / f"texts-{mb:g}"
        texts.mkdir(exist_ok=True)
        for number in range(10):
            with (texts / f"{number}.txt").open("wb") as file:
                file.truncate(int(mb * 1e5))
        seen: list[dict[str, Any]] = []

        def prepare_sample(values: dict[str, Any], given: Sequence[str], folder: Path) -> Sample:
            return Sample(folder / "store", bytes_per_token=3.0, bytes=4_000_000, seconds=2.0)

        def rehearse(values: dict[str, Any], given: Sequence[str], sample: Sample, *, seconds: float) -> Rehearsal:
            seen.append(values)
            depth = values.get("model", {}).get("layers", 2)
            per_token = choice_for(depth, 4096, 1e6).flops_per_token
            return Rehearsal(flops / per_token, 3.0, precision, "2 cores", gpu)

        monkeypatch.setattr(recipe, "prepare_sample", prepare_sample)
        monkeypatch.setattr(recipe, "rehearse", rehearse)
        found = plan_run(str(texts), dial, overrides)
        # What the run does was rehearsed.
        last = {key: value for key, value in seen[-1].items() if key not in ("train", "evaluation", "data")}
        assert overrides or all(found.values[key] == value for key, value in last.items())
        return found

    return plan


def test_a_plan_fills_the_minutes(planned: Any) -> None:
    found = planned(Dial(minutes=3))
    assert len(found.lines) == 6 and found.config.model.layers == 2
    train = found.config.train
    seconds = train.steps * train.tokens_per_step * choice_for(2, 4096, 1e6).flops_per_token / 2e11
    assert 140 < seconds < 175
    longer = planned(Dial(minutes=6)).config.train
    assert longer.steps == pytest.approx(2 * train.steps, rel=0.15)


def test_a_small_text_ends_a_run_early_and_a_large_one_is_read_in_part(planned: Any) -> None:
    small = planned(Dial(minutes=10), mb=0.3)
    tokens = small.config.train.steps * small.config.train.tokens_per_step
    assert tokens == pytest.approx(MOST_EPOCHS * 0.3e6 / 3, rel=0.05)
    assert "so it ends early" in "".join(small.lines)
    large = planned(Dial(minutes=3), mb=2000)
    assert "are read" in large.lines[0] and large.values["data"]["sources"][0]["limit"].endswith(" bytes")


def test_a_faster_machine_gets_a_larger_model_and_vocabulary(planned: Any) -> None:
    cpu, gpu = planned(Dial(minutes=10), mb=500), planned(Dial(minutes=10), mb=500, flops=1e14, gpu=True)
    assert gpu.config.model.layers > cpu.config.model.layers
    assert gpu.config.data.tokenizer.vocab_size > cpu.config.data.tokenizer.vocab_size
    assert gpu.config.train.compile == "auto" and cpu.config.train.compile is False


def test_a_cpu_without_fast_bf16_gets_another_optimizer(planned: Any) -> None:
    assert planned(Dial(minutes=3), precision="fp32").config.optimizer.name == "adamw"
    assert planned(Dial(minutes=3)).config.optimizer.name == "muon"


def test_overrides_win_and_a_model_to_continue_keeps_its_shape(planned: Any) -> None:
    found = planned(Dial(minutes=3), "model.preset=4m", "train.sequence_length=128", "name=mine")
    assert (found.config.name, found.config.model.layers, found.config.train.sequence_length) == ("mine", 6, 128)
    continued = planned(Dial(minutes=3), "model.from_pretrained=hf://gpt2")
    assert continued.config.model.from_pretrained == "hf://gpt2" and continued.config.model.dim is None
    assert continued.config.optimizer.learning_rate == 1e-5
    adapter = planned(Dial(minutes=3), "model.from_pretrained=hf://gpt2", "model.adapter.rank=8")
    assert adapter.config.optimizer.learning_rate == 2e-4


def test_a_size_is_trained_on_twenty_tokens_for_each_parameter(planned: Any) -> None:
    found = planned(Dial(parameters=1_000_000), mb=100)
    tokens = found.config.train.steps * found.config.train.tokens_per_step
    assert found.config.model.layers == 2
    assert tokens == pytest.approx(20 * parameters_of(2, found.config.data.tokenizer.vocab_size), rel=0.01)
