"""linear_log_prob in plain torch: the specification of the kernels, and what runs without a supported GPU.

z = softcap tanh(scale x W^T / softcap) / temperature, without a softcap scale x W^T / temperature;
log_prob = z[target] - ln sum_j exp(z_j);  entropy = -sum_j p_j ln p_j with p = softmax(z).

In fp32 (fp64 tensors, which the kernels do not take, in fp64), with all logits in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.log_prob.checks import check_log_prob, operands
from cute_kernels.runtime.autograd import as_rows, widened, without_autocast
from cute_kernels.runtime.real import as_float
from cute_kernels.runtime.strict import has_address, is_strict, strict_rows


def linear_log_prob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    keep_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token; see ``cute_kernels.linear_log_prob``. ``keep_logits`` changes nothing:
    all logits are in memory, unrounded.
    """
    is_fp64 = isinstance(x, Tensor) and x.dtype is torch.float64 and not is_strict()
    temperature, scale, softcap = as_float(temperature), as_float(scale), as_float(softcap)
    check_log_prob(x, weight, target, ignore_index, temperature, scale, softcap, keep_logits, is_fp64)
    strict_rows("linear_log_prob", x=x)
    if has_address(x, weight):
        operands(as_rows("linear_log_prob", "x", x), weight)
    wide = torch.float64 if is_fp64 else torch.float32
    with without_autocast(x):
        logits = x.to(wide) @ widened("linear_log_prob", "weight", weight, wide).t()
    if softcap:
        logits = torch.tanh(logits * (scale / softcap))
    factor = softcap or scale
    target = target.long()  # torch compares an int32 with ignore_index modulo 2^32
    is_column = (target >= 0) & (target < weight.shape[0])
    counts = is_column & (target != ignore_index)
    # The quotient's rounding is then small where probabilities are large, at any temperature
    z = (logits - logits.detach().amax(-1, keepdim=True)) / (temperature / factor)
    # An ignored target has no gradient, whatever its logits are
    log_p = torch.log_softmax(z.masked_fill(~counts.unsqueeze(-1), 0.0), -1)
    columns = torch.where(is_column, target, 0).unsqueeze(-1)
    log_prob = log_p.gather(-1, columns).squeeze(-1)
    p = log_p.exp()
    # A probability of 0 adds nothing, not 0 times an infinity, which would be NaN; the same for the gradient
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    # A target that names no column has no value; neither has an ignored one
    elsewhere = torch.where(target == ignore_index, 0.0, float("nan")).to(wide)
    return torch.where(counts, log_prob, elsewhere), torch.where(counts, entropy, elsewhere)
