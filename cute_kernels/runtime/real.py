"""Numbers that a caller gives, in the one type that keys and operators hold. Imports no torch."""

from __future__ import annotations

import numbers


def as_float(value: object) -> object:
    """A real number, such as an int or numpy's float32, as a float. All else as it is, a bool too, for the checks.

    Keys of kernels need it: 1, True and numpy's 1.0 are equal to 1.0.
    """
    if type(value) is float or isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return value
