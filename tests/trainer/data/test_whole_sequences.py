import numpy as np
import torch

from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.whole_sequences import learned_tokens, with_prompts
from tests.trainer.trajectories import group, trajectory

GROUPS = [
    group(0, trajectory(0, [(2, 2, 0.0), (1, 3, 0.0), (2, 0, 0.0)])),
    group(1, trajectory(0, [(3, 0, 0.0)])),
    group(2, trajectory(0, [(1, 1, 0.0)], base=40), trajectory(1, [(4, 2, 0.0)], base=60)),
]


def test_every_token_up_to_the_last_learned_one_counts_except_the_first():
    batch = pack(with_prompts(GROUPS))
    assert batch.tokens[batch.positions].tolist() == [*range(1, 8), 41, *range(61, 66)]
    plain = pack(GROUPS)
    assert batch.tokens.tolist() == plain.tokens.tolist()
    learned = learned_tokens(GROUPS)
    assert batch.tokens[batch.positions][learned].tolist() == plain.tokens[plain.positions].tolist()
    assert int(learned.sum()) == plain.num_sampled


def test_groups_without_learned_tokens_have_none():
    assert pack(with_prompts([GROUPS[1]])).num_sampled == 0
    assert torch.equal(learned_tokens([GROUPS[1]]), torch.zeros(0, dtype=torch.bool))


def test_versions_and_segments_stay_valid():
    (widened,) = with_prompts([GROUPS[0]])[0].trajectories
    (segment,) = widened.segments
    assert np.flatnonzero(segment.token_versions() >= 0).tolist() == np.flatnonzero(segment.loss_mask).tolist()
