"""Guessed tokens over a model that is a function: what is kept is what a step at a time would draw."""

from types import SimpleNamespace

import pytest
import torch

from cute_kernels.models.speculation import look_up, speculated

PAD = 9
PROMPTS = [[0, 1, 2, 0, 1], [2], [1, 1, 1, 0]]


def draw_of(text):
    """One of three tokens, so that guesses are often right, alone and behind wrong ones."""
    return (sum(t * (i % 5 + 1) for i, t in enumerate(text)) + len(text) // 4) % 3


class Steps:
    """Forwards that keep what they were given; a hidden state is the token that is drawn of it."""

    def __init__(self):
        width = max(map(len, PROMPTS))
        lengths = torch.tensor([len(p) for p in PROMPTS])
        self.prompts = SimpleNamespace(
            right=torch.tensor([p + [PAD] * (width - len(p)) for p in PROMPTS]), lengths=lengths
        )
        self.cache, self.texts, self.forwards = self, [list(p) for p in PROMPTS], 0

    def begin(self):
        return torch.tensor([draw_of(text) for text in self.texts])

    def forward(self, ids, positions):
        self.forwards += 1
        found = torch.empty_like(ids)
        for b, (text, new) in enumerate(zip(self.texts, ids.tolist(), strict=True)):
            assert positions[b, 0] == len(text)
            for j, token in enumerate(new):
                text.append(token)
                found[b, j] = draw_of(text)
        return found

    def keep(self, lengths, longest):
        assert longest == lengths.max()
        self.texts = [text[:n] for text, n in zip(self.texts, lengths.tolist(), strict=True)]


def draw(hidden, places):
    return hidden, (hidden + 10 * places).float()


def one_at_a_time(prompt, new, ends):
    text = list(prompt)
    while len(text) < len(prompt) + new and not (len(text) > len(prompt) and text[-1] in ends):
        text.append(draw_of(text))
    return text[len(prompt) :]


@pytest.mark.parametrize("ends", [[], [2], [0, 1]], ids=str)
@pytest.mark.parametrize("width", [1, 3, 7])
def test_as_one_at_a_time(width, ends):
    for new in (1, 2, 5, 40):
        steps = Steps()
        tokens, log_probs, lengths = speculated(steps, draw, width, new, torch.tensor(ends, dtype=torch.int64), PAD)
        wanted = [one_at_a_time(prompt, new, ends) for prompt in PROMPTS]
        assert lengths.tolist() == [len(row) for row in wanted] and tokens.shape[1] == max(lengths)
        for prompt, row, found, log_p in zip(PROMPTS, wanted, tokens.tolist(), log_probs, strict=True):
            assert found == row + [PAD] * (len(found) - len(row))
            places = [len(prompt) + i for i in range(len(row))]
            assert log_p.tolist() == [t + 10 * p for t, p in zip(row, places, strict=True)] + [0] * (
                len(found) - len(row)
            )
        if not ends and new == 40:
            assert steps.forwards < new - 1


def test_guesses_are_what_followed_last():
    ids = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2, 9], [5, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 9, 9, 9]])
    found = look_up(ids, torch.tensor([8, 1, 6]), 2)
    assert found.tolist() == [[4, 1], [5, 9], [1, 2]]
