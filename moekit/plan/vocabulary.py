"""How many token ids a recipe's tokenizer has, and how many rows Megatron makes of them."""

from __future__ import annotations

from moekit.plan.given import Given

EMBEDDINGS = {
    "deepseek-v2": 102_400,
    "deepseek-v3": 129_280,
    "glm-4.5": 151_552,
    "gpt-oss": 201_088,
    "ling": 157_184,
    "mixtral": 32_000,
    "mixtral-8x22b": 32_768,
    "moonlight": 163_840,
    "olmoe": 50_304,
    "qwen3": 151_936,
}
"""Tokenizers of the shipped models, by the name recipes call them: rows of the released embedding (`config.json`)."""

UNKNOWN = 128_256
"""Assumed of a tokenizer that nothing is known of: Llama 3's, the handbook's (2.4)."""


def vocabulary_of(given: Given, told: int | None = None) -> int:
    """Token ids: what the caller, the recipe or a data set's description says, else an assumption, noted as one."""
    if told is not None:
        given.note("vocab_size", f"{told:,}", "as `--vocab-size` says", "rule")
        return told
    if given("vocab_size") is not None:
        return int(given("vocab_size"))
    name, tokenizer = given.loaded.recipe.data.name, given.loaded.recipe.data.tokenizer
    if described := _described(name, tokenizer):
        size, where = described
        given.note("vocab_size", f"{size:,}", where, "rule")
        return size
    if tokenizer in EMBEDDINGS:
        size = EMBEDDINGS[tokenizer]
        given.note("vocab_size", f"{size:,}", f"the released model's, for a tokenizer called `{tokenizer}`", "assumed")
        return size
    why = f"nothing is known of tokenizer `{tokenizer}`" if tokenizer else "the recipe names no tokenizer"
    given.note("vocab_size", f"{UNKNOWN:,}", f"Llama 3's, as {why}; `--vocab-size` says it", "assumed")
    return UNKNOWN


def _described(name: str | None, tokenizer: str | None) -> tuple[int, str] | None:
    """What the data that comes with moekit, or a shipped description of the data set, says."""
    if name == "python-docs" or tokenizer == "python-docs":
        from moekit.data.python_docs import VOCABULARY

        return VOCABULARY, "the tokenizer that comes with moekit"
    if tokenizer is None:
        return None
    from moekit.data.dataset import find_dataset, shipped_datasets

    for shipped in shipped_datasets():
        dataset = find_dataset(shipped)
        if dataset.tokenizer == tokenizer and dataset.vocab_size is not None:
            return dataset.vocab_size, f"datasets/{shipped}.yaml, of the same tokenizer"
    return None


def rows_of(given: Given, vocabulary: int) -> int:
    """Rows of the embedding: a multiple of `make_vocab_size_divisible_by` x TP (training/vocab_utils.py:9)."""
    if given("padded_vocab_size") is not None:
        return int(given("padded_vocab_size"))
    step = given.noted("make_vocab_size_divisible_by") * given("tensor_model_parallel_size")
    rows = -(-vocabulary // step) * step
    if rows != vocabulary:
        given.note(
            "padded_vocab_size", f"{rows:,}", f"the next multiple of {step:,}, training/vocab_utils.py:9", "rule"
        )
    return int(rows)
