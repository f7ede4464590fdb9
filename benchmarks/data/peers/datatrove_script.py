"""datatrove's tokenizer pipeline with two workers, each with a file of its own.

python datatrove_script.py INPUT_FOLDER TOKENIZER.json OUTPUT_FOLDER
"""

import os
import sys

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    source, vocabulary, output = sys.argv[1:]
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(source),
            DocumentTokenizer(f"{output}/tokens", vocabulary, eos_token="<|endoftext|>", shuffle_documents=False),
        ],
        tasks=2,
        workers=2,
        logging_dir=f"{output}/logs",
    ).run()
