"""A data set's tokenizer: fetched once, held against what is asked of it, put down with its sha256."""
