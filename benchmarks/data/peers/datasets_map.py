"""`datasets.map` on two processes, then one file of ids, as in nanoGPT's data preparation.

python datasets_map.py INPUT.jsonl TOKENIZER.json OUTPUT_FOLDER tiktoken|tokenizers
"""

import os
import sys
from pathlib import Path

output = sys.argv[3]
os.environ["HF_HOME"] = f"{output}/huggingface"  # nothing is cached from an earlier time
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

import numpy as np  # noqa: E402
from datasets import load_dataset  # noqa: E402


def with_tiktoken(vocabulary):
    from vocabulary import END, tiktoken_encoding

    encoding = tiktoken_encoding(vocabulary)
    end = encoding.encode_single_token(END)

    def process(example):
        ids = encoding.encode_ordinary(example["text"])
        ids.append(end)
        return {"ids": ids, "len": len(ids)}

    return {"function": process}


def with_tokenizers(vocabulary):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(vocabulary)
    end = tokenizer.token_to_id("<|endoftext|>")

    def process(examples):
        ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(examples["text"])]
        return {"ids": ids, "len": [len(document) for document in ids]}

    return {"function": process, "batched": True}


if __name__ == "__main__":
    source, vocabulary, output, library = sys.argv[1:]
    how = {"tiktoken": with_tiktoken, "tokenizers": with_tokenizers}[library](vocabulary)
    texts = load_dataset("json", data_files=source, split="train")
    encoded = texts.map(**how, remove_columns=texts.column_names, num_proc=2)
    total = np.sum(encoded["len"], dtype=np.uint64)
    tokens = np.memmap(Path(output) / "tokens.bin", dtype=np.uint16, mode="w+", shape=(int(total),))
    batches, start = min(1024, len(encoded)), 0
    for number in range(batches):
        batch = encoded.shard(num_shards=batches, index=number, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"])
        tokens[start : start + len(ids)] = ids
        start += len(ids)
    tokens.flush()
    np.save(Path(output) / "ends.npy", np.cumsum(np.array(encoded["len"])))
