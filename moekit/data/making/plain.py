"""One file of JSON lines to a pair of token files, in this process: how the quickstart's data are made."""

from __future__ import annotations

from pathlib import Path

from moekit.data.plan import InputFile, Plan
from moekit.data.sources import missing_package


def tokenize(source: Path, tokenizer_file: Path, end_of_document: str, folder: Path, name: str) -> Path:
    """Write `<folder>/<name>_00000_tokens.bin` and `.idx`, and check both; what was read goes to `tokenize.log` there.

    Args:
        source: JSON lines with `text`, plain or packed.
        tokenizer_file: a `tokenizer.json`.
        end_of_document: the token put after each document. The same letters within a text are tokenized as text.
        folder: an existing folder.
        name: how the files' names begin.

    Returns:
        The prefix: the path of both files without `.bin` and `.idx`.

    Raises:
        MoekitError: datatrove or what it needs is not installed, or the source cannot be read.
        OSError: a file cannot be written.
    """
    try:
        import orjson  # noqa: F401  (asked for only when the text is read)

        from moekit.data.making.encoding import load_encoder, logged_to, make_part, one_thread
    except ImportError as missing:
        raise missing_package(str(missing.name).split(".")[0]) from None

    prefix, stat = folder / f"{name}_00000_tokens", source.stat()
    file = InputFile(str(source), stat.st_size, str(stat.st_mtime_ns))
    with logged_to(folder / "tokenize.log"), one_thread():
        encoder = load_encoder(tokenizer_file, end_of_document)
        plan = Plan(
            name=name,
            format="jsonl",
            text_key="text",
            id_key="id",
            files=(file,),
            tokenizer=name,
            tokenizer_sha256="",
            vocab_size=encoder.tokenizer.get_vocab_size(),
            end_of_document=end_of_document,
            end_of_document_id=encoder.tokenizer.token_to_id(end_of_document),
            keep_fraction=None,
            tasks=1,
            max_document_mib=4,
            limit=None,
            versions={},
        )
        make_part(plan, file, encoder, prefix, lambda step: None)
    return prefix
