"""tiktoken on a pool of two processes, and numpy.

python tiktoken_script.py INPUT.jsonl TOKENIZER.json OUTPUT_FOLDER
"""

import sys
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import orjson
from vocabulary import END, tiktoken_encoding

encoding = None


def start(vocabulary: str) -> None:
    global encoding
    encoding = tiktoken_encoding(vocabulary)


def encode(line: bytes) -> np.ndarray:
    ids = encoding.encode_ordinary(orjson.loads(line)["text"])
    ids.append(encoding.encode_single_token(END))
    return np.array(ids, dtype=np.uint16)


if __name__ == "__main__":
    source, vocabulary, output = sys.argv[1:]
    lengths = []
    with (
        Pool(2, start, (vocabulary,)) as pool,
        Path(source).open("rb") as lines,
        (Path(output) / "tokens.bin").open("wb") as tokens,
    ):
        for ids in pool.imap(encode, lines, chunksize=32):
            ids.tofile(tokens)
            lengths.append(len(ids))
    np.save(Path(output) / "ends.npy", np.cumsum(lengths))
