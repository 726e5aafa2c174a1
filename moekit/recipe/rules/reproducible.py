"""Rules on the same bits twice, and on attention kernels."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.rules.violation import Rule, Target, Violation, is_blackwell, variable
from moekit.recipe.schema import Recipe


def determinism_has_its_environment(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """These variables choose among kernels and reductions; where they are not set Megatron sets them.

    Megatron, validate: `... is not a deterministic setting`, `NCCL_ALGO=...: each token must be in`
    (megatron/training/determinism.py:85-107); handbook 2.5.
    """
    if not recipe.precision.deterministic_mode:
        return
    for name, accepted in DETERMINISTIC.items():
        value = variable(name, recipe, target)
        if value is None:
            continue
        words = [word for part in value.split(",") if (word := part.strip())] if name == "NCCL_ALGO" else [value]
        if not words or not {*words} <= {*accepted}:
            yield Violation(
                (f"runtime.environment.{name}", "precision.deterministic_mode"),
                f"`precision.deterministic_mode` refuses {name}={shortened(value)}",
                f"unset it with `null`: Megatron sets it to {accepted[0]} itself",
            )


DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
}
"""What deterministic mode takes of a variable that is set, Megatron's own choice first."""


def determinism_excludes_reordered_sums(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """These kernels add in an order that changes from run to run; the fused router in the handbook's commit alone.

    Megatron, validate: `--deterministic-mode requires: cross_entropy_loss_fusion=False (got True)`, the same of
    `tp_comm_overlap` (megatron/training/determinism.py:136); handbook 2.5.
    """
    if not recipe.precision.deterministic_mode:
        return
    kernels = {
        "memory.cross_entropy_loss_fusion": recipe.memory.cross_entropy_loss_fusion,
        "overlap.tp_comm_overlap": recipe.overlap.tp_comm_overlap,
        "router.fusion": recipe.router.fusion and recipe.megatron.version != "0.19.2",
    }
    for field in [field for field, on in kernels.items() if on]:
        yield Violation(
            (field, "precision.deterministic_mode"),
            f"`precision.deterministic_mode` excludes `{field}`",
            "unset it with `null`",
        )


def determinism_leaves_nccl_to_megatron(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A tuner plugin may not choose where Megatron has chosen NCCL_ALGO. A warning: whether the run ends depends on the
    version of the plugin.

    Megatron, first step: NCCL's `The tuner plugin can not be loaded when explicitly choosing an algorithm or protocol
    with NCCL_ALGO/NCCL_PROTO` (seen with aws-ofi-nccl 1.16.2, its issue 982).
    """
    tuner = variable("NCCL_TUNER_PLUGIN", recipe, target)
    if recipe.precision.deterministic_mode and tuner not in (None, "", "none"):
        yield Violation(
            ("runtime.environment.NCCL_TUNER_PLUGIN", "precision.deterministic_mode"),
            f"`precision.deterministic_mode` sets NCCL_ALGO, and NCCL_TUNER_PLUGIN={shortened(tuner)} may refuse that",
            "`runtime: {environment: {NCCL_TUNER_PLUGIN: null}}`",
            level="warning",
        )


def batch_invariance_has_its_attention(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only FlashAttention 3 and 4 fix in how many parts a sequence is read, and not over context-parallel ranks.

    Megatron, config: `Batch invariant mode only supports FlashAttention (--attention-backend flash)`, `Batch invariant
    mode requires --flash-attention-version 3 or 4`, `... does not support context parallelism`, `... attention dropout`
    (megatron/core/transformer/transformer_config.py:2876-2895); handbook 4. Dropout is 0.1 where nothing is said.
    """
    model, context = recipe.model, recipe.parallel.context or 1
    if not recipe.precision.batch_invariant_mode:
        return
    if model.attention_backend != "flash":
        yield Violation(
            (INVARIANT, "model.attention_backend"),
            f"`{INVARIANT}` needs `model.attention_backend` flash",
            "`model: {attention_backend: flash}`",
        )
    if model.flash_attention_version not in (3, 4):
        yield Violation(
            (INVARIANT, "model.flash_attention_version"),
            f"`{INVARIANT}` needs `model.flash_attention_version` 3 or 4",
            "`model: {flash_attention_version: 3}`",
        )
    if context > 1:
        yield Violation(
            (INVARIANT, "parallel.context"), f"`{INVARIANT}` excludes `parallel.context` of {context}", "use 1"
        )
    dropout = 0.1 if model.attention_dropout is None else model.attention_dropout
    if dropout:
        yield Violation(
            (INVARIANT, "model.attention_dropout"),
            f"`{INVARIANT}` excludes attention dropout, which is {dropout:g}",
            "`model: {attention_dropout: 0.0}`",
        )


def batch_invariance_has_its_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The handbook's commit has kernels for bfloat16 and for one way of tokens to their experts.

    Megatron, config: `Batch invariant mode supports BF16 model parameters only`, `Batch-invariant MoE training requires
    moe_token_dispatcher_type='alltoall'` (handbook 4; megatron-core 0.19.2 asks for neither).
    """
    if not recipe.precision.batch_invariant_mode or recipe.megatron.version == "0.19.2":
        return
    if not recipe.precision.bf16:
        yield Violation(
            (INVARIANT, "precision.bf16"), f"`{INVARIANT}` needs `precision.bf16`", "`precision: {bf16: true}`"
        )
    if recipe.moe.num_experts and recipe.moe.dispatcher != "alltoall":
        yield Violation(
            (INVARIANT, "moe.dispatcher"),
            f"`{INVARIANT}` of experts needs `moe.dispatcher` alltoall",
            "`moe: {dispatcher: alltoall}`",
        )


def attention_backends_are_left_to_megatron(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron tells Transformer Engine its choice by these variables, and takes one that is set for another's choice.

    Megatron, build: `NVTE_FLASH_ATTN set to 0, but expected 1 for attention backend type auto. unset NVTE_FLASH_ATTN,
    NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN` (megatron/core/models/common/language_module/language_module.py:119).
    """
    backend, version = recipe.model.attention_backend or "auto", recipe.model.flash_attention_version
    expected = {
        f"NVTE_{name.upper()}_ATTN": str(int(backend in (name, "auto"))) for name in ("flash", "fused", "unfused")
    }
    if version is not None:
        expected |= {f"NVTE_FLASH_ATTN_V{other}": "0" for other in (2, 3, 4) if other != version}
    for name, wanted in expected.items():
        value = variable(name, recipe, target)
        if value is not None and value != wanted:
            asked = f"flash_attention_version: {version}" if "_V" in name else f"attention_backend: {backend}"
            yield Violation(
                (f"runtime.environment.{name}", "model.attention_backend"),
                f"{name}={shortened(value)} contradicts `{asked}`, which means {wanted}",
                f"unset {name} with `null`, and choose with `model.attention_backend`",
            )


def flash_attention_3_is_hoppers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Its kernels are written for Hopper; where nothing but FlashAttention may be taken, nothing is left elsewhere.

    Megatron, first step: Transformer Engine's `No dot product attention backend is available for the provided inputs`
    (Transformer Engine 2.16, dot_product_attention/utils.py:467).
    """
    model = recipe.model
    wanted = model.flash_attention_version == 3 and model.attention_backend == "flash"
    if wanted and target.gpu not in ("h100", "h200"):
        yield Violation(
            ("model.flash_attention_version", "model.attention_backend"),
            f"`flash_attention_version: 3` needs Hopper; {target.name} has {target.gpu}",
            "`model: {flash_attention_version: 4}`"
            if is_blackwell(target)
            else "`model: {flash_attention_version: 2}`",
        )


def local_attention_needs_a_local_spec(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron's own attention is asked for together with a specification of local layers.

    Megatron, validate: `'NoneType' object is not subscriptable`, or `--attention-backend local is only supported with
    --spec local` (megatron/training/arguments.py:435).
    """
    extra = recipe.megatron.extra or ()
    local = "--spec" in extra and extra[extra.index("--spec") + 1 :][:1] == ("local",)
    if recipe.model.attention_backend == "local" and not local:
        yield Violation(
            ("model.attention_backend",),
            "`attention_backend: local` needs `--spec local`",
            "`model: {attention_backend: unfused}` is Transformer Engine's plainest",
        )


INVARIANT = "precision.batch_invariant_mode"


RULES: tuple[Rule, ...] = (
    determinism_has_its_environment,
    determinism_excludes_reordered_sums,
    determinism_leaves_nccl_to_megatron,
    batch_invariance_has_its_attention,
    batch_invariance_has_its_experts,
    attention_backends_are_left_to_megatron,
    flash_attention_3_is_hoppers,
    local_attention_needs_a_local_spec,
)
