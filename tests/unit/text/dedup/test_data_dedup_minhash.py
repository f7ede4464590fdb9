"""Signatures, estimates and bands against true similarities."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from headway.text.dedup import minhash as module
from headway.text.dedup.fingerprints import DocumentPrints, fingerprint_documents
from headway.text.dedup.minhash import Layout, collision_probability, estimate_similarity, make_signatures
from support.dedup import edited, prose, settings, similarity

NEAR = settings(near=True)


def sets_of(sizes: list[tuple[int, int, int]], seed: int) -> tuple[DocumentPrints, DocumentPrints]:
    """Prints of pairs of random sets of one-word shingles, given as (in both, only left, only right)."""
    draw = np.random.default_rng(seed)
    layout = Layout(1, 20, 6)
    sides = []
    words = [draw.integers(1, 2**63, sum(size), dtype=np.uint64) for size in sizes]
    for side in (0, 1):
        parts = []
        for (both, left, _), each in zip(sizes, words, strict=True):
            parts.append(np.concatenate([each[:both], each[both : both + left] if side == 0 else each[both + left :]]))
        counts = np.array([len(part) for part in parts])
        sides.append(make_signatures(np.concatenate(parts), counts, layout))
    empty = {
        "hashes": np.zeros((len(sizes), 2), np.uint64),
        "sizes": np.zeros(len(sizes), np.int64),
        "paragraph_hashes": np.zeros(0, np.uint64),
        "paragraph_counts": np.zeros(len(sizes), np.int64),
    }
    one, other = (DocumentPrints(signatures=signatures, bands=bands, **empty) for signatures, bands in sides)
    return one, other


def agreement(one: DocumentPrints, other: DocumentPrints) -> NDArray[np.bool_]:
    """Which pairs agree in any band."""
    agree: NDArray[np.bool_] = (one.bands == other.bands).any(axis=0)
    return agree


@pytest.mark.parametrize(("words", "error"), [(30, 0.01), (100, 0.02), (400, 0.02)])
def test_estimates_of_real_texts_are_near_their_true_similarity(words: int, error: float) -> None:
    texts = prose(words, 60)
    others = [edited(text, number % (words // 15), seed=number) for number, text in enumerate(texts)]
    one, other = (fingerprint_documents(side, NEAR) for side in (texts, others))
    true = np.array([similarity(a, b) for a, b in zip(texts, others, strict=True)])
    off = estimate_similarity(one.signatures, other.signatures) - true
    assert true.min() < 0.75 and true.max() == 1.0 and len(np.unique(true)) > 5
    assert abs(off.mean()) < error / 2
    assert np.sqrt((off**2).mean()) < error


def test_unlike_texts_are_estimated_near_zero() -> None:
    prints = fingerprint_documents(prose(100, 400), NEAR)
    estimates = estimate_similarity(prints.signatures[:200], prints.signatures[200:])
    assert estimates.mean() < 0.01 and estimates.max() < 0.1


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.9])
def test_estimates_are_unbiased_within_the_stated_error(share: float) -> None:
    union, pairs = 6000, 400
    both = round(share * union)
    side = (union - both) // 2
    one, other = sets_of([(both, side, union - both - side)] * pairs, seed=1)
    estimates = estimate_similarity(one.signatures, other.signatures)
    p = share + (1 - share) / 15
    stated = np.sqrt(p * (1 - p) / Layout.of(NEAR).bins) * 15 / 14
    assert abs(estimates.mean() - share) < 4 * stated / np.sqrt(pairs)
    assert 0.8 * stated < estimates.std() < 1.1 * stated


@pytest.mark.parametrize("union", [20, 60, 200, 3000])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.8, 0.9])
def test_bands_find_pairs_as_the_s_curve_says_whatever_the_length(union: int, share: float) -> None:
    pairs = 600
    both = round(share * union)
    side = (union - both) // 2
    one, other = sets_of([(both, side, union - both - side)] * pairs, seed=2)
    found = agreement(one, other).mean()
    expected = collision_probability(both / union, 20, 6)
    if union >= 200:
        assert abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / pairs) + 0.02
    # Bands of short documents borrow from the same rows: their curve is a little flatter.
    assert abs(found - expected) < 0.12
    if share >= 0.8:
        assert found > 0.96


def test_the_s_curve() -> None:
    assert collision_probability(0.0, 20, 6) == 0.0 and collision_probability(1.0, 20, 6) == 1.0
    assert collision_probability(0.5, 1, 1) == 0.5
    assert collision_probability(0.8, 14, 8) == pytest.approx(0.9236, abs=1e-4)
    assert collision_probability(0.8, 20, 6) == pytest.approx(0.9977, abs=1e-4)


def test_short_documents_are_one_shingle_of_all_words() -> None:
    prints = fingerprint_documents(
        ["one two three", "One, two: THREE!", "one two", "three two one", "one two three 0"], NEAR
    )
    estimates = estimate_similarity(np.repeat(prints.signatures[:1], 5, axis=0), prints.signatures)
    assert estimates.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert (prints.bands[:, 0] == prints.bands[:, 1]).all()
    assert not (prints.bands[:, :1] == prints.bands[:, 2:]).any()


def test_documents_without_words_are_like_no_other() -> None:
    prints = fingerprint_documents(["!!!", "...", "word"], NEAR)
    assert not prints.bands[:, :2].any() and not prints.signatures[:2].any()
    assert prints.bands[:, 2].all() and prints.signatures[2].any()
    assert estimate_similarity(prints.signatures[:1], prints.signatures[1:2]).tolist() == [0.0]


def test_order_of_words_matters() -> None:
    text = prose(100, 1)[0]
    prints = fingerprint_documents([text, " ".join(sorted(text.split(" ")))], NEAR)
    assert estimate_similarity(prints.signatures[:1], prints.signatures[1:])[0] < 0.1


def test_prints_depend_on_their_own_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["", "one", *prose(100, 40), "日本語のテキスト", *prose(400, 5), "!"]
    whole = fingerprint_documents(texts, NEAR)
    for number, text in enumerate(texts):
        alone = fingerprint_documents([text], NEAR)
        assert np.array_equal(alone.signatures[0], whole.signatures[number])
        assert np.array_equal(alone.bands[:, 0], whole.bands[:, number])
    monkeypatch.setattr(module, "_WORDS", 37)
    monkeypatch.setattr(module, "_ROWS", 11)
    cut = fingerprint_documents(texts, NEAR)
    assert np.array_equal(cut.signatures, whole.signatures) and np.array_equal(cut.bands, whole.bands)


@pytest.mark.parametrize(("bands", "rows"), [(1, 1), (3, 5), (14, 8), (16, 7), (25, 13), (60, 20)])
def test_any_bands_and_rows_work(bands: int, rows: int) -> None:
    config = settings(near=True, bands=bands, rows=rows, similarity=0.9)
    text = prose(400, 1)[0]
    prints = fingerprint_documents([text, text + " more", edited(text, 200, 0)], config)
    layout = Layout.of(config)
    assert prints.bands.shape == (bands, 3) and prints.signatures.shape == (3, layout.columns)
    assert layout.bins >= 1024 and layout.bins % layout.rows == 0
    near, far = estimate_similarity(np.repeat(prints.signatures[:1], 2, axis=0), prints.signatures[1:])
    assert near > 0.98 and far < 0.2


def test_stored_values_stay_what_they_are() -> None:
    """Prints are kept on disk: another value here needs another `METHOD`."""
    prints = fingerprint_documents(["The quick brown fox jumps over the lazy dog – naïvely, 日本語."], NEAR)
    assert int(prints.hashes[0, 0]) == 7701056074680338727
    assert int(prints.bands[0, 0]) == 11409090175943746598
    assert int(prints.bands[-1, 0]) == 4673488365177630260
    assert int(prints.signatures.astype(np.uint64).sum()) == 6913073264


@pytest.mark.parametrize("similarity", [0.1, 0.3, 0.5, 0.65])
def test_bands_that_would_miss_most_are_refused_with_rows_that_would_not(similarity: float) -> None:
    with pytest.raises(ValidationError, match="find only") as caught:
        settings(near=True, similarity=similarity, rows=12)
    rows = int(caught.value.errors()[0]["msg"].split("set rows to ")[1].split(",")[0])
    assert collision_probability(similarity, 20, rows) > 0.5
    assert settings(near=True, similarity=similarity, rows=rows).rows == rows
    assert settings(near=False, similarity=similarity, rows=12).rows == 12


def test_the_documented_curve_is_the_real_one() -> None:
    page = (Path(__file__).parents[4] / "docs" / "deduplication.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    similarities = [float(cell) for row in rows if row[0] == "similarity" for cell in row[1:]]
    curves = [row for row in rows if " bands of " in row[0]]
    assert len(similarities) == 9 and len(curves) == 2
    for name, *cells in curves:
        bands, rows_per_band = (int(number) for number in re.findall(r"\d+", name))
        assert cells == [f"{collision_probability(value, bands, rows_per_band):.3f}" for value in similarities]
    assert curves[0][0].startswith(f"{NEAR.bands} bands of {NEAR.rows} rows")
