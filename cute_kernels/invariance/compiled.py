"""torch.compile's backend "cute_kernels": Inductor, with operators of this library where it would add up itself.

AOTAutograd takes a model's forward and backward apart by a table. This one is Inductor's own, but for the entries of
the operators that ``batch_invariant`` replaces, which become opaque operators of ours, and of those that it refuses,
which stay whole. The rest is elementwise, and Inductor fuses it as ever. The last pass over a graph refuses, by
name and with the line that called it, what still adds up.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends import registry
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._sympy.symbol import SymT, symbol_is_type

from cute_kernels.invariance import fused
from cute_kernels.invariance.compiled_operators import opaque_operators
from cute_kernels.invariance.errors import UncoveredOperatorError, signatures, tensors
from cute_kernels.invariance.operators import EXACT, adds_up, base_of, treatment_of
from cute_kernels.invariance.registration import computes_with_floats
from cute_kernels.runtime import operators
from cute_kernels.runtime.checks import FLOATS, expect
from cute_kernels.version import __version__

NAME = "cute_kernels"

# Options for Inductor, by name; those that a torch does not have are left out
SETTINGS: dict[str, Any] = {
    # Each operator rounds its result, as in eager mode: without it bits depend on what was fused. Nothing contracts a
    # product and a sum, divisions are rounded to nearest, and small numbers are not flushed to zero
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "use_fast_math": False,
    # No template in the place of a product, no pattern that makes sums of other operators or computes constants
    "max_autotune": False,
    "max_autotune_gemm": False,
    "pattern_matcher": False,
    "joint_graph_constant_folding": False,
    "fallback_random": True,  # the numbers that eager mode draws
}


class UncoveredInGraphError(UncoveredOperatorError, ShortenTraceback):
    """An operator that may add up in an order that depends on the batch, in code that torch.compile compiles."""

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)


def backend(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="cute_kernels", options=...)``: compiled code with the bits of eager code.

    Sums, products, norms, softmax, attention and what else ``batch_invariant`` replaces are opaque operators, in the
    forward and in the backward, and the same functions compute them. Inductor makes the rest, and rounds between
    operators as eager code does. So a row has the same bits in every graph: of any batch, of training and of inference.
    On a CPU torch's own kernels take the place of this library's.

    Args:
        graph: what Dynamo traced.
        example_inputs: its inputs.
        mode: None, "default" or "reduce-overhead", as of torch.compile.
        options: Inductor's options, but for those in ``SETTINGS``.

    Returns:
        The compiled graph.

    Raises:
        ValueError: another mode, or an option that the bits depend on.
        UncoveredOperatorError: the graph has an operator that adds up and is not covered, a Triton kernel, an operator
            of another library, or a higher-order operator. A backward of dynamic shapes may be compiled, and raise,
            where it runs for the first time.

    Example:
        >>> import torch
        >>> import cute_kernels.invariance.compiled  # where the package is not installed, this registers the name
        >>> model = torch.compile(torch.nn.Linear(4, 2), backend="cute_kernels")
    """
    return _compile(graph, example_inputs, mode, options, strict=True)


def forced(graph: GraphModule, example_inputs: Sequence[Any], strict: bool) -> Callable[..., Any]:
    """The backend of all functions while a block or ``install`` replaces: where nothing is on a GPU, none."""
    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    if not any(isinstance(t, Tensor) and operators.on_gpu(t) for t in values):
        return graph
    return _compile(graph, example_inputs, None, None, strict)


def _compile(
    graph: GraphModule, example_inputs: Sequence[Any], mode: str | None, options: dict[str, Any] | None, strict: bool
) -> Callable[..., Any]:
    given = dict(options or {})
    if mode not in (None, "default"):
        expect(mode == "reduce-overhead", "compile", "mode", "be None, 'default' or 'reduce-overhead'", repr(mode))
        given = torch._inductor.list_mode_options(mode) | given
    given = {name.replace("-", "_"): value for name, value in given.items()}
    for name, value in given.items():
        if name in SETTINGS:
            expected = f"be {SETTINGS[name]!r}, since bits depend on it"
            expect(value == SETTINGS[name], "compile", f"options[{name!r}]", expected, repr(value))
    if given.get("post_grad_custom_post_pass"):
        expect(False, "compile", "options['post_grad_custom_post_pass']", "be left out", "a pass")
    settings = {name: value for name, value in SETTINGS.items() if _is_setting(name)}
    _specialize_floats()
    _linear_as_one(graph)
    return compile_fx(
        graph,
        example_inputs,
        inner_compile=functools.partial(_inner_compile, strict),
        config_patches={**given, **settings, "post_grad_custom_post_pass": _Scan(strict)},
        decompositions=_table(),
    )


def _is_setting(name: str) -> bool:
    try:
        attrgetter(name)(inductor_config)
    except AttributeError:
        return False
    return True


# The graph that Dynamo traced


def _specialize_floats() -> None:
    """Numbers of Python are constants of a graph: Dynamo traces once more where it made one an input.

    torch would make a tensor of fp32 of it, and a product of bf16 by that one is not rounded.
    """
    context = torch._guards.TracingContext.try_get()
    shapes = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    if shapes is None:
        return
    values = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val
    names = [str(symbol) for symbol in values if symbol_is_type(symbol, SymT.FLOAT)]
    if not all(map(TensorifyState.should_specialize, names)):
        for name in names:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


