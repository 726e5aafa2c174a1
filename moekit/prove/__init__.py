"""Proofs that a stack trains what it says: an MoE that is its dense model, and two runs that are one."""
