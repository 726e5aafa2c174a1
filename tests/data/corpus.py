"""Real text of many kinds for tests and benchmarks: the documentation packages of Debian, about 128 MB.

    python tests/data/corpus.py FOLDER

Nothing is installed; `apt-get download` fetches (it needs the package lists, and no root), `dpkg-deb` unpacks. All are
free software (GPL, PSF, PostgreSQL, Artistic). Standard library, but for the parquet files, which pyarrow writes.
"""

from __future__ import annotations

import gzip
import hashlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = (
    ("python3.13-doc", "python3.12-doc", "python3.11-doc"),
    ("linux-doc-6.12", "linux-doc-6.1"),
    ("anarchism",),
    ("perl-doc",),
    ("debian-handbook",),
    ("postgresql-doc-17", "postgresql-doc-16", "postgresql-doc-15"),
    ("harden-doc",),
    ("debian-policy",),
)
"""Of each line the first that this Debian has."""
FILES = 8
LEAST_LETTERS = 200
BLOCKS = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "pre", "dt", "dd", "br", "table"}


class _Text(HTMLParser):
    """What a page says, a line for each block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.words: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in ("script", "style", "head")
        if tag in BLOCKS:
            self.words.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "head") and self.hidden:
            self.hidden -= 1

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.words.append(data)


def fetch(folder: Path) -> None:
    """Download the packages and unpack them below `folder`."""
    for names in PACKAGES:
        for name in names:
            done = subprocess.run(["apt-get", "download", "-q", name], cwd=folder, capture_output=True, text=True)
            if done.returncode == 0:
                break
        else:
            raise RuntimeError(f"apt-get download {names[0]}: {done.stderr} (`apt-get update` first?)")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "unpacked"], check=True)
        package.unlink()


def documents(unpacked: Path) -> Iterator[tuple[str, str]]:
    """Each page's path and text, in the order of the paths; of equal texts the first."""
    seen = set()
    for path in sorted(unpacked.rglob("*")):
        name = path.name.removesuffix(".gz")
        if path.is_symlink() or not path.is_file() or re.search("/linux-doc-[0-9.]*/html/", str(path)):
            continue
        if name.endswith((".html", ".rst", ".txt", ".pod", ".yaml")):
            text = _read(path)
            if name.endswith(".html"):
                page = _Text()
                page.feed(text)
                text = re.sub(r"\n\s*\n\s*\n", "\n\n", "".join(page.words)).strip()
            digest = hashlib.sha1(text.encode()).digest()
            if len(text) >= LEAST_LETTERS and digest not in seen:
                seen.add(digest)
                yield str(path.relative_to(unpacked)), text


def _read(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def build(folder: Path) -> list[Path]:
    """Write the corpus as parquet files with some of FineWeb-Edu's columns, where it is not there; the files."""
    import pyarrow
    from pyarrow import parquet

    paths = [folder / f"train-{number:05d}-of-{FILES:05d}.parquet" for number in range(FILES)]
    if not all(path.is_file() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            fetch(Path(work))
            pages = list(documents(Path(work, "unpacked")))
        random.Random(0).shuffle(pages)
        for number, path in enumerate(paths):
            some = pages[number::FILES]
            columns = {
                "text": [text for _, text in some],
                "id": [f"<{name}>" for name, _ in some],
                "url": [f"file:///{name}" for name, _ in some],
                "token_count": [len(text) // 4 for _, text in some],
            }
            parquet.write_table(pyarrow.table(columns), path, compression="zstd", row_group_size=1000)
    return paths


if __name__ == "__main__":
    print(*build(Path(sys.argv[1])), sep="\n")
