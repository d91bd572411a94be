"""Tokens that are guessed, and kept where a forward of all of them draws the same ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.models.decoding import Paged


def speculated(
    steps: Paged, draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], width: int, new: int, ends: Tensor, pad: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, log_probs, lengths) of ``new`` tokens behind each prompt, ``width`` of them guessed at a time.

    ``draw`` gives tokens and log-probabilities of hidden states (B, rows, C) and the places (B, rows) of the tokens.
    A token depends on its row, its seed and its place, so those that are kept are those of a step at a time.
    """
    prompts = steps.prompts
    first, device = prompts.lengths, prompts.right.device
    batch, longest = prompts.right.shape
    end = first + new  # of each sequence
    ids = torch.nn.functional.pad(prompts.right, (0, new), value=pad)
    log_probs = torch.zeros(ids.shape, dtype=torch.float32, device=device)
    count = first.clone()  # tokens of each sequence; the cache has all but the last one
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    rows = torch.arange(width + 1, device=device)
    tokens, log_p = draw(steps.begin().unsqueeze(1), first.unsqueeze(1))
    guesses = tokens[:, :0]
    while True:
        # A guess that was drawn makes the row behind it good
        good = torch.nn.functional.pad((tokens[:, :-1] == guesses).cumprod(1), (1, 0), value=1).bool()
        is_end = torch.isin(tokens, ends)
        good &= (is_end.cumsum(1) - is_end.long()) == 0
        places = count.unsqueeze(1) + rows[: tokens.shape[1]]
        good &= (places < end.unsqueeze(1)) & ~finished.unsqueeze(1)
        sequence, row = good.nonzero(as_tuple=True)
        ids[sequence, places[sequence, row]] = tokens[sequence, row]
        log_probs[sequence, places[sequence, row]] = log_p[sequence, row]
        count += good.sum(1)
        finished |= (is_end & good).any(1) | (count >= end)
        kept, is_done = torch.stack([count.max() - 1, finished.all().long()]).tolist()
        if is_done:
            break
        steps.cache.keep(count - 1, kept)
        guesses = look_up(ids, count, width)
        last = ids.gather(1, count.unsqueeze(1) - 1)
        places = torch.minimum(count.unsqueeze(1) + rows, end.unsqueeze(1))  # rows behind the end are not kept
        hidden = steps.forward(torch.cat([last, guesses], 1), places - 1)
        tokens, log_p = draw(hidden, places)
    lengths = count - first
    columns = torch.arange(int(lengths.max()), device=device)
    places = (first.unsqueeze(1) + columns).clamp(max=ids.shape[1] - 1)
    has_token = columns < lengths.unsqueeze(1)
    tokens = torch.where(has_token, ids.gather(1, places), pad)
    return tokens, torch.where(has_token, log_probs.gather(1, places), 0.0), lengths


def look_up(ids: Tensor, count: Tensor, width: int) -> Tensor:
    """(B, width): what followed when the last two of each sequence's ``count`` tokens came before, the last time.

    Where they did not: what stands first. A sequence of one token has no two: its last one counts twice.
    """
    places = torch.arange(ids.shape[1], device=ids.device)
    last = ids.gather(1, count.unsqueeze(1) - 1)
    before = ids.gather(1, (count.unsqueeze(1) - 2).clamp(min=0))
    same = (ids[:, :-1] == before) & (ids[:, 1:] == last) & (places[1:] < count.unsqueeze(1) - 1)
    found = torch.where(same, places[1:], -1).amax(1, keepdim=True) + 1
    return ids.gather(1, (found + places[:width]).clamp(max=ids.shape[1] - 1))
