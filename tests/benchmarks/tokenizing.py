"""Tokens per CPU second of `moekit data tokenize`, beside the bare calls of the tokenizer it uses, in one run.

    python tests/benchmarks/tokenize.py [--runs 3] [--corpus DIR] [--files 2] [--tokenizer FILE --end TOKEN]

Ours is a whole process with one worker: its start, the tokenizer's load, reading parquet, writing and checking shards.
Beside it stand `encode_batch` and `encode_batch_fast` alone, on texts in memory, in batches of the same size, on one
thread; their start and load are not counted. Each run measures all three, one after the other, since the time that a
shared machine takes for the same work varies; exits with 1 where the median of ours over the faster is below 0.95.

The corpus is Debian's documentation (tests/data/corpus.py), kept in DIR if it is named. The tokenizer is the one that
comes with moekit, of 4,096 tokens; `--tokenizer` takes another `tokenizer.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import corpus

from moekit.data import python_docs

LEAST_RATIO = 0.95
BARE = """
import json, sys, time
from pyarrow import parquet
from tokenizers import Tokenizer
from moekit.data.making.encoding import BATCH_BYTES
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
texts = [text for path in sys.argv[2:] for text in parquet.read_table(path, columns=["text"])["text"].to_pylist()]
batches, size = [[]], 0
for text in texts:
    if batches[-1] and size + len(text.encode()) > BATCH_BYTES:
        batches.append([])
        size = 0
    batches[-1].append(text)
    size += len(text.encode())
found = {}
for name in ("encode_batch", "encode_batch_fast"):
    encode, tokens, start = getattr(tokenizer, name), 0, time.process_time()
    for batch in batches:
        tokens += sum(len(one.ids) + 1 for one in encode(batch, add_special_tokens=False))
    found[name] = tokens / (time.process_time() - start)
print(json.dumps({"tokens": tokens, **found}))
"""


def bare(tokenizer: Path, files: list[Path]) -> dict[str, float]:
    """Tokens, and tokens per CPU second of the bare calls."""
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BARE, tokenizer, *files]
    return json.loads(subprocess.run(command, env=os.environ | one_thread, capture_output=True, check=True).stdout)


def ours(root: Path, description: Path) -> tuple[int, float]:
    """Tokens, and tokens per CPU second of the whole command."""
    shutil.rmtree(root / "data", ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "moekit", "data", "tokenize", description, "--shared-root", root]
    done = subprocess.run([*command, "--workers", "1", "--json"], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"moekit data tokenize failed:\n{done.stderr}")
    tokens = json.loads(done.stdout)["tokens"]
    return tokens, tokens / (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main() -> None:
    """Measure, print a line for each run, and fail where the target is missed."""
    parser = argparse.ArgumentParser(description="tokens per CPU second beside the tokenizer's bare calls")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--corpus", type=Path, help="where the corpus is kept; without it, it is made for this run")
    parser.add_argument("--files", type=int, default=4, help=f"how many of its {corpus.FILES} files are tokenized")
    parser.add_argument("--tokenizer", type=Path, default=python_docs.TOKENIZER / "tokenizer.json")
    parser.add_argument("--end", default=python_docs.END_OF_DOCUMENT, help="the tokenizer's end token")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        files = corpus.build(given.corpus or root / "corpus")[: given.files]
        (root / "tokenizers" / "bench").mkdir(parents=True)
        shutil.copy(given.tokenizer, root / "tokenizers" / "bench" / "tokenizer.json")
        description = root / "bench.yaml"
        said = {"name": "bench", "source": [*map(str, files)], "tokenizer": "bench", "end_of_document": given.end}
        description.write_text(json.dumps(said | {"max_document_mib": 10, "memory_gib": 2}))
        print(
            f"{'run':>3}  {'encode_batch':>12}  {'encode_batch_fast':>17}  {'ours':>9}  ratio   (tokens per CPU second)"
        )
        ratios = []
        for run in range(given.runs):
            other = bare(given.tokenizer, files)
            tokens, speed = ours(root, description)
            assert tokens == other["tokens"], (tokens, other)
            slow, fast = other["encode_batch"], other["encode_batch_fast"]
            ratios.append(speed / max(slow, fast))
            print(f"{run + 1:3}  {slow:12,.0f}  {fast:17,.0f}  {speed:9,.0f}  {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {median(ratios):.3f} on {tokens:,} tokens; at least {LEAST_RATIO} is asked")
    sys.exit(median(ratios) < LEAST_RATIO)


if __name__ == "__main__":
    main()
