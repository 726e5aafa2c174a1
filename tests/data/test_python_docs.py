"""The shipped text and tokenizer are what their scripts make."""

import gzip
import importlib.resources
import json
from pathlib import Path

from tokenizers import Tokenizer

from moekit.data import python_docs
from moekit.data.python_docs import build, train_tokenizer


def test_the_package_holds_text_licence_and_tokenizer():
    package = importlib.resources.files("moekit.data.python_docs")

    assert package.joinpath("python_docs.jsonl.gz").is_file()
    assert len(package.joinpath("python_docs.jsonl.gz").read_bytes()) < 1_000_000
    assert "PSF LICENSE AGREEMENT FOR PYTHON 3.11.2" in package.joinpath("LICENSE").read_text("utf-8")
    assert "Copyright © 2001-2023 Python Software Foundation" in package.joinpath("NOTICE").read_text("utf-8")
    assert package.joinpath("tokenizer", "tokenizer_config.json").is_file()


def test_build_makes_the_shipped_text_again(tmp_path: Path):
    for name, text in python_docs.documents():
        file = tmp_path / "sources" / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")

    documents = build.select(build.read_sources(tmp_path / "sources"))
    build.write(documents, tmp_path / "a.gz")
    build.write(documents, tmp_path / "b.gz")

    # Compressed bytes differ between versions of zlib, so these are compared with themselves only.
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == gzip.decompress(python_docs.TEXT.read_bytes())


def test_build_takes_whole_pages_in_a_shuffled_order_and_leaves_some_out():
    page = "A page about one thing.\n" * 100
    names = [f"library/m{number:04}.rst" for number in range(2000)]
    sources = [(name, page) for name in names]
    sources += [("license.rst", page), ("library/short.rst", "See below.\n"), ("library/long.rst", page * 100)]

    chosen = build.select(sources)

    assert chosen == build.select(reversed(sources))
    assert len(chosen) == 3_000_000 // len(page)
    assert [name for name, _ in chosen] != sorted(name for name, _ in chosen)
    assert {name for name, _ in chosen} <= set(names)


def test_the_shipped_text_is_3_mb_and_no_page_is_most_of_what_is_held_out():
    documents = list(python_docs.documents())
    sizes = [len(text.encode()) for _, text in documents]
    held_out = sizes[round(0.95 * len(sizes)) :]

    assert 3_000_000 <= sum(sizes) < 3_040_000
    assert len({name for name, _ in documents}) == len(documents)
    assert 0.04 < sum(held_out) / sum(sizes) < 0.07
    assert max(held_out) < sum(held_out) / 3


def test_training_the_tokenizer_again_gives_the_shipped_bytes(tmp_path: Path):
    train_tokenizer.train(tmp_path)

    shipped = sorted(file.name for file in python_docs.TOKENIZER.iterdir())
    assert shipped == sorted(file.name for file in tmp_path.iterdir())
    for name in shipped:
        assert (tmp_path / name).read_bytes() == (python_docs.TOKENIZER / name).read_bytes(), name


def test_the_tokenizer_has_4096_tokens_all_bytes_and_the_end_of_document_first():
    tokenizer = Tokenizer.from_file(str(python_docs.TOKENIZER / "tokenizer.json"))
    text = "tabs\tand\r\nnewlines, 混合专家 🧑‍🔬 \x00 \U0010ffff"

    assert tokenizer.get_vocab_size() == python_docs.VOCABULARY
    assert tokenizer.token_to_id(python_docs.END_OF_DOCUMENT) == 0
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((python_docs.TOKENIZER / "tokenizer_config.json").read_text("utf-8"))
    assert config["eos_token"] == python_docs.END_OF_DOCUMENT
