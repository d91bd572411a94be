"""The train command on a GPU: the kernels' losses beside the references', one graph a step, resume."""

import pytest
import torch

from cute_kernels.cli import main as cli
from cute_kernels.runtime.targets import arch_of
from cute_kernels.train import data, loop
from cute_kernels.train.distributed import World
from cute_kernels.train.model import Learner, config_of
from cute_kernels.train.options import Options
from tests.nn import cases as nn_cases
from tests.precompiled import precompile
from tests.train import cases as train_cases

OPTIONS = Options(steps=60)


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    if torch.cuda.is_available():
        configs = [config_of(OPTIONS), config_of(Options(hyper_connections=0))]
        jobs = nn_cases.kernels_of(configs, arch_of(0), batch=OPTIONS.batch, dtypes=(torch.float32,))
        precompile(jobs)


def losses(backend: str | None = None, flipped: bool = False) -> torch.Tensor:
    """The loss of every step; flipped: a batch in the other order, which rounds sums over tokens otherwise."""
    text, ranks = data.read_text(None, OPTIONS.sequence), World(0, 1, torch.device("cuda"), sharded=False)
    learner = Learner(OPTIONS, ranks, backend)
    found = []
    for step in range(OPTIONS.steps):
        batch = map(ranks.rows, text.batch(OPTIONS.seed, step, OPTIONS.batch, OPTIONS.sequence))
        tokens, targets = (rows.flip(0) if flipped else rows for rows in batch)
        found.append(learner.step(tokens, targets, loop.learning_rate(OPTIONS, step))[0])
    return torch.stack(found).cpu()


def test_losses_are_the_references():
    """As near as two runs of the references that round otherwise: the curves' distance, averaged over 10 steps."""
    reference = losses("reference")

    def distance(other: torch.Tensor) -> float:
        return (other - reference).view(-1, 10).mean(1).abs().max().item()

    ours, rounding = distance(losses()), distance(losses("reference", flipped=True))
    print(f"kernels {ours:.2e}, references that round otherwise {rounding:.2e}, end {reference[-1]:.3f}")
    assert reference[-10:].mean() < 3.0
    assert ours < 3 * rounding + 2e-3


def run(folder, **options):
    assert cli.main(["train", *train_cases.arguments(folder, **options)]) == 0
    return train_cases.numbers(folder)


@pytest.mark.parametrize("options", [{}, {"recompute": True, "dropout": 0.1}, {"hyper_connections": 0}, {"experts": 8}])
def test_a_captured_run_has_the_bits_of_an_eager_one(tmp_path, options):
    eager = run(tmp_path / "eager", steps=6, **options)
    assert run(tmp_path / "graph", steps=6, graph=True, **options) == eager
    assert run(tmp_path / "again", steps=6, **options) == eager


def test_compile(tmp_path):
    """Whole layers as graphs, also inside of a captured step."""
    wanted, found = run(tmp_path / "eager", steps=6), run(tmp_path / "compiled", steps=6, compile=True)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=5e-3)
    assert run(tmp_path / "graph", steps=6, compile=True, graph=True) == found


@pytest.mark.parametrize("changed", [{}, {"experts": 8}], ids=["dense", "experts"])
@pytest.mark.parametrize("graph", [{}, {"graph": True}], ids=["eager", "graph"])
def test_resumes_with_the_same_losses(tmp_path, graph, changed):
    options = {"warmup": 10, "dropout": 0.1, "checkpoint_every": 3, "evaluate_every": 3, **changed}
    whole = run(tmp_path / "whole", steps=6, **options)
    run(tmp_path / "parts", steps=3, **options)
    assert run(tmp_path / "parts", steps=6, resume=True, **graph, **options) == whole
