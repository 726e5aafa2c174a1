"""Texts that the schema takes for any text, and Megatron does not: what the generator writes into such fields."""

from __future__ import annotations

BOGUS = "bogus"

WORDS: dict[str, tuple[str, ...]] = {
    "model.window_size": ("31,0", "-1,0", "-1,-1", "0,0", "8,8", "8", "8,8,8", "(7,0)", BOGUS),
    "parallel.cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p", BOGUS),
    "memory.recompute_modules": (
        *("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"),
        BOGUS,
    ),
    "memory.offload_modules": (
        *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"),
        BOGUS,
    ),
    "data.name": ("docs", "web/english"),
    "monitor.control_run": ("even", "forced_even", "runs/even"),
    "moe.hash_table": ("table", "another_table", "tables/other"),
    "data.shards": ("shard_0", "shard_1"),
    "data.tokenizer": ("llama", "gpt2"),
    "data.split": ("100,0,0", "95,5,0", "0,100,0", "0.9,0.1", "1", "0,0,0", "1,2,3,4", "95/5/0", BOGUS),
    "checkpoint.from_run": ("parent", "../parent", "parent/checkpoints"),
    "runtime.secrets": ("HF_TOKEN", "WANDB_API_KEY", "PATH"),
    "megatron.version": ("0.19.2", "d6316eb45", "0.18"),
}
"""For each text field that has no choices in Megatron's parser; of a list, its elements."""

VARIABLES: dict[str, tuple[str, ...]] = {
    "NVTE_CPU_OFFLOAD_V1": ("0", "1"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "8", "32"),
    "CUDA_GRAPHS_USE_NODE_PRIORITY": ("0", "1"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8", ":0:0"),
    "NCCL_ALGO": ("Ring", "Tree", "Ring,Tree", "CollnetDirect", "^NVLS", "allreduce:tree"),
    "NCCL_PROTO": ("LL128", "Simple", "^LL128"),
    "NCCL_GRAPH_REGISTER": ("0", "1"),
    "NCCL_COLLNET_ENABLE": ("0", "1"),
    "NCCL_NVLS_ENABLE": ("0", "1"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", "1"),
    "NVTE_FLASH_ATTN": ("0", "1"),
    "NVTE_FUSED_ATTN": ("0", "1"),
    "NVTE_UNFUSED_ATTN": ("0", "1"),
    "NVTE_DEBUG": ("0", "1"),
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": ("0", "1"),
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True", "max_split_size_mb:128"),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": ("0", "1"),
}
"""The environment variables that Megatron reads or that what it stands on reads, with values to try."""

LARGEST: dict[str, int] = {
    "model.num_layers": 32,
    "model.mtp_num_layers": 4,
    "model.seq_length": 1024,
    "model.hidden_size": 512,
    "model.ffn_hidden_size": 4096,
    "moe.num_experts": 512,
    "parallel.gpus": 64,
    "parallel.pipeline_model": 32,
    "train.global_batch_size": 512,
    "train.micro_batch_size": 64,
    "train.iters": 10_000,
}
"""How large a number may get that decides how long the real stages work on a recipe."""
