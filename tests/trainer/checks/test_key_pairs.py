"""No pair of keys is accepted in which one is silent: each changes what is trained beside each other, or is refused.

`OFFBEAT_KEY_PAIRS=20000 pytest tests/trainer/checks/test_key_pairs.py` scans more.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.trainer.checks.key_pairs import SETTINGS, Pair, accepted, draw, has_effect

PAIRS, PARTS = int(os.environ.get("OFFBEAT_KEY_PAIRS", "1200")), 4
SEED = int(os.environ.get("OFFBEAT_KEY_PAIRS_SEED", "5"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they gain on batches this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_each_key_has_an_effect_beside_each_other(part: int):
    silent = [str(pair) for pair in draw(SEED + part, PAIRS // PARTS) if not has_effect(pair)]
    assert silent == [], "\n".join(silent)


def test_a_silent_key_would_be_found():
    """Without the checks: a clip that a ratio of 1 never reaches, and a discount of a future that does not count."""
    clip = {"adv_estimator": "reinforce", "old_logprobs": "recompute", "ppo_epochs": 1}
    discount = {"adv_estimator": "gae", "gamma": 0.0, "ppo_epochs": 2}
    for base, change in ((clip, {"pg_clip": 0.05}), (discount, {"lambd": 0.5})):
        assert not has_effect(Pair(("", ""), base, base | change))
        assert accepted(base | change) is None
    assert has_effect(Pair(("", ""), clip | {"ppo_epochs": 2}, clip | {"ppo_epochs": 2, "pg_clip": 0.05}))


def test_every_setting_is_drawn():
    drawn = {key for pair in draw(SEED, 1200) for key in pair.keys}
    assert {key for key, _, _ in SETTINGS} - drawn <= {"sequence_length"}
