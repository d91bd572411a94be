"""Deterministic, batch-invariant log-probabilities of tokens under a layer's logits: linear_log_prob."""

from cute_kernels.log_prob.op import linear_log_prob

__all__ = ["linear_log_prob"]
