"""More than 2^31 elements: offsets need 64 bits. Up to 30 GB of memory and a few seconds a case."""

import pytest
import torch

from tests.norm.cases import BF16, FP32, Case, Inputs, call, call_and_differentiate

pytestmark = pytest.mark.slow


# A tile of one row, and a tile of many rows that lies in one block
@pytest.mark.parametrize("case", [Case("rms", 4096), Case("layer", 64, weight=FP32, bias=FP32)], ids=str)
def test_more_than_2_31_elements(case, norm, generator):
    n = case.n
    rows = 2**31 // n + 3
    if torch.cuda.mem_get_info()[0] < 36e9:
        pytest.skip("needs 36 GB of free GPU memory")

    def randn(*shape, dtype=BF16):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    inputs = Inputs(
        randn(rows, n).requires_grad_(),
        randn(n, dtype=case.weight).requires_grad_(),
        None if case.bias is None else randn(n, dtype=case.bias).requires_grad_(),
        dy=randn(rows, n),
    )
    found = call_and_differentiate(norm, case, inputs)

    # The first rows, those around byte 2^31 and around element 2^31: the same bits as alone
    for begin in (0, 2**30 // n - 2, rows - 5):
        part = Inputs(
            inputs.x.detach()[begin : begin + 5].clone().requires_grad_(),
            inputs.weight,
            inputs.bias,
            dy=inputs.dy[begin : begin + 5].clone(),
        )
        alone = call_and_differentiate(norm, case, part)
        for name in ("y", "dx"):
            assert torch.equal(found[name][begin : begin + 5], alone[name]), f"{name} from row {begin}"

    # All rows, in blocks: dw and db are sums of what the blocks sum to, y is what the blocks give
    block = 2**27 // n
    sums = {name: torch.zeros(n, dtype=torch.float64, device="cuda") for name in found.keys() & {"dw", "db"}}
    for begin in range(0, rows, block):
        x = inputs.x.detach()[begin : begin + block]
        dy = inputs.dy[begin : begin + block]
        h = x.float()
        if case.kind == "layer":
            h = h - h.mean(-1, keepdim=True)
        x_hat = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
        sums["dw"] += (dy * x_hat).sum(0, dtype=torch.float64)
        if "db" in sums:
            sums["db"] += dy.sum(0, dtype=torch.float64)
        y = call(norm, case, Inputs(x, inputs.weight, inputs.bias))["y"]
        assert torch.equal(y, found["y"][begin : begin + block])
    for name, total in sums.items():
        error = ((found[name].double() - total).norm() / total.norm()).item()
        assert error < (1.8e-3 if found[name].dtype is BF16 else 1e-4), f"{name}: {error:.2e}"
