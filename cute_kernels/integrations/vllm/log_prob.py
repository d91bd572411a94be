"""Log-probabilities of tokens, in the place of the Triton kernel of vLLM's second model runner."""

from __future__ import annotations

import sys

from torch import Tensor
from vllm.v1.worker.gpu.sample import logprob

from cute_kernels.reduction import log_softmax


def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """fp32 of (batch, ids) for logits (batch, vocabulary) and ids (batch, ids): ``reduction.log_softmax``'s."""
    return log_softmax(logits.float()).gather(-1, token_ids.long())


def replace() -> None:
    """For its module, and for the one that imports the function from it, if that is imported already."""
    logprob.compute_token_logprobs = compute_token_logprobs
    importer = sys.modules.get("vllm.v1.worker.gpu.sample.prompt_logprob")
    if importer is not None:
        importer.compute_token_logprobs = compute_token_logprobs
