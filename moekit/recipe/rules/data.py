"""Rules on the data and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def data_has_one_source(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Made-up tokens stand in for a data set, not beside one.

    Megatron, validate: `A single data source must be provided in training mode` where shards are named
    (megatron/training/arguments.py:1624).
    """
    if recipe.data.name and recipe.data.mock_data and recipe.data.shards:
        yield Violation(
            ("data.mock_data", "data.name"),
            "`data.name` and `data.mock_data` exclude each other",
            "unset one with `null`",
        )


def named_data_is_read(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Beside a list of shards, made-up tokens win.

    Megatron, never: it trains on the made-up ones (megatron/core/datasets/blended_megatron_dataset_builder.py:148).
    """
    if recipe.data.name and recipe.data.mock_data and not recipe.data.shards:
        yield Violation(
            ("data.name", "data.mock_data"),
            "`data.name` is not read beside `data.mock_data`",
            "unset one of them with `null`",
        )


def data_is_named_or_mocked(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a source the tokens are made up.

    Megatron, never: `Let mock = True` (megatron/core/datasets/blended_megatron_dataset_config.py:138).
    """
    data, extra = recipe.data, {*(recipe.megatron.extra or ())}
    if not data.name and not data.mock_data and "--train-data-path" not in extra:
        yield Violation(("data.name",), "`data.name` is missing", "name a data set, or say `mock_data: true`")


def named_data_is_split(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What of a list of shards is for training has to be said; of shards on the command line there is an old default.

    Megatron, first step: `split must be provided when blend is not None`
    (megatron/core/datasets/blended_megatron_dataset_config.py:131).
    """
    data = recipe.data
    if data.name and not data.split and not data.per_split and not data.shards and not data.mock_data:
        yield Violation(
            ("data.split", "data.name"),
            "`data.split` is missing: which share of the documents is for training",
            "such as `99,1,0`; or `per_split: true`, where the data set has shards for validation",
        )


def held_out_shards_are_not_split(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Where shards are held out for validation, no documents are.

    Megatron, first step: `split and blend_per_split are incompatible`
    (megatron/core/datasets/blended_megatron_dataset_config.py:113).
    """
    for field in ("split", "shards") if recipe.data.per_split else ():
        if getattr(recipe.data, field):
            yield Violation(
                (f"data.{field}", "data.per_split"),
                f"`data.{field}` and `data.per_split` exclude each other",
                "unset one of them with `null`",
            )


def held_out_shards_are_of_a_data_set(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Which shards are held out is in the data set's list.

    Megatron, never: no list is named to it, and its tokens are made up (megatron/training/arguments.py:1624).
    """
    if recipe.data.per_split and not recipe.data.name:
        yield Violation(
            ("data.per_split", "data.name"),
            "`data.per_split` needs `data.name`, the data set whose shards are held out",
            "name it, or unset this",
        )


def shards_are_of_a_data_set(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Shards lie in their data set's folder.

    Megatron, never: without the folder none is named to it, and its tokens are made up
    (megatron/training/arguments.py:1624).
    """
    if recipe.data.shards and not recipe.data.name:
        yield Violation(
            ("data.shards", "data.name"),
            "`data.shards` needs `data.name`, the data set they are of",
            "name it, or unset this",
        )


def shards_are_prefixes(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A shard is two files, `.bin` and `.idx`, named by what they share.

    Megatron, first step: it looks for `part.bin.bin` (megatron/core/datasets/indexed_dataset.py).
    """
    for shard in recipe.data.shards or ():
        if shard.endswith((".bin", ".idx")):
            yield Violation(("data.shards",), f"`data.shards` has `{shard}`, a file", f"use its prefix `{shard[:-4]}`")


def data_is_loaded_by_megatron(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """An external loader comes from a training script of its own.

    Megatron, first step: `'GPTDataset' object is not an iterator` (megatron/core/rerun_state_machine.py:1146).
    """
    if recipe.data.dataloader_type == "external":
        yield Violation(
            ("data.dataloader_type",),
            "`dataloader_type: external` needs a training script with a loader of its own",
            "use `single` or `cyclic`",
        )


def documents_are_masked(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without the loader's mask attention is causal over the whole sequence.

    Megatron, never: documents see each other (megatron/core/datasets/gpt_dataset.py, `create_attention_mask`).
    """
    data = recipe.data
    if data.reset_attention_mask and data.no_create_attention_mask_in_dataloader:
        yield Violation(
            ("data.reset_attention_mask", "data.no_create_attention_mask_in_dataloader"),
            "`data.reset_attention_mask` does nothing with `data.no_create_attention_mask_in_dataloader`",
            "unset one of them with `null`",
        )


def documents_are_masked_by_local_attention(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine's causal attention takes no mask. A warning: the loss is no less a loss.

    Megatron, never: documents still see each other (megatron/core/extensions/transformer_engine.py, `attn_mask_type`).
    """
    data, local = recipe.data, recipe.model.transformer_impl == "local"
    if data.reset_attention_mask and not data.no_create_attention_mask_in_dataloader and not local:
        yield Violation(
            ("data.reset_attention_mask", "model.transformer_impl"),
            "`data.reset_attention_mask` makes a mask that Transformer Engine's causal attention does not read",
            "unset it with `null`, which also loads faster; documents see each other either way",
            "warning",
        )


def splits_are_three_shares(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Training, validation and test each have a share, and one of them has something.

    Megatron, first step: a bare assert, `could not convert string to float`, or shares of NaN, when the data sets are
    built (megatron/core/datasets/blended_megatron_dataset_config.py:164-170).
    """
    shares = _shares(recipe)
    if shares is not None and (len(shares) > 3 or None in shares or not any(shares)):
        yield Violation(
            ("data.split",),
            f"`data.split: {recipe.data.split}` is not the shares of training, validation and test",
            "such as `95,5,0`",
        )


def splits_have_no_signs(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only digits and points are read.

    Megatron, never: `-1,2` is taken as 1 and 2 (megatron/core/datasets/blended_megatron_dataset_config.py:164).
    """
    if recipe.data.name and "-" in (recipe.data.split or ""):
        yield Violation(
            ("data.split",),
            f"`data.split: {recipe.data.split}` has a sign, which Megatron passes over",
            "such as `95,5,0`",
        )


def training_has_data(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A run without training documents trains nothing, and ends well.

    Megatron, never: no loader, `skipping training` (megatron/training/training.py:4576, 4598).
    """
    shares = _shares(recipe)
    if shares and shares[0] == 0 and any(shares):
        yield Violation(
            ("data.split",),
            f"`data.split: {recipe.data.split}` leaves training nothing",
            "the first share is training's",
        )


def validation_has_data(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The first validation stops the run.

    Megatron, later: a TypeError hours in, of a loader that is None (megatron/training/training.py:4576, 4600).
    """
    shares, train = _shares(recipe), recipe.train
    if not shares or not shares[0] or (len(shares) > 1 and shares[1] != 0) or len(shares) > 3:
        return
    if train.eval_iters and train.eval_interval and train.eval_interval <= (train.iters or 0):
        yield Violation(
            ("data.split", "train.eval_iters"),
            f"`data.split: {recipe.data.split}` leaves validation nothing, and `train.eval_iters` asks for it",
            "give the second share some documents, or set `eval_iters: 0`",
        )


def _shares(recipe: Recipe) -> list[float | None] | None:
    """The numbers that Megatron finds in a named data set's split, None for one it cannot read."""
    if not recipe.data.name or recipe.data.split is None:
        return None
    numbers = re.findall(r"[.0-9]+", recipe.data.split)
    return [float(number) if re.fullmatch(r"\d+\.?\d*|\.\d+", number) else None for number in numbers]


def a_tokenizer_is_chosen(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """GPT-2's is Megatron's own choice, whatever the data was made with.

    Megatron, never: it reads token ids with GPT-2's vocabulary, from the hub (`args_defaults` of pretrain_gpt.py).
    """
    if recipe.data.tokenizer_type is None:
        yield Violation(
            ("data.tokenizer_type",),
            "`data.tokenizer_type` is missing",
            "`HuggingFaceTokenizer` reads a folder, `NullTokenizer` goes with `mock_data`",
        )


_FROM_THE_HUB = ("GPT2BPETokenizer", "BertWordPieceCase", "BertWordPieceLowerCase")
_NOTHING_READ = ("NullTokenizer", "NullMultimodalTokenizer")


def a_tokenizer_has_its_files(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Most kinds of tokenizer are read from a path.

    Megatron, first step: `Tokenizer path must be specified`, once the ranks have met
    (megatron/core/tokenizers/megatron_tokenizer.py).
    """
    data = recipe.data
    if data.tokenizer_type and data.tokenizer_type not in (*_FROM_THE_HUB, *_NOTHING_READ) and not data.tokenizer:
        yield Violation(
            ("data.tokenizer", "data.tokenizer_type"),
            f"`{data.tokenizer_type}` needs `data.tokenizer`",
            "the one that the data was made with",
        )


def a_null_tokenizer_has_a_vocabulary(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """It has no file that says how many tokens there are.

    Megatron, first step: `missing 1 required positional argument: 'vocab_size'`
    (megatron/core/tokenizers/text/text_tokenizer.py:62).
    """
    if recipe.data.tokenizer_type in _NOTHING_READ and recipe.data.vocab_size is None:
        yield Violation(
            ("data.vocab_size", "data.tokenizer_type"),
            f"`{recipe.data.tokenizer_type}` needs `data.vocab_size`",
            "token ids, before padding",
        )


def a_tokenizer_is_read(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """These kinds of tokenizer look at no path.

    Megatron, never: other token ids are used than the named tokenizer's
    (megatron/core/tokenizers/utils/build_tokenizer.py).
    """
    data = recipe.data
    if data.tokenizer and data.tokenizer_type in (*_FROM_THE_HUB, *_NOTHING_READ):
        yield Violation(
            ("data.tokenizer", "data.tokenizer_type"),
            f"`data.tokenizer` has no meaning with `{data.tokenizer_type}`",
            "unset it with `null`, or use `HuggingFaceTokenizer`",
        )


def tokenizers_of_the_hub_have_a_file(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each rank would ask the hub for the vocabulary. A warning, as the nodes may reach it.

    Megatron, never: it is fetched, by hundreds of ranks at once
    (megatron/core/tokenizers/text/libraries/megatron_hf_tokenizer.py).
    """
    if recipe.data.tokenizer_type in _FROM_THE_HUB and "--vocab-file" not in (recipe.megatron.extra or ()):
        yield Violation(
            ("data.tokenizer_type", "megatron.extra"),
            f"`{recipe.data.tokenizer_type}` without `--vocab-file` is fetched from the hub, by every rank",
            "`HuggingFaceTokenizer` reads a folder of the shared disk",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    data_has_one_source,
    named_data_is_read,
    data_is_named_or_mocked,
    named_data_is_split,
    held_out_shards_are_not_split,
    held_out_shards_are_of_a_data_set,
    shards_are_of_a_data_set,
    shards_are_prefixes,
    data_is_loaded_by_megatron,
    documents_are_masked,
    documents_are_masked_by_local_attention,
    splits_are_three_shares,
    splits_have_no_signs,
    training_has_data,
    validation_has_data,
    a_tokenizer_is_chosen,
    a_tokenizer_has_its_files,
    a_null_tokenizer_has_a_vocabulary,
    a_tokenizer_is_read,
    tokenizers_of_the_hub_have_a_file,
)
