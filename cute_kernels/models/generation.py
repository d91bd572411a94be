"""generate: tokens drawn by ``sample`` behind prompts, with the log-probabilities that ``log_prob`` gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from cute_kernels.models.choosing import check_seeds, choose, settings_of
from cute_kernels.models.decoding import OP, Captured, Paged, Prompts, Static
from cute_kernels.models.families import expect_frequencies, head_of, model_of
from cute_kernels.models.scoring import check_ids
from cute_kernels.models.sharding import gathered
from cute_kernels.models.speculation import speculated
from cute_kernels.runtime import operators
from cute_kernels.runtime.checks import expect, expect_int

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


@torch.no_grad()
@gathered
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
    graph: bool = False,
    speculate: int | None = None,
) -> Generation:
    """New tokens behind each prompt, which depend on the prompt and its seed alone: not on the batch, nor its order.

    Where an argument is None the model's ``generation_config`` decides, if it says something. Its ``do_sample`` is not
    looked at: tokens are drawn, unless the temperature is 0. A penalty, a shortest length or forbidden words there are
    an error, since they would be lost: give such processors as ``logits_processors``.

    Args:
        model: a causal language model of transformers that ``prepare`` has prepared, or peft's model of it.
            If FSDP2 shards it, all ranks have to make as many steps.
        input_ids: (B, S) int64, the prompts.
        seeds: (B,) int64 on the same device: of each sequence. The noise of its token at position p is a function of
            seed and p.
        attention_mask: (B, S): 0 where a prompt is padded, left or right; None: nowhere.
        max_new_tokens: of each sequence, from 1.
        temperature: the divisor of the logits, 0 or from 1e-6 to 1e6; 0: the largest logit. 1 if nothing says more.
            ``log_prob`` has to be told, where it is not 1.
        top_k: draw of the k largest logits alone; 0: of all.
        top_p: draw of the fewest whose probabilities add up to this share, in (0, 1].
        min_p: draw of those that have at least this share of the largest probability, in [0, 1].
        eos_token_id: the token or tokens that end a sequence; none if nothing says more.
        pad_token_id: of places behind the end; the first eos_token_id if nothing says more.
        stop: functions of (ids, logits) that return (B,) bool, which sequences end: transformers' stopping criteria.
            ids are prompt and new tokens, padded left; logits (B, V) fp32 those that the last token was drawn of.
        logits_processors: functions of (ids, logits) that return logits (B, V), transformers' logits processors, before
            the temperature; log_probs are those of the logits before them.
        cache: "paged": a ``PagedCache``; "static": transformers' StaticCache.
        graph: replay the steps of decoding from a CUDA graph, which each call captures in its third step: for many
            tokens of a small model, where the host takes longer than the device.
        speculate: guess so many tokens behind each new one, which are those that followed the last two tokens when
            they came before, and keep those that a forward of all of them draws, too. The results are the same.

    Returns:
        ``Generation``: tokens, log_probs, lengths.

    Raises:
        TypeError: no model of transformers; other dtypes; no max_new_tokens.
        ValueError: seeds of another length; padding inside of a prompt, or a prompt without a token; a temperature,
            top_k, top_p or min_p out of range; a generation_config with beam search or penalties; a model that is not
            known, or not prepared; graph or speculate with logits_processors or another cache than "paged", or
            together; graph on a CPU; speculate with stop.

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
    head = head_of(OP, found)
    check_ids(OP, input_ids)
    steps, choice, ends, pad = settings_of(
        OP,
        found,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        processors=logits_processors,
    )
    expect_frequencies(OP, found)
    expect(cache in get_args(CacheName), OP, "cache", "be 'paged' or 'static'", repr(cache))
    batch, width = input_ids.shape
    check_seeds(OP, seeds, batch, input_ids.device)
    stops = (stop,) if callable(stop) else tuple(stop)
    for name, given in (("graph", graph), ("speculate", speculate is not None)):
        good = not given or (cache == "paged" and not choice.processors)
        expect(good, OP, name, "come with cache='paged' and no logits_processors", "others")
    prompts = Prompts(input_ids, attention_mask, pad)
    end_tokens = torch.tensor(ends, dtype=torch.int64, device=input_ids.device)
    if speculate is not None:
        expect_int(OP, "speculate", speculate)
        expect(speculate > 0, OP, "speculate", "be positive", speculate)
        expect(not stops and not graph, OP, "speculate", "come without stop and graph", "one of them")

        def draw_rows(hidden: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
            of_rows = seeds.unsqueeze(1).expand_as(places).flatten()
            token, log_p, _ = choose(head, hidden.flatten(0, 1), choice, None, of_rows, places.flatten())
            return token.view_as(places), log_p.view_as(places)

        paged = Paged(found, prompts, steps + speculate)
        return Generation(*speculated(paged, draw_rows, speculate, steps, end_tokens, pad))
    expect(not graph or operators.on_gpu(input_ids), OP, "graph", "be False on a CPU", graph)
    finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    tokens = input_ids.new_full((batch, steps), pad)
    log_probs = torch.zeros(batch, steps, dtype=torch.float32, device=input_ids.device)
    lengths = torch.zeros_like(seeds)
    ids = prompts.left if choice.processors or stops else None

    def draw(hidden: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return choose(head, hidden, choice, ids, seeds, places)

    model_steps = (Paged if cache == "paged" else Static)(found, prompts, steps)
    captured = Captured(model_steps, draw) if graph else None  # type: ignore[arg-type]
    token, log_p, logits = draw(model_steps.begin(), prompts.lengths)
    for step in range(steps):
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
            last = tokens[:, step : step + 1]
            if captured is not None:
                token, log_p, logits = captured.next(last)
            else:
                token, log_p, logits = draw(model_steps.next(last), prompts.lengths + step + 1)
    return Generation(tokens, log_probs, lengths)
