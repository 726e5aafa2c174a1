"""128 MB of real text, Debian's documentation: the same bytes as a plain writer's. Needs Debian's package lists."""

import shutil
import subprocess
from pathlib import Path

import corpus
import pytest
from pyarrow import parquet
from tokenized import a_dataset, plain, shard_bytes

from moekit.data import python_docs
from moekit.data.making.here import tokenize_here


@pytest.mark.long
def test_shards_are_those_of_a_plain_writer(tmp_path: Path):
    listed = ["apt-cache", "show", "perl-doc"]
    if not shutil.which("apt-get") or subprocess.run(listed, capture_output=True).returncode:
        pytest.skip("`apt-get update` has not been run here, or this is no Debian")
    files = corpus.build(tmp_path / "corpus")
    texts = [parquet.read_table(file, columns=["text"])["text"].to_pylist() for file in files]
    assert sum(len(text.encode()) for some in texts for text in some) > 100e6
    tokenizer = tmp_path / "root" / "tokenizers" / "tiny"
    shutil.copytree(python_docs.TOKENIZER, tokenizer)
    fields = {"end_of_document": python_docs.END_OF_DOCUMENT, "tasks": 3, "max_document_mib": 8}
    done = tokenize_here(a_dataset(tmp_path / "corpus", **fields), tmp_path / "root", workers=2)
    for task in range(3):
        some = [text for file in texts[task::3] for text in file]
        assert shard_bytes(done.folder, "some", task) == plain(tmp_path / "root", some, python_docs.END_OF_DOCUMENT)
