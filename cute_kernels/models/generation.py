"""generate: tokens drawn by ``sample`` behind prompts, with the log-probabilities that ``log_prob`` gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from cute_kernels.gemm import linear
from cute_kernels.models.families import Head, head_of, model_of
from cute_kernels.models.scoring import check_ids, check_mask, head_log_prob, hidden_states, in_half
from cute_kernels.runtime.checks import expect, expect_dtype, expect_int, expect_tensor
from cute_kernels.runtime.real import as_float
from cute_kernels.sampling import sample

OP = "models.generate"
PAGE_SIZE = 128
CacheName = Literal["paged", "static"]
Stop = Callable[[Tensor, Tensor], Tensor]


class Generation(NamedTuple):
    """The results of ``models.generate``.

    Args:
        tokens: (B, new tokens) int64; behind a sequence's end the pad token.
        log_probs: (B, new tokens) fp32, in nats; 0 behind the end.
        lengths: (B,) int64: new tokens of each sequence, the one that ended it among them.

    Example:
        >>> import torch
        >>> from cute_kernels.models import Generation
        >>> Generation(torch.tensor([[5, 2]]), torch.tensor([[-1.0, -0.5]]), torch.tensor([2])).tokens.shape
        torch.Size([1, 2])
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor


class _Choice(NamedTuple):
    """How a token is chosen of logits; None: of all."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...]


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    seeds: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop: Stop | Sequence[Stop] = (),
    logits_processors: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
    cache: CacheName = "paged",
) -> Generation:
    """New tokens behind each prompt, which depend on the prompt and its seed alone: not on the batch, nor its order.

    Where an argument is None the model's ``generation_config`` decides, if it says something. Its ``do_sample`` is not
    looked at: tokens are drawn, unless the temperature is 0.

    Args:
        model: a causal language model of transformers that ``prepare`` has prepared, or peft's model of it.
        input_ids: (B, S) int64, the prompts.
        seeds: (B,) int64 on the same device: of each sequence. The noise of its token at position p is a function of
            seed and p.
        attention_mask: (B, S): 0 where a prompt is padded, left or right; None: nowhere.
        max_new_tokens: of each sequence, from 1.
        temperature: the divisor of the logits, 0 or from 1e-6 to 1e6; 0: the largest logit. 1 if nothing says more.
        top_k: draw of the k largest logits alone.
        top_p: draw of the fewest whose probabilities add up to this share, in (0, 1].
        min_p: draw of those that have at least this share of the largest probability, in [0, 1].
        eos_token_id: the token or tokens that end a sequence; none if nothing says more.
        pad_token_id: of places behind the end; the first eos_token_id if nothing says more.
        stop: functions of (ids, logits) that return (B,) bool, which sequences end: transformers' stopping criteria.
            ids are prompt and new tokens, padded left; logits (B, V) fp32 those that the last token was drawn of.
        logits_processors: functions of (ids, logits) that return logits (B, V), transformers' logits processors, before
            the temperature; log_probs are those of the logits before them.
        cache: "paged": a ``PagedCache``; "static": transformers' StaticCache.

    Returns:
        ``Generation``: tokens, log_probs, lengths.

    Raises:
        TypeError: no model of transformers; other dtypes; no max_new_tokens.
        ValueError: seeds of another length; padding inside of a prompt, or a prompt without a token; a temperature,
            top_k, top_p or min_p out of range; beam search; a model that is not known, or not prepared.

    Numerics:
        A token is ``sample`` of the row's fp32 logits, scale and softcap before the temperature. Its log-probability
        is that of the unfiltered distribution at the sampling temperature (of greedy choices at 1), by
        ``linear_log_prob``: inside of ``batch_invariant``, on a GPU, the bits of ``models.log_prob`` over the whole
        sequence. The host waits for the device once a step where a sequence may end.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from cute_kernels import models
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
        ... )
        >>> model = models.prepare(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        >>> prompts, seeds = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([1, 2])
        >>> tokens, log_probs, lengths = models.generate(
        ...     model, prompts, seeds=seeds, max_new_tokens=4, eos_token_id=[]
        ... )
        >>> tokens.shape, lengths
        (torch.Size([2, 4]), tensor([4, 4]))
    """
    found = model_of(OP, model)
    head, settings = head_of(OP, found), found.generation_config
    check_ids(OP, input_ids)
    expect(found.config._attn_implementation == "cute_kernels", OP, "model", "be prepared (models.prepare)", "another")
    expect(cache in get_args(CacheName), OP, "cache", "be 'paged' or 'static'", repr(cache))
    beams = getattr(settings, "num_beams", None)
    expect(beams in (None, 1), OP, "model's generation_config", "have no beam search", f"num_beams {beams}")

    def default(name: str, given: Any, otherwise: Any = None) -> Any:
        said = getattr(settings, name, None) if given is None else given
        return otherwise if said is None else said

    batch, width = input_ids.shape
    expect_tensor(OP, "seeds", seeds)
    expect_dtype(OP, "seeds", seeds.dtype, (torch.int64,))
    good = seeds.shape == (batch,) and seeds.device == input_ids.device
    expect(good, OP, "seeds", f"have shape ({batch},) on {input_ids.device}", f"{tuple(seeds.shape)} on {seeds.device}")
    steps = default("max_new_tokens", max_new_tokens)
    expect_int(OP, "max_new_tokens", steps)
    expect(steps > 0, OP, "max_new_tokens", "be positive", steps)
    choice = _Choice(
        as_float(default("temperature", temperature, 1.0)),
        *(default(name, given) for name, given in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p))),
        tuple(logits_processors),
    )
    ends = default("eos_token_id", eos_token_id, [])
    ends = [ends] if isinstance(ends, int) else list(ends)
    pad = default("pad_token_id", pad_token_id, ends[0] if ends else 0)
    stops = (stop,) if callable(stop) else tuple(stop)
    prompts = _Prompts(input_ids, attention_mask, pad)
    model_steps = (_Paged if cache == "paged" else _Static)(found, prompts, steps)

    end_tokens = torch.tensor(ends, dtype=torch.int64, device=input_ids.device)
    finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    tokens = input_ids.new_full((batch, steps), pad)
    log_probs = torch.zeros(batch, steps, dtype=torch.float32, device=input_ids.device)
    lengths = torch.zeros_like(seeds)
    ids = prompts.left if choice.processors or stops else None
    hidden = model_steps.begin()
    for step in range(steps):
        token, log_p, logits = _choose(head, hidden, choice, ids, seeds, prompts.lengths + step)
        tokens[:, step] = torch.where(finished, pad, token)
        log_probs[:, step] = torch.where(finished, 0.0, log_p)
        lengths += ~finished
        if ids is not None:
            ids = torch.cat([ids, tokens[:, step : step + 1]], 1)
        for criterion in stops:
            finished = finished | criterion(ids, logits)
        if ends:
            finished = finished | torch.isin(token, end_tokens)
        if (ends or stops) and bool(finished.all()):
            return Generation(tokens[:, : step + 1], log_probs[:, : step + 1], lengths)
        if step + 1 < steps:
            hidden = model_steps.next(tokens[:, step : step + 1])
    return Generation(tokens, log_probs, lengths)


def _choose(
    head: Head, hidden: Tensor, choice: _Choice, ids: Tensor | None, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, their log-probabilities, the logits before processors) of rows (B, C)."""
    logits = linear(in_half(hidden), in_half(head.weight), out_dtype=torch.float32)
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    scores = logits
    for processor in choice.processors:
        scores = processor(ids, scores)
    filters = {"top_k": choice.top_k, "top_p": choice.top_p, "min_p": choice.min_p}
    token = sample(scores, seeds=seeds, positions=positions, temperature=choice.temperature, **filters)
    log_p, _ = head_log_prob(head, hidden, token, choice.temperature or 1.0)
    return token, log_p, logits


class _Prompts:
    """Prompts padded on the right, on the left, and how many tokens each has."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None, pad: int) -> None:
        batch, width = input_ids.shape
        self.right = self.left = input_ids
        self.present = torch.ones_like(input_ids)
        self.lengths = torch.full_like(input_ids[:, 0], width)
        if attention_mask is None:
            return
        check_mask(OP, attention_mask, input_ids)
        real = attention_mask.bool()
        self.lengths = real.sum(1)
        first, places = real.int().argmax(1, keepdim=True), torch.arange(width, device=input_ids.device)
        together = (places >= first) & (places < first + self.lengths[:, None])
        good = bool(((real == together).all(1) & (self.lengths > 0)).all())
        expect(good, OP, "attention_mask", "have tokens in each row, without a gap between them", "one that has not")
        self.right = input_ids.gather(1, (places + first).clamp(max=width - 1))
        padding = width - self.lengths[:, None]
        self.present = (places >= padding).to(input_ids.dtype)
        self.left = torch.where(self.present > 0, self.right.gather(1, (places - padding).clamp(min=0)), pad)


class _Paged:
    """Forwards over a PagedCache: prompts padded right, whose padding is forgotten; no masks."""

    def __init__(self, model: Any, prompts: _Prompts, steps: int) -> None:
        from cute_kernels.models.cache import PagedCache

        batch, width = prompts.right.shape
        self.model, self.prompts = model, prompts
        self.cache = PagedCache(model.config, batch * -(-(width + steps) // PAGE_SIZE), PAGE_SIZE)
        self.positions = prompts.lengths[:, None].clone()

    def begin(self) -> Tensor:
        ids, lengths = self.prompts.right, self.prompts.lengths
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = self._forward(ids, positions)
        self.cache.keep(lengths)
        return hidden[torch.arange(len(ids), device=ids.device), lengths - 1]

    def next(self, tokens: Tensor) -> Tensor:
        hidden = self._forward(tokens, self.positions)
        self.positions += 1
        return hidden[:, 0]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return hidden_states(self.model, ids, position_ids=positions, past_key_values=self.cache, use_cache=True)


class _Static:
    """Forwards over transformers' StaticCache: prompts padded left, by a mask."""

    def __init__(self, model: Any, prompts: _Prompts, steps: int) -> None:
        from transformers import StaticCache

        self.model, self.prompts, self.mask = model, prompts, prompts.present
        self.cache = StaticCache(model.config, prompts.left.shape[1] + steps)
        self.positions = prompts.lengths[:, None].clone()

    def begin(self) -> Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(self.prompts.left, positions)

    def next(self, tokens: Tensor) -> Tensor:
        self.mask = nn.functional.pad(self.mask, (0, 1), value=1)
        hidden = self._forward(tokens, self.positions)
        self.positions += 1
        return hidden

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        options = {"position_ids": positions, "past_key_values": self.cache, "use_cache": True}
        return hidden_states(self.model, ids, attention_mask=self.mask, **options)[:, -1]
