"""Static choices of routing, of the ways between tokens and experts' rows, and of the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MAX_EXPERTS = 1024
MAX_K = 32  # experts of a token: a warp's lanes
OAI = 7.0, 1.702  # limit and alpha of the activation "swiglu_oai", gpt-oss'
WARP = 32
WARPS = 8  # of a CTA, except in plan
PLAN_THREADS = 1024  # of a CTA that plans
ONE_BLOCK = 2048  # slots up to which one CTA plans all: a second launch takes longer than a second turn
MAX_BLOCKS = 128  # each CTA reads the counts of all


class RouteSpec(NamedTuple):
    """Routing of ``num_experts`` logits to ``k`` of them.

    Attributes:
        score: "chosen": softmax over the chosen logits; "softmax": over all; "sigmoid".
        has_bias: of scores, for the selection alone.
        groups, kept_groups: experts are in so many groups, of which so many remain, by the sum of their two best; 1, 1:
            all.
        normalize: scores are divided by the sum of the chosen ones, and an eps.
        replays: the experts are given.
    """

    num_experts: int
    k: int
    score: str
    has_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    normalize: bool = False
    replays: bool = False


class PlanSpec(NamedTuple):
    """Places of the slots of tokens among the rows of ``num_experts``, each group's end at multiples of ``align``.

    Attributes:
        has_table: slots are in several blocks, each counted before.
    """

    num_experts: int
    align: int
    has_table: bool = False


def plan_blocks(slots: int) -> tuple[int, int]:
    """(blocks of so many slots, a CTA each; slots of a warp)."""
    turns = -(-slots // (PLAN_THREADS * (MAX_BLOCKS if slots > ONE_BLOCK else 1)))
    return -(-slots // (PLAN_THREADS * turns)), turns * WARP


class GatherSpec(NamedTuple):
    """Rows of experts from rows of tokens, ``k`` slots each.

    Attributes:
        weighted: a row is multiplied with its slot's weight.
        dots: also the product of each row with another one, for its slot.
    """

    dtype: torch.dtype
    k: int
    weighted: bool = False
    dots: bool = False


class CombineSpec(NamedTuple):
    """Rows of tokens from the rows of their ``k`` slots.

    Attributes:
        weighted: each times its slot's weight.
        biased: each has the bias of its slot's expert added before.
    """

    dtype: torch.dtype
    k: int
    weighted: bool
    biased: bool = False


class GateSpec(NamedTuple):
    """h = silu(g) u of z = (g, u), or their gradients.

    Attributes:
        interleaved: columns of g and u in turn, not halves.
        limit: g is at most this, u within it; None: as they are.
        alpha: h = (u + 1) g sigmoid(alpha g); None: u g sigmoid(g).
        weighted: of gradients: a row's is multiplied with its slot's weight, and so is h, which is stored, too.
        function: "geglu": h = gelu(g) u; "silu": h = silu(z), z of as many columns.
        biased: z has the bias of its row's expert added before.
    """

    dtype: torch.dtype
    interleaved: bool = False
    limit: float | None = None
    alpha: float | None = None
    weighted: bool = False
    function: str = "swiglu"
    biased: bool = False
