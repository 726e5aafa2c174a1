"""A hybrid stack for a CPU, by `--spec local_hybrid_stack stack`."""

from moekit.megatron import local_hybrid

local_hybrid.install()
stack = local_hybrid.stack()
