"""torch's dtypes, as Specs have them, in the compiler's names. Imports no torch."""

from __future__ import annotations

from typing import Any, Optional

import cutlass

_NAMES = {
    "torch.bfloat16": cutlass.BFloat16,
    "torch.float16": cutlass.Float16,
    "torch.float32": cutlass.Float32,
    "torch.float8_e4m3fn": cutlass.Float8E4M3FN,
    "torch.float8_e5m2": cutlass.Float8E5M2,
    "torch.int32": cutlass.Int32,
    "torch.int64": cutlass.Int64,
}


def cutlass_dtype(dtype: Any) -> Optional[type[cutlass.Numeric]]:
    """The compiler's name of a torch.dtype; None stays None."""
    return None if dtype is None else _NAMES[str(dtype)]
