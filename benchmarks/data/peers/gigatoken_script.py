"""gigatoken with its own reader of JSON Lines, and numpy.

python gigatoken_script.py INPUT.jsonl TOKENIZER.json OUTPUT_FOLDER
"""

import sys
from pathlib import Path

import awkward as ak
import gigatoken
import numpy as np

if __name__ == "__main__":
    source, vocabulary, output = sys.argv[1:]
    tokenizer = gigatoken.Tokenizer(vocabulary)
    end = next(number for number, token in tokenizer.vocab.items() if token == b"<|endoftext|>")
    documents = tokenizer.encode_files(gigatoken.JsonlFileSource([source], field="text"))
    lengths = ak.to_numpy(ak.num(documents))
    ids = ak.to_numpy(ak.flatten(documents)).astype(np.uint16)
    ends = np.cumsum(lengths + 1)
    tokens = np.full(len(ids) + len(lengths), end, dtype=np.uint16)
    inside = np.ones(len(tokens), dtype=bool)
    inside[ends - 1] = False
    tokens[inside] = ids
    tokens.tofile(Path(output) / "tokens.bin")
    np.save(Path(output) / "ends.npy", ends)