def _linear_as_one(graph: GraphModule) -> None:
    """Product and bias of ``linear`` as one operator that rounds once, as eager code has them inside of a block.

    torch decides by the shape and strides of x, so by the batch, whether it rounds in between.
    """
    for module in graph.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=F.linear):
            given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
            x, weight, bias = (_example(given.get(name)) for name in ("input", "weight", "bias"))
            if bias is None or x is None or weight is None or x.dim() < 3 or not operators.on_gpu(x):
                continue
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(_linear_of_rows(module.graph, given, x.dim()))
            module.graph.erase_node(node)
        module.recompile()


def _linear_of_rows(graph: Graph, given: dict[str, Node], dims: int) -> Node:
    rows = graph.call_method("flatten", (given["input"], 0, -2))
    product = graph.call_function(torch.addmm, (given["bias"], rows, graph.call_method("t", (given["weight"],))))
    sizes = [graph.call_method("size", (given["input"], d)) for d in range(dims - 1)]
    return graph.call_method("view", (product, *sizes, -1))


def _example(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


# The table that takes its operators apart


def _table() -> dict[OpOverload, Callable[..., Any]]:
    """Inductor's own, with other entries for what adds up. An entry that returns NotImplemented leaves its operator."""
    own = dict(select_decomp_table())
    table = dict(own)
    for op in own:
        if not isinstance(op, OpOverload) or fused.may_fuse(op):
            continue
        if treatment_of(op).kind in ("exact", "refused") or _is_exact_by_name(op):
            table[op] = functools.partial(_whole, own[op])
    for op, entry in fused.entries().items():
        table[op] = functools.partial(fused.taken_apart, table.get(op, _stays), entry)
    for op, opaque in opaque_operators().items():
        table[op] = functools.partial(_replaced, op, opaque, table.get(op, _stays))
    return table


def _stays(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _whole(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An operator on floats that is refused, or may not be fused, stays whole and keeps its name.

    What "warn" lets run is a call, too, which the dispatcher counts where it runs: also of a graph that was compiled
    before.
    """
    return NotImplemented if computes_with_floats(args, kwargs) else own(*args, **kwargs)


def _replaced(op: OpOverload, opaque: OpOverload, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _adds_here(op, args, kwargs):
        return own(*args, **kwargs)
    first = next(tensors((*args, *kwargs.values())))
    return opaque(*args, **kwargs) if first.dtype in FLOATS else NotImplemented


def _adds_here(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that is replaced adds up floating-point numbers.

    ``index_put`` may also store them, and a loss may keep its elements.
    """
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "accumulate" or (argument.name == "reduction" and _is_exact_by_name(op)):
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            if not value:
                return False
    return computes_with_floats(args, kwargs)


def _is_exact_by_name(op: OpOverload) -> bool:
    """Whether it is exact where it is not told to add up."""
    return op.namespace == "aten" and base_of(op._schema.name.partition("::")[2]) in EXACT


# The graph that Inductor lowers


def _inner_compile(strict: bool, graph: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    _check(graph.graph, strict)
    return compile_fx_inner(graph, example_inputs, **options)


def _check(graph: Graph, strict: bool) -> None:
    """Refuse what adds up and is not ours; in "warn" mode say so."""
    found = [_sentence(node, why) for node in graph.nodes if (why := uncovered(node)) is not None]
    if found and strict:
        raise UncoveredInGraphError("\n".join(found))
    for sentence in found:
        warnings.warn(sentence, stacklevel=2)


class _Scan(CustomGraphPass):
    """The check once more, of what Inductor's passes left; this library's version and tables in the caches' keys."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def uuid(self) -> Any:
        files = sorted(Path(__file__).parent.glob("*.py"))
        return __version__, self.strict, get_hash_for_files(tuple(map(str, files)))

    def __call__(self, graph: Graph) -> None:
        if self.strict:
            _check(graph, True)
        fused.calls_for_the_rest(graph)


def uncovered(node: Node) -> str | None:
    """Why a node may not stay in a graph; None: it may."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, (OpOverload, HigherOrderOperator)):
        return None  # arithmetic of sizes, items of results
    args, kwargs = _values(node)
    if op in (auto_functionalized, auto_functionalized_v2):
        op, args = args[0], args[1:]  # an operator that writes to its arguments
    if isinstance(op, HigherOrderOperator):
        return "it is a higher-order operator: what it runs is not seen"
    if not computes_with_floats(args, kwargs):
        return None
    treatment = treatment_of(op)
    if treatment.kind == "replaced":
        return (treatment.reason or "its dtypes are not covered") if _adds_here(op, args, kwargs) else None
    return treatment.reason if treatment.kind == "refused" and adds_up(treatment, op, args, kwargs) else None


def _values(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Its arguments, fake tensors in the place of nodes."""
    return map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))


def _sentence(node: Node, why: str) -> str:
    op = node.args[0] if node.target in (auto_functionalized, auto_functionalized_v2) else node.target
    args, kwargs = _values(node)
    given = ", ".join(signatures((*args, *kwargs.values())))
    return f"batch_invariant: {op} of {given} is not covered in compiled code{_place(node)}" + (
        f"; {why}" if why else ""
    )


_FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)\n?(.*)')
_TORCH = str(Path(torch.__file__).parent)


def _place(node: Node) -> str:
    """The innermost line outside of torch that led to a node."""
    frames = [f.groups() for f in _FRAME.finditer(node.stack_trace or "") if not f.group(1).startswith(_TORCH)]
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    return f", at {file}:{line} in {function}" + (f": {code.strip()}" if code.strip() else "")


def register() -> None:
    """Make the backend's name known, as the package's entry point does where it is installed."""
    registry._BACKENDS.setdefault(NAME, EntryPoint(NAME, f"{__name__}:backend", "torch_dynamo_backends"))


register()
