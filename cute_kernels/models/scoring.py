"""log_prob of a model's tokens: its hidden states, then ``linear_log_prob`` in place of logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_kernels.log_prob import linear_log_prob
from cute_kernels.models.families import Head, expect_frequencies, head_of, model_of
from cute_kernels.models.sharding import gathered
from cute_kernels.runtime.checks import expect, expect_dtype, expect_like, expect_tensor, fail

OP = "models.log_prob"
IGNORED = -100


@gathered
def log_prob(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    *,
    temperature: float | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label after the tokens before it, and the entropy there, without logits in memory.

    Differentiable, and the bits of ``generate``, on the same model with the same options.

    Args:
        model: a causal language model of transformers, one that ``prepare`` has prepared, or peft's model of it. FSDP2
            may shard it.
        input_ids: (B, S) int64.
        labels: (B, S) int64, as the model's own forward takes them: labels[:, s] is scored by the row of token s - 1.
            -100: no label. The first token of a sequence has none, whatever it is; with packed sequences give -100
            there.
        temperature: the divisor of the logits, a real number from 1e-6 to 1e6; None: 1, unless the model's
            ``generation_config`` has another. ``generate`` draws by that one, and a loss over text wants 1: so say
            which. ``generate`` gives the log-probabilities of greedy choices at 1.
        attention_mask: (B, S): 0 where a row is padded, left or right; None: nowhere.
        kwargs: passed to the model: ``position_ids``, ``cu_seq_lens_q`` and its relatives. Without position_ids
            they are counted from a sequence's first token that is not padding.

    Returns:
        (log_prob, entropy), each (B, S) fp32, in nats; 0 where there is no label.

    Raises:
        TypeError: no model of transformers; other dtypes.
        ValueError: no temperature where the model's generation_config has one that is not 1; shapes that differ, a
            model_type that is not known, a head with a bias; position_ids that do not count the tokens of an
            attention_mask; an attention_mask together with cu_seq_lens_q.

    Numerics:
        ``linear_log_prob`` of the model's last hidden states: the logits' own scale and softcap come before the
        temperature, and neither they nor the logits are rounded. A model in fp32 has its hidden states and its head
        rounded to bf16. A token's results have the same bits whatever the batch, the padding and the other sequences,
        where the model's rows do: inside of ``batch_invariant`` on a GPU.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from cute_kernels import models
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
        ... )
        >>> model = models.prepare(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        >>> ids = torch.arange(6).view(1, 6)
        >>> log_prob, entropy = models.log_prob(model, ids, labels=ids)
        >>> log_prob.shape, log_prob[0, 0].item(), log_prob.requires_grad
        (torch.Size([1, 6]), 0.0, True)
    """
    found = model_of(OP, model)
    head = head_of(OP, found)
    expect_frequencies(OP, found)
    temperature = _given(temperature, found)
    check_ids(OP, input_ids)
    expect_tensor(OP, "labels", labels)
    expect_dtype(OP, "labels", labels.dtype, (torch.int64,))
    expect_like(OP, "labels", labels, input_ids.shape, input_ids.device)
    starts = kwargs.get("cu_seq_lens_q")
    if attention_mask is not None:
        check_mask(OP, attention_mask, input_ids)
        expect(starts is None, OP, "attention_mask", "be None with cu_seq_lens_q: packed rows have no padding", "both")
        kwargs["position_ids"] = _positions(attention_mask, kwargs.get("position_ids"))
    elif kwargs.get("position_ids") is None and starts is not None:
        kwargs["position_ids"] = _positions_between(starts, input_ids)
    elif starts is None and kwargs.get("position_ids") is not None:
        kwargs |= _packing(kwargs["position_ids"], input_ids)
    hidden = hidden_states(found, input_ids, attention_mask=attention_mask, use_cache=False, **kwargs)
    of_rows = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # the last row scores none
    log_p, entropy = head_log_prob(head, hidden, of_rows, temperature)
    return F.pad(log_p[:, :-1], (1, 0)), F.pad(entropy[:, :-1], (1, 0))


def _given(temperature: float | None, model: Any) -> float:
    """The temperature: 1 if neither the caller nor the model says more."""
    if temperature is not None:
        return temperature
    configured = getattr(getattr(model, "generation_config", None), "temperature", None)
    expected = "be given: generate draws by the generation_config's, a loss over text wants 1"
    expect(configured in (None, 1.0), OP, "temperature", expected, f"None, and {configured} there")
    return 1.0


def check_ids(op: str, input_ids: Tensor) -> None:
    expect_tensor(op, "input_ids", input_ids)
    expect_dtype(op, "input_ids", input_ids.dtype, (torch.int64,))
    if input_ids.dim() != 2 or not input_ids.shape[1]:
        fail(op, "input_ids", "have shape (B, S) with S from 1", tuple(input_ids.shape))


def check_mask(op: str, attention_mask: Tensor, input_ids: Tensor) -> None:
    expect_tensor(op, "attention_mask", attention_mask)
    expect_like(op, "attention_mask", attention_mask, input_ids.shape, input_ids.device)


def _positions(attention_mask: Tensor, given: Tensor | None) -> Tensor:
    """Each token's position in its sequence; with a mask transformers does not look at positions that begin again."""
    present = attention_mask.bool()
    positions = (present.long().cumsum(1) - 1).clamp(min=0)
    if given is not None and not torch.compiler.is_compiling():
        good = given.shape[-1:] == positions.shape[-1:] and bool((given == positions)[present].all())
        if not good:
            expected = "count the tokens of attention_mask; packed sequences come without one"
            fail(OP, "position_ids", expected, "others")
    return positions


def _positions_between(starts: Tensor, input_ids: Tensor) -> Tensor:
    """Each token's position in its sequence, of packed ones that begin at ``starts``; transformers would count on."""
    places = torch.arange(input_ids.numel(), device=starts.device)
    sequence = torch.searchsorted(starts.to(places.dtype), places, right=True) - 1
    return (places - starts[sequence]).view(input_ids.shape)


def _packing(positions: Tensor, input_ids: Tensor) -> dict[str, Any]:
    """The starts of packed sequences by positions that begin again, which not each model looks at; else nothing."""
    if torch.compiler.is_compiling() or positions.dim() != 2:
        return {}
    begins = F.pad(positions.expand_as(input_ids).diff(dim=1) != 1, (1, 0), value=True).flatten()
    starts = begins.nonzero().flatten()
    if len(starts) == len(input_ids):
        return {}
    starts = F.pad(starts, (0, 1), value=begins.numel()).to(torch.int32)
    longest = input_ids.shape[1]
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def hidden_states(model: Any, input_ids: Tensor, **options: Any) -> Tensor:
    """(B, S, C), behind the last norm."""
    return model.base_model(input_ids=input_ids, **options).last_hidden_state


def head_log_prob(head: Head, hidden: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    x, weight = in_half(hidden), in_half(head.weight)
    options = {"scale": head.scale, "softcap": head.softcap}
    return linear_log_prob(x, weight, target, ignore_index=IGNORED, temperature=temperature, **options)


def in_half(t: Tensor) -> Tensor:
    return t.to(torch.bfloat16) if t.dtype is torch.float32 else t
