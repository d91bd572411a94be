"""MHCTransformer.generate on the references, and over fake kernels."""

import pytest
import torch

from cute_kernels.nn import attention as module
from tests.fakes import fake_kernels
from tests.nn.cases import FP32, make_config, make_model

SIZES = {"hidden": 256, "layers": 2, "length": 48, "vocab": 64}
ONE, FOUR = make_config(**SIZES, streams=None), make_config(**SIZES)
CONFIGS = pytest.mark.parametrize("config", [ONE, FOUR], ids=["one", "four"])
LENGTHS = [9, 4, 12]


@pytest.fixture(params=["references", "fakes"], autouse=True)
def path(request, monkeypatch):
    monkeypatch.setattr(module, "PAGE_SIZE", 16)  # several pages a sequence
    if request.param == "references":
        yield None
    else:
        with fake_kernels() as jobs:
            yield jobs


def prompts(config):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(config.vocab_size, (len(LENGTHS), max(LENGTHS)), generator=generator)


@CONFIGS
def test_as_one_forward(config):
    """Logits, choices and log-probabilities are those of a forward of the whole sequence."""
    model, tokens = make_model(config), prompts(config)
    seen = []

    def choose(logits):
        seen.append(logits)
        return logits.topk(2).indices[:, 1]

    found, log_probs = model.generate(tokens, 20, lengths=LENGTHS, choose=choose)
    logits = torch.stack(seen, 1)
    with torch.no_grad():
        for i, length in enumerate(LENGTHS):
            whole = torch.cat([tokens[i, :length], found[i]])[None]
            new = slice(length - 1, -1)
            # Apart by what bf16 activations round
            torch.testing.assert_close(logits[i], model(whole)[0, new], atol=0.05, rtol=0.05)
            scored = model.log_prob(whole[:, :-1], whole[:, 1:])[0, length - 1 :]
            torch.testing.assert_close(log_probs[i], scored, atol=0.05, rtol=0.05)


def test_the_most_probable_ones():
    model, tokens = make_model(ONE), prompts(ONE)[:, :5]
    found = model.generate(tokens, 3)
    assert found.tokens.shape == found.log_probs.shape == (3, 3) and found.log_probs.dtype is FP32
    with torch.no_grad():
        assert torch.equal(found.tokens[:, 0], model(tokens)[:, -1].argmax(-1))
    assert not found.log_probs.requires_grad and (found.log_probs < 0).all()


def test_kernels_of_the_cache_run(path):
    make_model(FOUR).generate(prompts(FOUR), 2, lengths=LENGTHS)
    if path is not None:
        names = {builder.__name__ for builder, _ in path}
        assert any("decode" in name for name in names) and any("append" in name for name in names)


def test_a_loss_is_the_mean_of_log_probabilities():
    model, tokens = make_model(ONE), prompts(ONE)
    targets = tokens.roll(-1, 1)
    targets[0, 3:] = -100
    log_prob = model.log_prob(tokens, targets)
    assert log_prob.requires_grad and (log_prob[0, 3:] == 0).all()
    torch.testing.assert_close(-log_prob.sum() / (targets != -100).sum(), model.loss(tokens, targets))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((5,), {"lengths": [1, 2]}, "lengths must be 3 ints from 1 to 12"),
        ((5,), {"lengths": [1, 2, 13]}, "lengths must be 3 ints"),
        ((0,), {}, "max_new_tokens must be from 1 to 36"),
        ((37,), {}, "max_new_tokens must be from 1 to 36"),
        ((1,), {"choose": lambda logits: logits}, "choose's result must be int64"),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=f"^MHCTransformer.generate: {message}"):
        make_model(ONE).generate(prompts(ONE), *arguments, **options)


def test_dropout_needs_evaluation():
    model = make_model(make_config(**SIZES, dropout_p=0.1))
    with pytest.raises(ValueError, match="the model must be in evaluation"):
        model.generate(prompts(ONE), 1)
    model.eval().generate(prompts(ONE), 1)
