"""A tokenizer small enough to be trained in a test."""

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

END = "<|end_of_text|>"
TEXT = ["Mixture-of-Experts models route each token", "to a few of many experts", "and leave the others alone"] * 9


def small_tokenizer(special: tuple[str, ...] = ("<|begin_of_text|>", END)) -> Tokenizer:
    """A byte-level BPE of 300 tokens, trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(list(special))
    return tokenizer
