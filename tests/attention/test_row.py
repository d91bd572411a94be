"""kernel_row*.py alone compute with scores, sums and outputs: no other module of the family names an operation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels.attention import config

KERNELS = sorted(Path(config.__file__).parent.glob("kernel_*.py"))
OTHERS = [path for path in KERNELS if not path.name.startswith("kernel_row")]
# Operations on floats by their names in the CuTe DSL, those of integers apart
OPERATION = re.compile(r"(exp2?|log2?|tanh|r?sqrt|rcp|fma|fmax|fmin|(add|sub|mul|fma)_packed_f32x2)(_\w+)?")
# Named operations of kernel_row.py, which its callers outside get within a step of the contract
PRIMITIVES = {"add", "multiply", "multiply_add", "exp2", "log2", "tanh", "choose"}
# An instruction on floats in PTX; the sums of dq are added in memory by a copy, in an order of its own
PTX = re.compile(r"\b(ex2|lg2|tanh|rcp|fma|add|sub|mul|max|min|div)\.[\w.]*f(16|32)")
ALLOWED = "cp.reduce.async.bulk"


def operations(source: str) -> Iterator[str]:
    """The operations on floats that a module has itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and OPERATION.fullmatch(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and "kernel_row" in (node.module or ""):
            yield from PRIMITIVES & {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and PTX.search(str(node.value)) and not node.value.startswith(ALLOWED):
            yield node.value


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_only_the_modules_of_a_row_compute(path):
    assert list(operations(path.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "p = cute.math.exp2(score, fastmath=True)",
        "m = cute.arch.fmax(a, b)",
        "pair = cute.arch.fma_packed_f32x2(a, b, c)",
        "from cute_kernels.attention.kernel_row import ROWS, multiply_add",
        "cute.arch.inline_ptx('fma.rn.ftz.f32 {$w0}, {$r0}, {$r1}, {$r2};')",
    ],
)
def test_an_operation_is_found(line):
    assert len(list(operations(line))) == 1


def test_the_modules_of_a_row_have_them():
    for path in set(KERNELS) - set(OTHERS):
        assert list(operations(path.read_text())), path.name
