"""A sample of documents read through Megatron's own IndexedDataset, mapped and not, and compared with our own reading.

Run as a process of its own, since it imports torch: `python -m moekit.data.checking.megatron_reads`, with a JSON list
of prefixes on standard input and one of what is wrong, each `[prefix, sentence]`, on standard output.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moekit.data.checking.folder import Finding, Report
from moekit.data.shards import open_shard
from moekit.problems import error

SAMPLE_DOCUMENTS = 100
"""Of each shard, its first and last among them."""


def with_megatron(report: Report) -> Report:
    """A report with what Megatron reads differently in the shards that are otherwise whole.

    Raises:
        MoekitError: megatron-core is not installed, or ends without an answer.
    """
    if importlib.util.find_spec("megatron") is None:
        raise error("`--megatron` needs megatron-core, and it is not installed", "run `pip install 'moekit[local]'`")
    prefixes = [str(shard.prefix) for shard in report.shards if not shard.findings and shard.pair]
    command = [sys.executable, "-m", "moekit.data.checking.megatron_reads"]
    done = subprocess.run(command, input=json.dumps(prefixes), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise error(
            f"Megatron could not be asked: {last[0]}", "`python -m moekit.data.checking.megatron_reads` says more"
        )
    remedy = "this is no known damage; please report it, with the shard's first kilobytes"
    wrong = {prefix: Finding("damaged", said, remedy) for prefix, said in json.loads(done.stdout.splitlines()[-1])}
    shards = tuple(
        replace(shard, findings=(wrong[str(shard.prefix)],)) if str(shard.prefix) in wrong else shard
        for shard in report.shards
    )
    note = f"Megatron read up to {SAMPLE_DOCUMENTS} documents of each of {len(prefixes):,} whole shards, mapped and not"
    return replace(report, shards=shards, notes=(*report.notes, note))


def differences(prefixes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What Megatron reads differently, at most one sentence a shard."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for prefix in prefixes:
        shard = open_shard(Path(prefix))
        ends, tokens = np.cumsum(shard.lengths), shard.read()
        some = random.Random(0).sample(range(shard.documents), min(SAMPLE_DOCUMENTS, shard.documents))
        for mmap in (True, False):
            how = "mapped" if mmap else "with `--no-mmap-bin-files`"
            dataset = IndexedDataset(prefix, multimodal=False, mmap=mmap)
            if len(dataset) != shard.documents:
                yield prefix, f"Megatron finds {len(dataset):,} documents, and there are {shard.documents:,}"
                break
            for document in sorted({0, *some, shard.documents - 1}):
                ours = tokens[ends[document] - shard.lengths[document] : ends[document]]
                if not np.array_equal(dataset[document], ours):
                    yield prefix, f"Megatron, {how}, reads other tokens in document {document:,}"
                    break
            else:
                continue
            break


if __name__ == "__main__":
    print(json.dumps([*differences(json.load(sys.stdin))]))
