"""A data set description, `datasets/*.yaml`: which text becomes token files, with which tokenizer, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from moekit.recipe.schema.markers import AtLeast


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One data set to prepare. Null is unset."""

    name: str
    """The data set's name, as a recipe's `data.name` says it: `<shared_root>/data/<name>`."""
    source: tuple[str, ...]
    """Where the text lies: files, folders or patterns with `*`, each a local path or `hf://datasets/OWNER/NAME/PATH`.
    A path that is not absolute is taken from the folder of this file."""
    format: Literal["parquet", "jsonl"] | None = None
    """What the files are. Null: what their names end in."""
    text_key: str = "text"
    """The column or key that holds a document's text."""
    id_key: str = "id"
    """The column or key that holds a document's id, which says whether it is kept."""
    tokenizer: str
    """The tokenizer's name, as a recipe's `data.tokenizer` says it: `<shared_root>/tokenizers/<tokenizer>`."""
    tokenizer_source: str | None = None
    """Where the tokenizer comes from: a repository `OWNER/NAME` of the Hugging Face Hub, or a local folder."""
    tokenizer_revision: str | None = None
    """The repository's branch, tag or commit. Null: its newest."""
    tokenizer_copy: str | None = None
    """A repository with the same tokenizer that asks for no permission, named where `tokenizer_source` does."""
    end_of_document: str
    """The token put after each document. The same letters within a text are tokenized as text."""
    vocab_size: Annotated[int | None, AtLeast(1)] = None
    """Token ids that the tokenizer must have, added ones among them. Null: whatever it has."""
    keep_fraction: Annotated[float | None, AtLeast(0)] = None
    """Share of the documents that is kept, chosen by a hash of each document's id. Null: all."""
    tasks: Annotated[int, AtLeast(1)] = 1
    """Shards, and tasks that make them: each takes its share of the files, so there may not be more of them than
    files."""
    cpus_per_task: Annotated[int, AtLeast(1)] = 1
    """Worker processes of a task; each tokenizes one file at a time, on one thread."""
    memory_gib: Annotated[int, AtLeast(1)] = 2
    """Memory of a task; how many documents a worker tokenizes at a time follows from it."""
    time_limit_min: Annotated[int | None, AtLeast(1)] = None
    """Minutes a task gets on Slurm. Null: the profile's `max_time_min`, else the partition's own."""
    max_running: Annotated[int | None, AtLeast(1)] = None
    """Tasks that run on Slurm at the same time. Null: as many as there is room for."""
    max_document_mib: Annotated[int, AtLeast(1)] = 20
    """Longer documents are cut into pieces of this size, at a line's end where there is one, before they are tokenized;
    the pieces' tokens follow each other as one document."""
