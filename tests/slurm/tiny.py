"""A recipe that a cluster of pretended nodes trains in seconds: the quickstart, smaller."""


def tiny(iters: int, more: str = "") -> str:
    """The recipe's text, `more` behind it; it saves at its end and where it is told to end, and nowhere else."""
    return f"""
base: quickstart
model: {{num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 2, num_query_groups: 1,
        seq_length: 64, max_position_embeddings: 64}}
moe: {{ffn_hidden_size: 64}}
train: {{micro_batch_size: 2, global_batch_size: 4, iters: {iters}, eval_iters: 1}}
schedule: {{decay_iters: {iters}, warmup_iters: 1}}
checkpoint: {{save_interval: 100000}}
log: {{interval: 1}}
{more}"""
