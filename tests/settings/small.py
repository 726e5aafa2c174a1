"""Shipped recipes small enough to take steps on a CPU: all widths are divided by one number, so ratios stay.

Experts, top-k, ranks and all options are the recipe's own; what a GPU's layers are is left to stage `step`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moekit.recipe.load import load

HIDDEN, HEAD = 64, 16
SEQUENCE, MICRO_BATCH = 64, 2
LAYERS = 2
VOCABULARY = 512
WIDTHS = (
    *("model.ffn_hidden_size", "moe.ffn_hidden_size", "moe.latent_size", "moe.shared_expert_intermediate_size"),
    *("model.hidden_size",),
)
PLACED = (
    *("moe.layer_freq", "model.mtp_num_layers", "model.hybrid_layer_pattern", "parallel.pipeline_model_layout"),
    *("parallel.num_layers_per_virtual_pipeline_stage", "parallel.num_virtual_stages_per_pipeline_rank"),
)
"""Where layers are placed one by one, all of them stay."""


def small(name: str, folder: Path) -> Path:
    """A file in `folder` that changes the sizes of a shipped recipe and nothing else."""
    recipe = load(name).recipe

    def said(field: str) -> Any:
        section, _, key = field.partition(".")
        return getattr(getattr(recipe, section), key)

    model, parallel = recipe.model, recipe.parallel
    assert model.hidden_size
    assert parallel.gpus
    changes = {field: said(field) * HIDDEN // model.hidden_size for field in WIDTHS if said(field)}
    changes |= {"model.seq_length": SEQUENCE, "model.max_position_embeddings": SEQUENCE}
    changes |= {"model.num_attention_heads": HIDDEN // HEAD}
    if model.num_query_groups:
        changes["model.num_query_groups"] = 2
    if not any(said(field) for field in PLACED):
        changes["model.num_layers"] = LAYERS * (parallel.pipeline_model or 1)
    ranks = (parallel.tensor_model or 1) * (parallel.pipeline_model or 1) * (parallel.context or 1)
    changes |= {
        "train.micro_batch_size": MICRO_BATCH,
        "train.global_batch_size": MICRO_BATCH * parallel.gpus // ranks,
    }
    changes |= {"train.exit_interval": None, "data.vocab_size": VOCABULARY}
    tree: dict[str, Any] = {"base": name}
    for field, value in changes.items():
        section, _, key = field.partition(".")
        tree.setdefault(section, {})[key] = value
    path = folder / f"{name.replace('/', '_')}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path
