"""What a recipe tells Megatron about the model's shape, and what Megatron decides where the recipe is silent.

Everything is read from the arguments that the recipe becomes, so an option in `megatron.extra` counts as one of a field
does. Line numbers are megatron-core 0.19.2's; the defaults are held against the real parser by `tests/plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from moekit.megatron.flags import arguments, argv
from moekit.megatron.table import load, parse_values
from moekit.problems import MoekitError, error
from moekit.recipe.load import Loaded

Certainty = Literal["default", "rule", "assumed"]
"""Where a value comes from that no recipe says: Megatron's parser, a rule of its validation, or a guess of ours."""

DEFAULTS: dict[str, Any] = {
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "attention_output_gate": False,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "group_query_attention": False,
    "kv_lora_rank": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "make_vocab_size_divisible_by": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_state_dim": 128,
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": False,
    "moe_router_topk": 2,
    "moe_shared_expert_gate": False,
    "mtp_use_repeated_layer": False,
    "multi_latent_attention": False,
    "normalization": "LayerNorm",
    "num_query_groups": 1,
    "pipeline_model_parallel_size": 1,
    "position_embedding_type": "learned_absolute",
    "qk_head_dim": 128,
    "qk_layernorm": False,
    "qk_pos_emb_head_dim": 64,
    "quick_geglu": False,
    "softmax_type": "vanilla",
    "swiglu": False,
    "tensor_model_parallel_size": 1,
    "untie_embeddings_and_output_weights": False,
    "v_head_dim": 128,
}
"""What the parser says where no argument does (training/arguments.py, `add_megatron_arguments`), by dest."""


@dataclass(frozen=True, slots=True)
class Note:
    """A value that the recipe does not say, and who does."""

    name: str
    """Megatron's name for it, such as `kv_channels`."""
    value: str
    why: str
    """A few words, with the place in Megatron where one decides."""
    certainty: Certainty


@dataclass
class Given:
    """The arguments a recipe becomes, by dest, and notes of what was taken beyond them."""

    loaded: Loaded
    values: dict[str, Any]
    notes: list[Note] = field(default_factory=list)

    @classmethod
    def of(cls, loaded: Loaded) -> Given:
        """Read the recipe's own arguments with its Megatron's flag table."""
        table = load(loaded.recipe.megatron.version)
        return cls(loaded, parse_values(argv(arguments(loaded.recipe)), table))

    def __call__(self, dest: str) -> Any:
        """What is said, else Megatron's default, None where it has none."""
        return self.values.get(dest, DEFAULTS.get(dest))

    def noted(self, dest: str) -> Any:
        """The same, and a default is written down: for a value that changes the count."""
        if dest not in self.values and dest in DEFAULTS:
            self.note(dest, DEFAULTS[dest], "Megatron's default, training/arguments.py", "default")
        return self(dest)

    def note(self, name: str, value: object, why: str, certainty: Certainty) -> None:
        """Write down a value that the recipe does not say."""
        note = Note(name, str(value), why, certainty)
        if note not in self.notes:
            self.notes.append(note)

    def needed(self, dest: str, name: str) -> int:
        """A size that has no default; `name` is the recipe's field. Raises `MoekitError` where it is not said."""
        value = self(dest)
        if value is None:
            raise self.refused(name, f"`{name}` is not set, and no count can do without it", "set it, or name a `base`")
        return int(value)

    def divided(self, size: int, parts: int, what: str, by: str) -> int:
        """`size / parts`, which must be whole; `what` and `by` are the recipe's fields."""
        if parts < 1 or size % parts:
            raise self.refused(what, f"`{what}` = {size:,} cannot be divided by `{by}` = {parts:,}", "change either")
        return size // parts

    def parsed[T](self, kind: type[T], text: object, name: str) -> T:
        """A text in one of Megatron's little languages (`moekit.recipe.patterns`); `name` is the recipe's field."""
        try:
            value: T = kind.parse(str(text))  # type: ignore[attr-defined]  # each of them has it
        except ValueError as reason:
            raise self.refused(name, f"`{name}` `{text}` {reason}") from None
        return value

    def refused(self, name: str, what: str, hint: str = "") -> MoekitError:
        """A refusal at the place of a field, to raise."""
        return error(what, hint, self.loaded.source.where(name))
