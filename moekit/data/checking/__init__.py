"""Whether token files are what Megatron relies on, and what plan, record, source and tokenizer say."""
