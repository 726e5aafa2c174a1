"""Train the tokenizer in `tokenizer/`: a byte-level BPE of 4,096 tokens from the shipped text.

python -m moekit.data.python_docs.train_tokenizer FOLDER

The same text gives the same bytes, whatever the number of cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moekit.data.python_docs import END_OF_DOCUMENT, VOCABULARY, documents


def train(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`, which is made if needed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_DOCUMENT],  # the first special token gets id 0
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so no text is out of vocabulary
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in documents()), trainer)

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "model_max_length": 1_000_000_000,  # a tokenizer has no longest text; without it `transformers` warns
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
