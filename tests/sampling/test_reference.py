"""The arithmetic of sampling against fp64, and Philox against the words of its authors."""

import math

import torch

from cute_kernels.sampling import reference
from cute_kernels.sampling.config import LN2_HIGH, LN2_LOW


def test_philox():
    """The known answers of Random123 for Philox-4x32-10: of zeros, and of its first two counters' words being set."""
    words = reference.random_words(torch.tensor([0]), torch.tensor([0]), 4)
    assert [hex(w) for w in words[0].tolist()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_noise_is_gumbels(generator):
    words = torch.randint(2**32, (2**20,), generator=generator)
    edges = torch.tensor([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 128, 2**32 - 129])
    v = (torch.cat([words, edges]).double() + 0.5) * 2.0**-32
    found, wanted = reference.gumbel(torch.cat([words, edges])), -torch.log(-torch.log1p(-v))
    assert found.isfinite().all()
    common = v < 1 - 2.0**-12  # beyond, 1 - v is rounded to a multiple of 2^-24: such noise is low, and loses
    torch.testing.assert_close(found[common].double(), wanted[common], atol=3e-5, rtol=5e-7)
    assert found.max() < 33 * 0.6935 and abs(found[: 2**20].mean() - 0.5772) < 0.01


def test_noise_is_between_the_bounds_of_its_leading_zeros(generator):
    """Where they decide, it is not made at all."""
    words = torch.randint(2**32, (2**20,), generator=generator) >> torch.randint(33, (2**20,), generator=generator)
    edges = 2 ** torch.arange(1, 33)
    words = torch.cat([words, edges - 1, edges // 2])
    zeros = 32 - torch.where(words > 0, torch.log2(words.double()).floor() + 1, 0)
    noise = reference.gumbel(words).double()
    assert (noise < (zeros + 1) * 0.6935).all()
    assert (noise > torch.where(zeros > 0, zeros * 0.693 - 0.33, -2.82) + 1e-6).all()
    assert noise.min() < -2.81  # of the largest words


def test_weights(generator):
    distance = -torch.rand(2**18, generator=generator) * 40
    exact = distance.double().exp() * 2.0**40
    found = reference.weight(distance).double()
    assert ((found - exact).abs() <= 1 + exact * 4e-7).all()
    assert reference.weight(torch.zeros(1)).item() == 2**40 and reference.weight(torch.tensor([-1e30])).item() == 0
    assert abs(LN2_HIGH + LN2_LOW - math.log(2)) < 1e-9
