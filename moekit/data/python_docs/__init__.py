"""The quickstart's text: 3 MB of Python's documentation, shipped with moekit, and a 4,096-token tokenizer for it.

`python_docs.jsonl.gz` was made by `build.py`, `tokenizer/` by `train_tokenizer.py`. The text is under the licence in
`LICENSE`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
TEXT = FOLDER / "python_docs.jsonl.gz"
"""One document a line, `{"id": "library/os.rst", "text": "..."}`. A split of 95,5,0 holds out the last twentieth."""
TOKENIZER = FOLDER / "tokenizer"
"""`tokenizer.json` and `tokenizer_config.json`, as `transformers` and Megatron's HuggingFaceTokenizer read them."""
END_OF_DOCUMENT = "<|endoftext|>"
"""The token after each document; its id is 0."""
VOCABULARY = 4096


def documents() -> Iterator[tuple[str, str]]:
    """Each document's id and text, in the order they are tokenized and split."""
    with gzip.open(TEXT, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            document = json.loads(line)
            yield document["id"], document["text"]
