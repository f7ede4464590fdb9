"""Which documents stay: equal ones, similar ones, in any order, in bounded memory."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headway.config.sections.data import DedupConfig
from headway.text.dedup import Duplicates, find_duplicates, fingerprint_documents
from headway.text.dedup import clusters as clusters_module
from headway.text.dedup import corpus as corpus_module
from headway.text.dedup import workspace as workspace_module
from headway.text.dedup.clusters import find, join
from headway.text.dedup.minhash import estimate_similarity
from support.dedup import dedup_peak, edited, fingerprint_units, prose, random_prints, settings, similarity

EQUAL = settings(documents=True)
NEAR = settings(near=True)


def kept(texts: Sequence[str], config: DedupConfig, size: int = 5, sources: Sequence[str] | None = None) -> list[str]:
    """The texts that stay, in order."""
    units = fingerprint_units(texts, config, size)
    found = find_duplicates(units, sources or ["source"] * len(units), config)
    return list(itertools.compress(texts, np.concatenate([np.zeros(0, bool), *found.keep])))


def corpus_with_copies(seed: int = 0) -> list[str]:
    """Sixty texts, for some of which there are edited and equal copies, shuffled."""
    texts = prose(100, 60)
    copies = [edited(text, number % 4, number) for number, text in enumerate(texts[:40])]
    mixed = [*texts, *copies, *copies[:10], *texts[:5]]
    random.Random(seed).shuffle(mixed)
    return mixed


def test_the_first_of_equal_documents_stays() -> None:
    texts = ["a", "b", "a", "c", "b", "a"]
    for size in (1, 2, 6):
        units = fingerprint_units(texts, EQUAL, size)
        found = find_duplicates(units, ["source"] * len(units), EQUAL)
        assert np.concatenate(found.keep).tolist() == [True, True, False, True, False, False]
        assert found.report["total"]["exact"] == 3 and found.report["clusters"]["count"] == 2
    assert kept(texts, NEAR) == ["a", "b", "c"]
    assert kept(texts, settings(paragraphs=True)) == texts


def test_documents_that_share_half_a_hash_are_different() -> None:
    prints = random_prints(np.array([5, 5, 5, 7], dtype=np.uint64), EQUAL)
    prints.hashes[:, 1] = [1, 2, 1, 1]
    (keep,) = find_duplicates([prints], ["source"], EQUAL).keep
    assert keep.tolist() == [True, True, False, True]


def test_the_source_that_comes_first_keeps_its_copies() -> None:
    texts = ["x", "a", "a", "b"]
    prints = [fingerprint_documents([text], EQUAL) for text in texts]
    found = find_duplicates(prints, ["one", "two", "one", "two"], EQUAL)
    assert np.concatenate(found.keep).tolist() == [True, False, True, True]
    assert {name: counts["removed"] for name, counts in found.report["sources"].items()} == {"one": 0, "two": 1}


def test_near_duplicates_go_and_others_stay() -> None:
    texts = prose(100, 40)
    copies = [edited(text, 1, number) for number, text in enumerate(texts[:20])]
    unlike = [edited(text, 12, number) for number, text in enumerate(texts[20:])]
    assert min(similarity(*pair) for pair in zip(texts[:20], copies, strict=True)) > 0.85
    assert max(similarity(*pair) for pair in zip(texts[20:], unlike, strict=True)) < 0.7
    left = kept([*texts, *copies, *unlike], NEAR)
    assert len(left) == 60 and set(left) >= {*texts[20:], *unlike}
    # Of each pair exactly one has stayed.
    assert all((text in left) != (copy in left) for text, copy in zip(texts[:20], copies, strict=True))


@pytest.mark.parametrize("config", [EQUAL, NEAR, settings(near=True, bands=5, rows=3, similarity=0.6)])
def test_the_texts_that_stay_do_not_depend_on_order_or_units(config: DedupConfig) -> None:
    wanted = sorted(kept(corpus_with_copies(), config))
    assert len(wanted) < 101
    for seed, size in ((1, 1), (2, 7), (3, 115), (4, 2)):
        assert sorted(kept(corpus_with_copies(seed), config, size)) == wanted


def test_the_longest_of_the_first_source_stays() -> None:
    text = prose(100, 1)[0]
    variants = [text + " more", text, text + " even more", text + " EVEN MORE"]
    stays = {tuple(kept(order, NEAR, 1)) for order in itertools.permutations(variants)}
    assert stays in ({(text + " even more",)}, {(text + " EVEN MORE",)})
    for order in itertools.permutations(variants):
        assert kept(order, NEAR, 1, ["first", "second", "second", "second"]) == [order[0]]


def test_whatever_goes_is_similar_to_something_that_stays() -> None:
    """Along a chain each text is similar to the next, and the ends have nothing in common."""
    words = (prose(400, 1)[0]).split(" ")[:300]
    other = prose(400, 9)[8].split(" ")[:300]
    chain = [" ".join(other[:cut] + words[cut:]) for cut in range(0, 301, 5)]
    config = settings(near=True, similarity=0.8)
    assert min(similarity(*pair) for pair in itertools.pairwise(chain)) > 0.9
    left = kept(chain, config)
    assert 5 < len(left) < 30
    for text in chain:
        assert max(similarity(text, stays) for stays in left) > 0.75
    for pair in itertools.combinations(left, 2):
        assert similarity(*pair) < 0.85


def test_bands_that_agree_by_chance_join_nothing() -> None:
    """Every document in one bucket of every band: none goes, for their signatures differ."""
    texts = prose(100, 30)
    prints = fingerprint_documents(texts, NEAR)
    prints.bands[:] = 77
    assert find_duplicates([prints], ["source"], NEAR).keep[0].all()


def test_similar_documents_in_one_bucket_with_unlike_ones_are_found() -> None:
    texts = prose(100, 5)
    prints = fingerprint_documents([*texts, *(text + " end" for text in texts)], NEAR)
    prints.bands[:] = 77
    (keep,) = find_duplicates([prints], ["source"], NEAR).keep
    assert keep.tolist() == [False] * 5 + [True] * 5


def test_a_component_with_more_kept_documents_than_rounds_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clusters_module, "_FINAL_ROUNDS", 1)
    words, other = (piece.split(" ") for piece in prose(400, 2))
    chain = [" ".join(other[:cut] + words[cut:]) for cut in range(0, 401, 8)]
    left = kept(chain, NEAR)
    longest = max(chain, key=lambda text: len(text.encode()))
    assert longest in left
    assert all(similarity(text, longest) > 0.75 for text in chain if text not in left)
    assert "documents are kept without a comparison with all others" in capsys.readouterr().err
    monkeypatch.undo()
    assert len(kept(chain, NEAR)) < len(left) and not capsys.readouterr().err


def test_roots_join_whole_sets_at_once() -> None:
    draw = random.Random(0)
    for _ in range(30):
        count = draw.randint(1, 60)
        pairs = [(draw.randrange(count), draw.randrange(count)) for _ in range(draw.randint(0, 60))]
        parents = np.arange(count)
        labels = list(range(count))
        for start in range(0, len(pairs), 7):
            some = np.array(pairs[start : start + 7])
            join(parents, some[:, 0], some[:, 1])
        for left, right in pairs:
            old, new = sorted((labels[left], labels[right]), reverse=True)
            labels = [new if label == old else label for label in labels]
        assert find(parents, np.arange(count)).tolist() == labels


@pytest.mark.parametrize(
    "config", [EQUAL, NEAR, settings(paragraphs=True), settings(documents=True, paragraphs=True, near=True)]
)
@pytest.mark.parametrize("texts", [[], [""], ["one document"], ["same"] * 5, ["!", "!", "?"], ["", "", "a"]])
def test_tiny_corpora_pass(config: DedupConfig, texts: list[str]) -> None:
    for sizes in ([0], [len(texts)], [0, len(texts), 0]):
        units = [fingerprint_documents(texts if size else [], config) for size in sizes]
        found = find_duplicates(units, ["source"] * len(units), config)
        assert [len(keep) for keep in found.keep] == [len(unit) for unit in units]
        stay = sum(int(keep.sum()) for keep in found.keep)
        total = sum(len(unit) for unit in units)
        assert stay == (len(set(texts)) if total and (config.documents or config.near) else total)
    assert find_duplicates([], [], config).keep == []


def test_the_report_is_plain_json_and_adds_up() -> None:
    config = settings(documents=True, near=True, paragraphs=True)
    texts = corpus_with_copies()
    units = fingerprint_units(texts, config, 9)
    sources = ["first"] * 4 + ["second"] * (len(units) - 4)
    found = find_duplicates(units, sources, config)
    report = json.loads(json.dumps(found.report))
    assert report == found.report
    total = report["total"]
    assert total["documents"] == len(texts) and total["bytes"] == sum(len(text.encode()) for text in texts)
    gone = set(texts) - set(kept(texts, NEAR))
    assert total["removed"] == total["exact"] + total["near"] + total["emptied"] >= total["exact"] + len(gone) > 25
    assert total["exact"] == len(texts) - len(set(texts))
    for key in total:
        assert total[key] == sum(counts[key] for counts in report["sources"].values())
    for name in ("first", "second"):
        keeps = [keep for keep, source in zip(found.keep, sources, strict=True) if source == name]
        assert report["sources"][name]["removed"] == sum(int((~keep).sum()) for keep in keeps)


def test_examples_of_clusters_name_units_and_documents() -> None:
    texts = prose(100, 20)
    copies = [texts[3] + f" {number}" for number in range(3)] + [texts[3]]
    units = fingerprint_units([*texts, *copies], NEAR, 4)
    found = find_duplicates(units, ["source"] * 6, NEAR)
    (largest,) = found.report["clusters"]["largest"]
    assert largest["documents"] == 5 and largest["share"] == pytest.approx(5 / 24)
    assert sorted([largest["kept"], *(each["document"] for each in largest["removed"])]) == [
        [0, 3],
        [5, 0],
        [5, 1],
        [5, 2],
        [5, 3],
    ]
    assert not found.keep[0][3] and found.keep[5].sum() == 1
    for each in largest["removed"]:
        text = [*texts, *copies][each["document"][0] * 4 + each["document"][1]]
        stays = [*texts, *copies][largest["kept"][0] * 4 + largest["kept"][1]]
        assert each["similarity"] == pytest.approx(similarity(text, stays), abs=0.05)
        assert not each["equal"]
    equal = find_duplicates(fingerprint_units(["a", "b", "a"], EQUAL, 3), ["source"], EQUAL)
    assert equal.report["clusters"]["largest"][0]["removed"] == [{"document": [0, 2], "similarity": 1.0, "equal": True}]


def test_prints_of_another_config_are_refused() -> None:
    texts = prose(100, 12)
    with pytest.raises(ValueError, match="unit 1 were made with other bands"):
        find_duplicates([fingerprint_documents(texts, each) for each in (NEAR, EQUAL)], ["a", "b"], NEAR)
    with pytest.raises(ValueError, match="without paragraphs"):
        find_duplicates([fingerprint_documents(texts, EQUAL)], ["a"], settings(paragraphs=True))
    with pytest.raises(ValueError, match="1 units, but 2 names"):
        find_duplicates([fingerprint_documents(texts, EQUAL)], ["a", "b"], EQUAL)


def small_memory(texts: list[str], config: DedupConfig, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Duplicates:
    """With room for a few dozen rows only, so that everything is done in parts and spilled."""
    monkeypatch.setattr(workspace_module.Workspace, "rows", property(lambda self: 16))
    monkeypatch.setattr(workspace_module, "BLOCK", 7)
    monkeypatch.setattr(corpus_module, "BLOCK", 7)
    units = fingerprint_units(texts, config, 10)
    return find_duplicates(units, ["one"] * 5 + ["two"] * (len(units) - 5), config, memory_bytes=64, scratch=scratch)


@pytest.mark.parametrize(
    "config", [EQUAL, NEAR, settings(documents=True, near=True, paragraphs=True), settings(near=True, bands=4, rows=1)]
)
def test_little_memory_gives_the_same(config: DedupConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = corpus_with_copies() + ["the same and the same"] * 60
    units = fingerprint_units(texts, config, 10)
    wanted = find_duplicates(units, ["one"] * 5 + ["two"] * (len(units) - 5), config)
    found = small_memory(texts, config, tmp_path, monkeypatch)
    assert found.report == wanted.report
    assert [keep.tolist() for keep in found.keep] == [keep.tolist() for keep in wanted.keep]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("distinct", [400_000, 1])
def test_memory_stays_within_its_bound(distinct: int, tmp_path: Path) -> None:
    """Four hundred thousand documents, all different or all equal, in 8 MiB of working memory.

    In a process of its own, so that nothing is counted which earlier tests have left running.
    """
    bound = 8 * 2**20
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        peak = pool.submit(dedup_peak, distinct, bound, tmp_path).result()
    # A unit's arrays, and a byte for each of the documents as outcome, come on top.
    assert peak < bound + 2 * 400_000


def test_equal_documents_never_reach_the_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = clusters_module.estimate_similarity

    def counted(left: np.ndarray, right: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        seen.append(len(left))
        return real(left, right)

    monkeypatch.setattr(clusters_module, "estimate_similarity", counted)
    assert kept(prose(100, 5) * 20, NEAR) == prose(100, 5)
    assert sum(seen) == 0
    assert estimate_similarity is real


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    config = settings(documents=True, near=True, paragraphs=True)
    units = fingerprint_units(["a b c", "d e f"], config, 1)
    find_duplicates(units, ["x", "x"], config, progress=lambda *what: told.append(what))
    assert told[:3] == [("equal documents", done, 2) for done in range(3)]
    assert told[3:24] == [("similar documents", band, 20) for band in range(21)]
    # Paragraphs that are too short to be looked at are not gone through.
    assert told[24:] == [("equal paragraphs", 0, 2)] * 3


def test_progress_is_told_all_the_way_when_the_search_goes_through_files() -> None:
    told: list[tuple[str, int, int]] = []
    units = fingerprint_units([f"document {number % 900}" for number in range(1000)], EQUAL, 100)
    find_duplicates(units, ["x"] * 10, EQUAL, progress=lambda *what: told.append(what), memory_bytes=1)
    done = [each[1] for each in told]
    assert {each[::2] for each in told} == {("equal documents", 1000)}
    assert done == sorted(done) and done[0] == 0 and done[-1] == 1000
    assert max(later - before for before, later in itertools.pairwise(done)) < 400, "no stretch goes by in silence"
