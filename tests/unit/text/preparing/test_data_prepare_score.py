"""Cleaning steps of one source, and scores by a user's function: a curriculum from one corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import Config, resolve
from headway.config.derived.identity import changes
from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.data.feeding.mixture import plan_mixture
from headway.data.made_of import differences
from headway.data.store import TokenStore
from headway.text.preparing.prepare import prepare

FUNCTIONS = """
def difficulty(text):
    return len(text.split()) / 100

def shout(text):
    return text.upper() if len(text) % 2 else True

def wrong(text):
    return "hard"
"""
BANDS: dict[str, dict[str, float]] = {
    "easy": {"below": 0.5},
    "mid": {"at_least": 0.5, "below": 1},
    "hard": {"at_least": 1},
}


@pytest.fixture
def texts(jsonl: Callable[..., Path]) -> list[str]:
    Path("own_difficulty.py").write_text(FUNCTIONS)
    texts = [("word " * (4 * n) + f"end {n}").strip() for n in range(40)]
    jsonl(Path("corpus.jsonl"), texts)
    jsonl(Path("other.jsonl"), ["another text of no band"] * 3)
    return texts


def banded(config: Callable[..., DataConfig], function: str = "difficulty", **values: Any) -> DataConfig:
    step = {"step": "score", "function": f"own_difficulty:{function}"}
    bands = ({"name": name, "clean": [{**step, **band}]} for name, band in BANDS.items())
    sources: list[Any] = [{"path": "corpus.jsonl", **band} for band in bands]
    sources[2]["clean"].append({"step": "python", "function": "own_difficulty:shout"})
    return config([*sources, "other.jsonl"], **values)


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_each_document_is_in_the_band_of_its_score(
    texts: list[str], config: Callable[..., DataConfig], dedup: bool, workers: int
) -> None:
    data = banded(config, dedup={"documents": dedup, "max_removed_per_source": 1.0}, validation=0)
    prepare(data, workers=workers)
    store = TokenStore.open(data.store)
    sizes = [len(text.split()) / 100 for text in texts]
    in_bands = [[s < 0.5, 0.5 <= s < 1, s >= 1] for s in sizes]
    expected = dict(zip(BANDS, map(sum, zip(*in_bands, strict=True)), strict=True))
    found = {source["name"]: source["documents"] for source in store.manifest["sources"]}
    assert found == {**expected, "other": 1 if dedup else 3}
    assert prepare(data, workers=1).up_to_date and not differences(data, store.manifest)

    cleaned = {source["name"]: source.get("clean") for source in store.inputs()["sources"]}
    (easy,), (_, shouted) = cleaned["easy"]["steps"], cleaned["hard"]["steps"]
    assert (easy["documents_in"], easy["documents_out"]) == (40, expected["easy"])
    hard = [text for text, size in zip(texts, sizes, strict=True) if size >= 1]
    assert shouted["changed"] == sum(len(text) % 2 for text in hard)  # augmented, and counted
    assert cleaned["other"] is None


def test_only_the_source_whose_steps_change_is_prepared_again(
    texts: list[str], config: Callable[..., DataConfig]
) -> None:
    data = banded(config)
    prepare(data, workers=1)
    before = TokenStore.open(data.store)
    sources = [*data.sources]
    lower = sources[0].clean[0].model_copy(update={"below": 0.4})
    sources[0] = sources[0].model_copy(update={"clean": [lower]})
    changed = data.model_copy(update={"sources": sources})
    (difference,) = differences(changed, before.manifest)
    assert difference.startswith("data.sources.0.clean was") and "'below': 0.4" in difference
    prepare(changed, workers=1)
    after = TokenStore.open(data.store)
    for name in ("mid", "hard", "other"):
        assert after.shard_entries("train", name) == before.shard_entries("train", name)
    assert after.tokens("train", "easy") < before.tokens("train", "easy")


def test_what_is_no_score_is_refused(texts: list[str], config: Callable[..., DataConfig]) -> None:
    with pytest.raises(DataError, match="own_difficulty:wrong returned 'hard', not a finite number"):
        prepare(banded(config, "wrong"), workers=1)
    for bounds, words in (({}, "give at_least, below or both"), ({"at_least": 1, "below": 1}, "nothing is kept")):
        with pytest.raises(ValueError, match=words):
            config([{"path": "a", "clean": [{"step": "score", "function": "a:b", **bounds}]}])


def test_stages_take_bands_one_after_the_other(texts: list[str], config: Callable[..., DataConfig]) -> None:
    stages = [
        {"start": 0.0, "weights": {"easy": 1, "mid": 0, "hard": 0, "other": 0}},
        {"start": 0.5, "weights": {"easy": 0, "mid": 0, "hard": 1, "other": 0}},
    ]
    data = banded(config, mixture={"stages": stages}).model_dump(mode="json")
    for source in data["sources"]:
        source["weight"] = 1.0
    run = Config.model_validate({"data": data, "train": {"steps": 10, "sequence_length": 8, "global_batch": 2}})
    settled = resolve(run)
    mixture = plan_mixture(
        settled.data, settled.train, ["easy", "mid", "hard", "other"], lambda length: [50, 50, 50, 50]
    )
    assert mixture.counts(0, 5) == [10, 0, 0, 0] and mixture.counts(5, 10) == [0, 0, 10, 0]


def test_runs_without_own_steps_keep_their_identity() -> None:
    plain = Config.model_validate({"data": {"sources": ["a.jsonl"]}})
    own = {"sources": [{"path": "a.jsonl", "clean": ["unicode"]}]}
    assert any("clean" in text for text in changes(plain, Config.model_validate({"data": own})))
    assert not any("clean" in json.dumps(source) for source in _identity_sources(plain))


def _identity_sources(config: Config) -> Any:
    from headway.config.derived.identity import identity

    return identity(config)["data.sources"]
