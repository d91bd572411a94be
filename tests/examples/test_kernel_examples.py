"""The examples with models run on a GPU as a user runs them: nothing differs.

``rl_100_steps.py`` runs in tests/models/test_kernel_training.py.
"""

import pytest

pytest.importorskip("transformers", minversion="5.0")

from tests.examples.test_examples import main_of  # noqa: E402

pytestmark = [pytest.mark.sm90, pytest.mark.slow]


@pytest.mark.parametrize("name", ["compile_training", "hf_generate_equals_training"])
def test_two_ways(name):
    assert main_of(name).main() == (0, 0)


def test_lora():
    pytest.importorskip("peft")
    assert main_of("lora").main() == 0


def test_audit():
    before, after = main_of("audit_my_model").main()
    assert before and not after
