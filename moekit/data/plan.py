"""What one tokenization is, put down before it begins: `plan.json` in the data set's folder, and where its files lie.

A plan is never changed. A rerun that would make the same plan finishes what is missing; any other is refused with what
differs, since shards of two plans may not meet in one folder.

    <shared_root>/data/<name>/          (<name>-sample with `--limit`)
        plan.json
        <name>_00000_tokens.bin, .idx   one shard a task
        shards/00000.json               the record of a whole shard, written last
        logs/00000.log                  what datatrove says
        .parts/00000/                   the pieces of a shard that is being made
        .lock                           held while somebody tokenizes here
        manifest.json, data-args.txt    what training reads (manifest.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class InputFile:
    """One file of text."""

    path: str
    """Absolute, or `hf://datasets/OWNER/NAME/PATH`."""
    size_bytes: int
    version: str | None
    """What tells two contents of the same size apart: of a local file the time it was written, in nanoseconds; of a
    file on the Hub its blob's id."""


@dataclass(frozen=True)
class Plan:
    """Everything that the tokens depend on."""

    name: str
    format: str
    text_key: str
    id_key: str
    files: tuple[InputFile, ...]
    """In the order of their paths. Task `t` of `tasks` makes shard `t` of `files[t::tasks]`, one after the other."""
    tokenizer: str
    """Its name."""
    tokenizer_sha256: str
    """Of `tokenizer.json`."""
    vocab_size: int
    end_of_document: str
    end_of_document_id: int
    keep_fraction: float | None
    tasks: int
    max_document_mib: int
    limit: int | None
    """Documents of each file at most; a plan with a limit is a sample, and no manifest is made of it."""
    versions: dict[str, str]
    """Of datatrove and tokenizers."""

    @property
    def is_sample(self) -> bool:
        """Whether this is a sample, which training may not read."""
        return self.limit is not None

    @property
    def token_type(self) -> str:
        """numpy's name of the type that ids are written in (datatrove/pipeline/tokens/megatron_tokenizer.py)."""
        return "<i4" if self.vocab_size > 65_536 else "<u2"

    def files_of(self, task: int) -> tuple[InputFile, ...]:
        """The files of one task."""
        return self.files[task :: self.tasks]


@dataclass(frozen=True)
class ShardRecord:
    """`shards/00000.json`: a shard that is whole, and what it was made of."""

    task: int
    documents: int
    tokens: int
    """The end-of-document tokens included."""
    rows: int
    """Read from the source."""
    empty: int
    """Rows without text, which are left out."""
    not_kept: int
    """Rows left out by `keep_fraction`."""
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str
    seconds: float


@dataclass(frozen=True)
class DataFolder:
    """The files of a data set's folder."""

    path: Path

    @property
    def plan(self) -> Path:
        """`plan.json`."""
        return self.path / "plan.json"

    @property
    def manifest(self) -> Path:
        """`manifest.json`."""
        return self.path / "manifest.json"

    @property
    def data_args(self) -> Path:
        """`data-args.txt`, Megatron's `--data-args-path`."""
        return self.path / "data-args.txt"

    @property
    def lock(self) -> Path:
        """Held while somebody tokenizes here."""
        return self.path / ".lock"

    def prefix(self, name: str, task: int) -> Path:
        """A shard's path without `.bin` and `.idx`."""
        return self.path / f"{name}_{task:05d}_tokens"

    def record(self, task: int) -> Path:
        """The record of a whole shard."""
        return self.path / "shards" / f"{task:05d}.json"

    def log(self, task: int) -> Path:
        """What datatrove says of a shard."""
        return self.path / "logs" / f"{task:05d}.log"

    def parts(self, task: int) -> Path:
        """Where a shard's pieces lie while it is made."""
        return self.path / ".parts" / f"{task:05d}"
