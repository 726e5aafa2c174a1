"""Megatron's own reader, tokenizer and split on the quickstart's data."""

import pathlib
from typing import Any

import numpy as np
import pytest

from moekit.data import python_docs
from moekit.data.quickstart import Prepared, prepare_python_docs
from moekit.data.shards import held_out_unigram_entropy_nats, split_documents

pytestmark = pytest.mark.megatron

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.core.tokenizers import MegatronTokenizer  # noqa: E402


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def prepared(root: pathlib.Path) -> Prepared:
    return prepare_python_docs(root, lambda text: None)


@pytest.fixture(scope="module")
def tokenizer(root: pathlib.Path, prepared: Prepared) -> Any:
    """As `--tokenizer-type HuggingFaceTokenizer --tokenizer-model <shared_root>/tokenizers/python-docs` makes it."""
    folder = str(root / "tokenizers/python-docs")
    return MegatronTokenizer.from_pretrained(tokenizer_path=folder, metadata_path={"library": "huggingface"})


def test_each_document_reads_back_as_its_text(prepared: Prepared, tokenizer: Any):
    dataset = IndexedDataset(str(prepared.prefix), multimodal=False, mmap=True)
    documents = list(python_docs.documents())

    assert len(dataset) == len(dataset.document_indices) - 1 == prepared.documents == len(documents)
    assert int(dataset.sequence_lengths.sum()) == prepared.tokens
    assert dataset.index.dtype == np.uint16
    assert (tokenizer.vocab_size, tokenizer.eod) == (python_docs.VOCABULARY, 0)
    for tokens, (name, text) in zip(dataset, documents, strict=True):
        assert tokens[-1] == tokenizer.eod, name
        assert tokenizer.detokenize(tokens[:-1].tolist()) == text, name


@pytest.mark.parametrize("split", ["95,5,0", "969,30,5", "1,1,1", "100", "0.9, 0.07, 0.03", "7,2,5"])
def test_the_split_is_megatrons(prepared: Prepared, tokenizer: Any, split: str):
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        blend=([str(prepared.prefix)], None),
        split=split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [8, 8, 8], lambda: True, config).build()

    documents = [[] if dataset is None else dataset.indices.tolist() for dataset in built]
    assert [list(part) for part in split_documents(prepared.documents, split)] == documents


def test_the_unigram_entropy_is_of_the_tokens_megatron_validates_on(prepared: Prepared):
    dataset = IndexedDataset(str(prepared.prefix), multimodal=False, mmap=True)
    held_out = np.concatenate([dataset[number] for number in range(226, 238)])
    shares = np.bincount(held_out)[np.unique(held_out)] / len(held_out)

    assert held_out_unigram_entropy_nats(prepared.prefix, "95,5,0") == pytest.approx(-sum(shares * np.log(shares)))
