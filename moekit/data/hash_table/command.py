"""`moekit data hash-table`: count a data set's tokens, make or read a table for its hash layers, say how even it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moekit.data.hash_table.files import Progress, count_tokens, read_published, table_file, write_table
from moekit.data.hash_table.table import METHODS, least_max_vio, load_of, make_table, max_vio
from moekit.data.named import facts_of, shards_in
from moekit.problems import did_you_mean, error, shortened
from moekit.recipe.names import RUN_NAME

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Asked:
    """The table that is wanted; None is not said."""

    dataset: str
    method: str = "greedy"
    experts: int | None = None
    topk: int | None = None
    seed: int = 0
    """Of the random table."""
    vocab_size: int | None = None
    """Where the data set's folder does not say it."""
    published: Path | None = None
    tensors: tuple[str, ...] = ()
    name: str | None = None


def hash_table(asked: Asked, shared_root: Path, progress: Progress) -> dict[str, Any]:
    """Make or read the table, write it, and say what it comes to, for `--json`.

    Raises:
        MoekitError: there is no such data, the table does not fit it, or another one has its name.
    """
    folder = _folder(asked.dataset, shared_root)
    name = asked.name or (asked.published.stem if asked.published else asked.method)
    if not RUN_NAME.fullmatch(name):
        raise error(f"no table can be named `{shortened(name)}`", "`--name` takes letters, digits, `.`, `_` and `-`")
    vocab_size = asked.vocab_size or facts_of(folder).vocab_size
    if vocab_size is None:
        what = f"nothing says how many token ids `{asked.dataset}` has"
        raise error(what, "`--vocab-size N` does; it is the tokenizer's, added tokens among them", str(folder))
    if asked.published:
        tables, experts, made = _tables_read(asked, asked.published, vocab_size)
        topk = int(tables.shape[2])
    else:
        (experts, topk, made), tables = _sizes(asked), None
    counts = count_tokens(shards_in(folder), vocab_size, progress)
    compared = {method: make_table(method, counts, experts, topk, asked.seed) for method in METHODS}
    if tables is None:
        tables = compared[asked.method][None]
    loads = [load_of(table, counts, experts) for table in tables]
    record = {
        "experts": experts,
        "topk": topk,
        "vocab_size": tables.shape[1],
        "tables": len(tables),
        "method": made,
        "counted_tokens": int(counts.sum()),
        "max_vio": tuple(map(max_vio, loads)),
    }
    file = table_file(folder, name)
    return {
        "name": name,
        "file": str(file),
        "written": write_table(file, tables, record),
        **record,
        "ids_never_seen": int((counts == 0).sum()),
        "compared": {method: max_vio(load_of(table, counts, experts)) for method, table in compared.items()},
        "least_max_vio": least_max_vio(counts, experts, topk),
        "most_frequent": {"id": int(counts.argmax()), "share": float(counts.max() / counts.sum())},
        "load": [load.tolist() for load in loads],
    }


def _folder(dataset: str, shared_root: Path) -> Path:
    folder = shared_root / "data" / dataset
    if not (dataset and folder.is_dir()):
        sets = sorted(one.name for one in (shared_root / "data").glob("*/"))
        hint = did_you_mean(dataset, sets) or f"in {shared_root / 'data'}: {', '.join(sets) or 'none'}"
        raise error(f"there is no data set `{shortened(dataset)}`", hint)
    if not shards_in(folder):
        raise error(f"data set `{dataset}` has no whole shard", "`moekit data tokenize` makes them", str(folder))
    return folder


def _sizes(asked: Asked) -> tuple[int, int, str]:
    """Experts, choices a token, and how the table is made."""
    if asked.experts is None or asked.topk is None:
        lacking = " and ".join(f"`--{name}`" for name in ("experts", "topk") if getattr(asked, name) is None)
        raise error(f"{lacking} must be given", "they are the recipe's `moe.num_experts` and `router.topk`")
    if asked.topk > asked.experts:
        raise error(f"{asked.experts} experts are fewer than the {asked.topk} that each token is sent to")
    return asked.experts, asked.topk, f"random, seed {asked.seed}" if asked.method == "random" else asked.method


def _tables_read(asked: Asked, file: Path, vocab_size: int) -> tuple[NDArray[np.int32], int, str]:
    """Published tables that fit the data, the number of experts, and where they are from."""
    names, tables = read_published(file, list(asked.tensors), asked.experts)
    _, rows, topk = tables.shape
    if rows < vocab_size:
        what = f"the table has {rows:,} rows, and the data's vocabulary {vocab_size:,} token ids"
        raise error(what, "it was made for another tokenizer", str(file))
    if asked.topk not in (None, topk):
        raise error(f"the table sends each token to {topk} experts, not {asked.topk}", "", str(file))
    return tables, asked.experts or int(tables.max()) + 1, f"{', '.join(names)} of {file.name}"


def rendered(found: dict[str, Any], dataset: str, width: int) -> str:
    """What `hash_table` found, as lines."""
    from moekit.watch.chart import shares

    lines = [
        f"{dataset}: {found['counted_tokens']:,} tokens counted; {found['ids_never_seen']:,} ids never occur",
        f"{found['experts']} experts, top-{found['topk']}; MaxVio is how far the busiest exceeds an even share",
        "",
    ]
    several = found["tables"] > 1
    for number, (vio, load) in enumerate(zip(found["max_vio"], found["load"], strict=True)):
        mean = sum(load) / len(load)
        name = found["name"] + f", hash layer {number}" * several
        lines.append(f"  {name}: MaxVio {vio:.3f}, an expert's load {min(load) / mean:.3f} to {max(load) / mean:.3f}")
        lines.append("  " + "".join(block for block, _ in shares(load, width - 2)).rstrip())
    compared = ", ".join(f"{method} {vio:.3f}" for method, vio in found["compared"].items())
    lines += ["", f"  for comparison: {compared}"]
    if found["least_max_vio"]:
        most = found["most_frequent"]
        said = f"id {most['id']} alone is {most['share']:.1%} of the tokens"
        lines.append(f"  no table gets below {found['least_max_vio']:.3f}: {said}")
    said = "written" if found["written"] else "there already"
    return "\n".join(
        [
            *lines,
            "",
            f"{said}: {found['file']}",
            f"in a recipe of `data.name: {dataset}`: `moe: {{hash_table: {found['name']}}}`",
        ]
    )
