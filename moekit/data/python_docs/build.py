"""Make `python_docs.jsonl.gz` from the .rst sources of Python's documentation.

The sources are `Doc/` of a CPython release, or, with `.txt` after each name, Debian's package of the same release:

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb unpacked
    python -m moekit.data.python_docs.build unpacked/usr/share/doc/python3.11/html/_sources python_docs.jsonl.gz
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

TEXT_BYTES = 3_000_000
"""Documents are taken whole until they hold this much."""
SMALLEST_BYTES, LARGEST_BYTES = 1_500, 40_000
"""Below lie lists of links. Above, a single page would be most of the held-out twentieth."""
LEFT_OUT = {
    "license.rst",  # the licences of other people's code
    "copyright.rst",
    "contents.rst",  # a table of contents
    "library/hashlib.rst",  # a part of it is not under Python's licence but CC0
}


def select(sources: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The (id, text) pairs to ship, in an order that only depends on the ids: by their SHA-256, as good as shuffled.

    The order matters, because Megatron holds out the last documents for validation.
    """
    chosen: list[tuple[str, str]] = []
    total_bytes = 0
    for name, text in sorted(sources, key=lambda source: hashlib.sha256(source[0].encode()).digest()):
        size_bytes = len(text.encode())
        if total_bytes >= TEXT_BYTES:
            break
        if name not in LEFT_OUT and SMALLEST_BYTES <= size_bytes <= LARGEST_BYTES:
            chosen.append((name, text))
            total_bytes += size_bytes
    return chosen


def read_sources(folder: Path) -> list[tuple[str, str]]:
    """Every `.rst` or `.rst.txt` file under `folder` as (path below it without `.txt`, text)."""
    files = [path for path in folder.rglob("*.rst*") if path.name.endswith((".rst", ".rst.txt"))]
    return [(path.relative_to(folder).as_posix().removesuffix(".txt"), path.read_text("utf-8")) for path in files]


def write(documents: list[tuple[str, str]], target: Path) -> None:
    """Write compressed JSON lines without a name or time in them, so the same documents give the same bytes."""
    lines = [json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n" for name, text in documents]
    target.write_bytes(gzip.compress("".join(lines).encode(), compresslevel=9, mtime=0))


def main() -> None:
    """`build.py SOURCES TARGET`."""
    sources, target = map(Path, sys.argv[1:])
    documents = select(read_sources(sources))
    write(documents, target)
    print(f"{len(documents)} documents, {sum(len(text.encode()) for _, text in documents):,} bytes of text")


if __name__ == "__main__":
    main()
