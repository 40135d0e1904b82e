"""Rollout engines as targets, and what of Weightcast runs inside them."""
