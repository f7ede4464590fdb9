"""The corpus that data benchmarks share: Python source of this machine as JSON Lines, with a vocabulary trained on it.

Everything is made once and kept in a folder; the same packages give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

END = "<|endoftext|>"
_WORD = re.compile(r"[A-Za-z]{4,}")
# A word is respelled in copies of the corpus when it occurs no more often than this.
_RARE = 20
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"


@dataclass(frozen=True)
class Corpus:
    """Files of one corpus."""

    jsonl: Path
    """One document a line: `id`, `text`, `meta`."""
    tokenizer: Path
    """A `tokenizer.json`: byte-level BPE of 32,768 tokens with the pattern of GPT-2."""
    sha256: str
    """Of `jsonl`."""
    text_bytes: int
    documents: int


def small_corpus(folder: Path, size: int = 60_000_000) -> Corpus:
    """About `size` bytes of text: sources of the standard library and of the installed packages, shuffled.

    Texts that spell out a special token are left out, since libraries differ in what they make of those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jsonl = folder / f"python-{size}.jsonl"
    if not jsonl.exists():
        _write_lines(jsonl, _taken(_python_texts(), size))
    tokenizer = folder / f"python-{size}.tokenizer" / "tokenizer.json"
    if not tokenizer.exists():
        _train(_texts_of(jsonl, size // 3), tokenizer)
    return _described(jsonl, tokenizer)


def large_corpus(folder: Path, small: Corpus, size: int) -> Corpus:
    """About `size` bytes: the small corpus over and over, each time in another order and with other rare words.

    A library that remembers words would find all of them in a mere copy. In real text the number of distinct words V
    grows with the size n as V = k * n^b (Heaps' law). So in each copy as many distinct words are given a new spelling
    (of the same length and make: vowels become vowels) as it takes to go on growing with the b of the small corpus.
    Common words stay: those new to a large corpus are rare ones.
    """
    jsonl = folder / f"{small.jsonl.stem}-{size}.jsonl"
    if not jsonl.exists():
        _write_lines(jsonl, _taken(_copies(list(_texts_of(small.jsonl)), size / small.text_bytes), size))
    return _described(jsonl, small.tokenizer)


def tokens_hash(streams: Iterable[np.ndarray]) -> tuple[int, str]:
    """Number and SHA-256 of ids as a stream of little-endian uint16."""
    digest, count = hashlib.sha256(), 0
    for ids in streams:
        count += len(ids)
        for start in range(0, len(ids), 2**22):
            digest.update(ids[start : start + 2**22].astype("<u2").tobytes())
    return count, digest.hexdigest()


def reference_ids(corpus: Corpus) -> tuple[Path, Path]:
    """What `tokenizers` makes of the small corpus: ids with the end of text after each document, and documents'
    lengths, as uint16 and int64 without header. Made once."""
    ids_file, lengths_file = corpus.jsonl.with_suffix(".ids"), corpus.jsonl.with_suffix(".lengths")
    if not (ids_file.exists() and lengths_file.exists()):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(corpus.tokenizer))
        end = tokenizer.token_to_id(END)
        lengths = []
        with ids_file.with_suffix(".new").open("wb") as file:
            for texts in _batches(_texts_of(corpus.jsonl), 64):
                for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                    file.write(np.array([*encoding.ids, end], dtype="<u2").tobytes())
                    lengths.append(len(encoding.ids) + 1)
        np.array(lengths, dtype="<i8").tofile(lengths_file)
        ids_file.with_suffix(".new").replace(ids_file)
    return ids_file, lengths_file


def split_lines(corpus: Corpus, parts: int) -> Path:
    """A folder with the corpus cut into so many files of about equal size, for programs that take a file per worker."""
    folder = corpus.jsonl.with_suffix(f".{parts}-parts")
    if not folder.exists():
        making = folder.with_suffix(".new")
        making.mkdir(exist_ok=True)
        size = corpus.jsonl.stat().st_size
        with corpus.jsonl.open("rb") as source:
            for number in range(parts):
                with (making / f"{number:05d}.jsonl").open("wb") as part:
                    while source.tell() < size * (number + 1) // parts:
                        part.write(source.readline())
        making.rename(folder)
    return folder


def _python_texts() -> Iterator[str]:
    paths: list[Path] = []
    seen: set[bytes] = set()
    for root in dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")):
        found = (path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts)
        paths += sorted(found, key=lambda path: path.relative_to(root).as_posix())
    random.Random(0).shuffle(paths)
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) >= 100 and END not in text and digest not in seen:
            seen.add(digest)
            yield text


