"""Cases of sample: logits as models have them, with many that are equal, and with infinities."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    dtype: torch.dtype = BF16
    kind: str = "model"
    options: tuple = field(default=())

    def __str__(self) -> str:
        options = "".join(f"-{name}={value}" for name, value in self.options)
        return f"{self.rows}x{self.columns}-{str(self.dtype).removeprefix('torch.')}-{self.kind}{options}"


def make_logits(case: Case, generator: torch.Generator) -> Tensor:
    """Logits of a kind.

    model: spread of 4, a few large ones; flat: spread of 1/100; ties: few values; holes: infinities and NaN, too; last:
    the last one is the largest.
    """
    shape = case.rows, case.columns
    x = torch.randn(shape, generator=generator, device=generator.device)
    if case.kind == "model":
        x = 4 * x
        x[:, :: max(case.columns // 3, 1)] += 9
    elif case.kind == "flat":
        x = x / 100
    elif case.kind == "ties":
        x = x.round()
    elif case.kind == "last":
        x[:, -1] = 9
    elif case.kind == "holes":
        x[:, ::3] = -math.inf
        x[:, 1::5] = math.nan
        x[::4] = -math.inf
        x[1::4, case.columns // 2] = math.inf
        x[2::4, -1] = -0.0
    return x.to(case.dtype)


def make_inputs(case: Case, generator: torch.Generator) -> dict:
    """The arguments of a call."""
    device, rows = generator.device, case.rows
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator, device=device)
    positions = torch.randint(2**32, (rows,), generator=generator, device=device)
    logits = make_logits(case, generator)
    return {"logits": logits, "seeds": seeds, "positions": positions, **dict(case.options)}
