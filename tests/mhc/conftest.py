"""The kernels that the collected tests name are precompiled, in parallel: one takes one to ten seconds."""

from dataclasses import replace

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.runtime.targets import arch_of
from tests.fakes import fake_kernels
from tests.mhc.cases import (
    OPERATIONS,
    Case,
    call,
    differentiate,
    make_inputs,
    make_upstream,
    precision_of,
    seeded_generator,
)
from tests.precompiled import precompile


@pytest.fixture(scope="session", autouse=True)
def mhcs_precompiled(request):
    if not torch.cuda.is_available():
        return
    calls = {}
    for item in request.session.items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        case = values.get("case")
        if isinstance(case, Case):
            for op in values.get("forward_of") or ([values["op"]] if "op" in values else OPERATIONS):
                calls[op, case, values.get("precision", "tf32"), "forward_of" not in values] = None
    precompile(kernels_of(calls, arch_of(0)))


def kernels_of(calls, arch):
    """(builder, arguments) of what (op, case, precision, whether backward) of ``calls`` need."""
    with fake_kernels(arch, computes=False) as jobs:
        for op, case, precision, backward in calls:
            few = replace(case, tokens=(2,))
            generator = seeded_generator(str(few), "cpu")
            tensors, options = make_inputs(few, generator), precision_of(op, precision)
            if backward:
                differentiate(mhc, op, few, tensors, make_upstream(op, few, generator), **options)
            call(mhc, op, few, tensors, **options)
            with torch.no_grad():
                call(mhc, op, few, tensors, **options)
    return list(dict.fromkeys(jobs))
