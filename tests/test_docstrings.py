"""Every public docstring is complete by itself, and its example runs on the CPU."""

import doctest
import inspect
import re

import pytest

import cute_kernels
import cute_kernels.compat.batch_invariant_ops
import cute_kernels.integrations.vllm
import cute_kernels.models
import cute_kernels.nn
import jit_cache

PACKAGES = (
    cute_kernels,
    cute_kernels.mhc,
    cute_kernels.reduction,
    cute_kernels.scatter,
    cute_kernels.models,
    cute_kernels.compat,
    cute_kernels.compat.batch_invariant_ops,
    cute_kernels.integrations.vllm,
    cute_kernels.nn,
    jit_cache,
)
PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in PACKAGES
    for name in package.__all__
    if callable(getattr(package, name))  # neither a module nor VARIANTS
}
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Numerics|Source|Example):(.*)\n((?:(?:    .*)?\n)*)", re.MULTILINE)


@pytest.fixture(params=PUBLIC)
def public(request):
    return request.param, PUBLIC[request.param]


def sections(thing):
    return {name: (rest, text) for name, rest, text in SECTION.findall(f"{inspect.getdoc(thing)}\n")}


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_example_runs(public):
    name, thing = public
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs={}) or (None,)
    assert test is not None and test.examples, f"{name} has no example"
    assert "Example" in sections(thing), f"{name}: the example is in no section"
    printed = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=printed.append).failed == 0, "".join(printed)


def test_sections_are_complete(public):
    name, thing = public
    found = sections(thing)
    for section, (rest, text) in found.items():
        assert rest == "" and text.strip(), f"{name}: the header of {section} is not alone on its line"
    for section in ("Args", "Returns", "Raises"):
        _, text = found.get(section, ("", ""))
        elsewhere = re.search(r"\bas in ``|(?:^ *|: )as ``", text, re.MULTILINE)
        assert not elsewhere, f"{name}: {section} sends the reader elsewhere"
    if inspect.isfunction(thing):
        assert "Returns" in found or "Yields" in found, f"{name} does not say what it returns"
        assert "Args" in found or not parameters(thing), f"{name} does not explain its arguments"


def test_every_argument_is_named(public):
    name, thing = public
    _, text = sections(thing).get("Args", ("", ""))
    named = {n.strip(" `*") for names in re.findall(r"^    (\S[^:\n]*):", text, re.MULTILINE) for n in names.split(",")}
    if inspect.isfunction(thing) or named:
        assert named == set(parameters(thing)), f"{name}: Args and signature differ"


def test_no_substitution_and_no_sentence_that_hangs(public):
    name, thing = public
    text = re.sub(r"``[^`]*``", "", inspect.getdoc(thing))
    assert "|" not in text, f"{name}: |...| is a substitution in reStructuredText"
    assert not re.search(r"(?:^|[.:]\s+)(Of|What) ", text), f"{name}: a sentence begins with Of or What"
