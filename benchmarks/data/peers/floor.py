"""What nobody can do without: read the lines, parse them, and write ids, which are known already.

python floor.py INPUT.jsonl TOKENIZER.json OUTPUT_FOLDER KNOWN.ids KNOWN.lengths
"""

import sys
from pathlib import Path

import numpy as np
import orjson

if __name__ == "__main__":
    source, _, output, ids_file, lengths_file = sys.argv[1:]
    ids = np.memmap(ids_file, dtype="<u2", mode="r")
    ends = np.cumsum(np.fromfile(lengths_file, dtype="<i8"))
    start = 0
    with Path(source).open("rb") as lines, (Path(output) / "tokens.bin").open("wb") as tokens:
        for number, line in enumerate(lines):
            if not orjson.loads(line)["text"]:
                raise SystemExit("an empty document")
            if number % 100 == 99 or number == len(ends) - 1:
                ids[start : ends[number]].tofile(tokens)
                start = ends[number]
    np.save(Path(output) / "ends.npy", ends)