def _copies(texts: list[str], times: float) -> Iterator[str]:
    """The texts again and again with new rare words: see `large_corpus`."""
    yield from texts
    counts: Counter[str] = Counter()
    half = 0
    for number, text in enumerate(texts):
        counts.update(_WORD.findall(text))
        if number == len(texts) // 2:
            half = len(counts)
    rare = {word for word, count in counts.items() if count <= _RARE}
    growth = math.log2(len(counts) / half)
    share = min(1.0, (times**growth - 1) / (times - 1) * len(counts) / len(rare)) if times > 1 else 0.0
    pieces = [_cut_at(text, rare) for text in texts]
    for copy in range(1, math.ceil(times) + 1):
        order = list(range(len(texts)))
        random.Random(copy).shuffle(order)
        spelling = _spelling(copy, share)
        for number in order:
            spelled = pieces[number].copy()
            spelled[1::2] = map(spelling, spelled[1::2])
            yield "".join(spelled)


def _cut_at(text: str, words: set[str]) -> list[str]:
    """The text in pieces, of which every other one is one of the words."""
    pieces, start = [], 0
    for match in _WORD.finditer(text):
        if match[0] in words:
            pieces += [text[start : match.start()], match[0]]
            start = match.end()
    return [*pieces, text[start:]]


class _spelling:
    """How one copy of the corpus spells rare words: some another way, each always the same way."""

    def __init__(self, copy: int, share: float) -> None:
        self._key, self._bound, self._known = copy.to_bytes(4, "little"), share * 2**32, dict[str, str]()

    def __call__(self, word: str) -> str:
        spelled = self._known.get(word)
        if spelled is None:
            digest = hashlib.blake2b(word.encode(), key=self._key, digest_size=32).digest()
            changes = int.from_bytes(digest[:4], "little") < self._bound
            spelled = "".join(map(_another, word, digest[4:] * len(word))) if changes else word
            self._known[word] = spelled
        return spelled


def _another(letter: str, number: int) -> str:
    same = _VOWELS if letter.lower() in _VOWELS else _CONSONANTS
    changed = same[number % len(same)]
    return changed.upper() if letter.isupper() else changed


def _taken(texts: Iterable[str], size: int) -> Iterator[str]:
    """Texts from the front until they have `size` bytes."""
    for text in texts:
        yield text
        size -= len(text.encode())
        if size <= 0:
            return
    raise SystemExit(f"there are not enough Python files here: {size:,} bytes are missing")


def _write_lines(jsonl: Path, texts: Iterable[str]) -> None:
    making = jsonl.with_suffix(".new")
    with making.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": number, "text": text, "meta": {"language": "python"}}) + "\n")
    making.rename(jsonl)


def _texts_of(jsonl: Path, size: int | None = None) -> Iterator[str]:
    with jsonl.open(encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"]
            yield text
            if size is not None:
                size -= len(text)
                if size <= 0:
                    return


def _batches(texts: Iterable[str], count: int) -> Iterator[Sequence[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == count:
            yield batch
            batch = []
    yield batch


def _train(texts: Iterator[str], path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32768,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    path.with_name("tokenizer_config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(path))


def _described(jsonl: Path, tokenizer: Path) -> Corpus:
    """Facts about the corpus, counted once."""
    facts_file = jsonl.with_suffix(".facts.json")
    if not facts_file.exists():
        size = documents = 0
        digest = hashlib.sha256()
        with jsonl.open("rb") as file:
            for line in file:
                digest.update(line)
                size += len(json.loads(line)["text"].encode())
                documents += 1
        facts = {"sha256": digest.hexdigest(), "text_bytes": size, "documents": documents}
        facts_file.write_text(json.dumps(facts))
    return Corpus(jsonl, tokenizer, **json.loads(facts_file.read_text()))
