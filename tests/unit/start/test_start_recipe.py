"""A run on a folder of text: what is read, the shape for compute and text, the vocabulary, and one dial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.config import load_config
from headway.config.loading.document import to_yaml
from headway.core.errors import ConfigError, DataError
from headway.start.recipe.corpus import is_text, look
from headway.start.recipe.recipe import Dial
from headway.start.recipe.shapes import (
    MOST_EPOCHS,
    choice_for,
    depth_for,
    depth_for_size,
    parameters_of,
    vocabulary_for,
)


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
