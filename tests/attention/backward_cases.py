"""Helpers for the tests of attention's backward on a GPU."""

import math

import torch
from torch import Tensor

from cute_kernels import attention
from cute_kernels.attention import reference
from cute_kernels.attention.config import BACKWARD_CONFIGS, BackwardSpec, backward_config
from cute_kernels.attention.launch.backward import BackwardLaunch
from cute_kernels.runtime.targets import target_of
from tests.attention.cases import BF16, Case, gradients_of, make_inputs, same_bits

SIZES = tuple(BACKWARD_CONFIGS)  # beyond 128 channels warpgroups split the channels: all is shown for each
NAMES = "dq", "dk", "dv"


def case_of(
    sizes: tuple[int, int],
    batch: int,
    len_q: int,
    len_k: int,
    heads: int,
    pairs: int,
    causal: bool = True,
    dtype: torch.dtype = BF16,
) -> Case:
    return Case(batch, len_q, len_k, heads, pairs, sizes[0], causal, dtype, sizes[1])


def spec_of(case: Case, grouped: bool) -> BackwardSpec:
    d, dv = case.sizes
    return BackwardSpec(case.dtype, d, case.causal, grouped, head_size_v=0 if d == dv else dv)


class Saved:
    """The arguments of a backward: the forward's inputs and results, and incoming gradients."""

    def __init__(self, case: Case, generator: torch.Generator, through_lse: bool = False):
        self.case, self.inputs = case, make_inputs(case, generator)
        self.out, self.lse = attention(*self.inputs, causal=case.causal, return_lse=True)
        self.dout = torch.randn(self.out.shape, generator=generator, device="cuda").to(case.dtype)
        self.dlse = torch.randn(self.lse.shape, generator=generator, device="cuda") if through_lse else None

    def run(self, config=None, num_sms: int | None = None, inputs=None, **changed) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients; of other tensors, with another config, on as many CTAs."""
        q, k, v = self.inputs if inputs is None else inputs
        of = {"dout": self.dout, "out": self.out, "lse": self.lse, "dlse": self.dlse} | changed
        spec = spec_of(self.case, q.shape[2] != k.shape[2])
        target = target_of(0)
        launch = BackwardLaunch.of(target, spec, config or backward_config(spec))
        gradients = tuple(torch.full(t.shape, math.nan, dtype=t.dtype, device="cuda") for t in (q, k, v))
        launch = launch._replace(num_sms=num_sms or target.num_sms)
        of_row, scale = (of["out"], of["lse"], of["dlse"]), self.case.head_size**-0.5
        launch.run(of["dout"], q, k, v, *of_row, (*gradients, torch.empty(0, device="cuda")), scale)
        return gradients

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        def call(q, k, v):
            return reference.attention(q, k, v, causal=self.case.causal, return_lse=True)

        return gradients_of(call, [t.double() for t in self.inputs], self.dout, self.dlse)


def assert_same(found, wanted, names=NAMES) -> None:
    for name, a, b in zip(names, found, wanted, strict=True):
        different = (a != b).nonzero()
        assert same_bits(a, b), (
            f"{name}: {len(different)} of {a.numel()} elements differ, first {different[:1].tolist()}"
        )
