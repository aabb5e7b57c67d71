import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.services.messages.types import Segment, Turn
from offbeat.trainer.data.batch import (
    Batch,
    microbatches,
    minibatches,
    pack,
)
from tests.copying import replace
from tests.trainer.trajectories import cut_into_segments, group, trajectory

steps = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.floats(-1, 1, width=32)), min_size=1, max_size=4)
episodes = st.lists(steps, min_size=1, max_size=8)


def packed(shapes: list[list[tuple[int, int, float]]]) -> Batch:
    return pack([group(i, trajectory(0, shape, base=100 * i)) for i, shape in enumerate(shapes)])


def test_pack_keeps_position_version_logprob_turn_and_reward():
    batch = pack([group(0, trajectory(0, [(2, 2, 0.0), (1, 1, 1.0)], base=10), trajectory(1, [(3, 1, -0.5)], base=50))])
    assert batch.tokens.tolist() == [10, 11, 12, 13, 14, 15, 50, 51, 52, 53]
    assert batch.cu_seqlens.tolist() == [0, 6, 10]
    assert batch.positions.tolist() == [2, 3, 5, 9]
    assert batch.sequence.tolist() == [0, 0, 0, 1]
    assert batch.trajectory.tolist() == [0, 0, 0, 1]
    assert batch.turn.tolist() == [0, 0, 1, 2]
    assert batch.versions.tolist() == [0, 0, 1, 0]
    assert batch.turn_reward.tolist() == [0.0, 0.0, 1.0, -0.5]
    assert batch.last.tolist() == [False, False, True, True]
    torch.testing.assert_close(batch.behavior_logprobs, torch.tensor([-0.27, -0.28, -0.30, -0.53]))
    assert batch.episode_reward.tolist() == [1.0, -0.5]


def test_groups_and_tags_of_trajectories_are_numbered():
    batch = pack(
        [
            group(7, trajectory(0, [(1, 1, 0.0)], tag="b"), trajectory(1, [(1, 1, 0.0)], tag="b")),
            group(9, trajectory(0, [(1, 1, 0.0)], tag="a")),
        ]
    )
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.tag.tolist() == [1, 1, 0]


def test_empty_batch_has_empty_arrays_and_no_minibatches():
    for batch in (pack([]), pack([group(0, trajectory(0, [(3, 0, 0.0)]))])):
        assert (batch.num_tokens, batch.num_sampled, batch.num_sequences) == (0, 0, 0)
        assert batch.last.dtype == torch.bool
        assert minibatches(batch, 2) == []
        assert microbatches(batch, [], 10) == []
        assert batch.sampled_by(0).shape == (0,)


def test_segments_are_sequences_of_one_trajectory():
    original = trajectory(0, [(1, 1, 0.25), (2, 2, 1.0)], base=10)
    batch = pack([group(0, cut_into_segments(original))])
    assert batch.tokens.tolist() == [10, 11, 10, 11, 12, 13, 14, 15]
    assert batch.cu_seqlens.tolist() == [0, 2, 8]
    assert batch.positions.tolist() == [1, 6, 7]
    assert batch.sequence.tolist() == [0, 1, 1]
    assert batch.trajectory.tolist() == [0, 0, 0]
    assert batch.turn_reward.tolist() == [0.25, 0.0, 1.0]
    assert batch.last.tolist() == [False, False, True]


def test_tokens_follow_turn_order_across_interleaved_segments():
    original = trajectory(0, [(1, 1, 0.0), (1, 1, 1.0), (1, 1, 2.0)], base=10)
    first, side, third = original.turns
    aside = Segment(
        np.array([90, 91], dtype=np.int32), np.array([False, True]), np.array([0, -9], dtype=np.float32), ()
    )
    (segment,) = original.segments
    mask = segment.loss_mask.copy()
    mask[side.start] = False
    forked = replace(
        original, segments=(replace(segment, loss_mask=mask), aside), turns=(first, Turn(1, 1, 2, 1.0), third)
    )
    batch = pack([group(0, forked)])
    assert batch.tokens[batch.positions].tolist() == [11, 91, 15]
    assert batch.turn_reward.tolist() == [0.0, 1.0, 2.0]
    assert batch.last.tolist() == [False, False, True]
    (micro,) = microbatches(batch, [1], 10)
    assert micro.index.tolist() == [1]


def test_reward_of_tokenless_turn_goes_to_a_neighbouring_token():
    batch = pack([group(0, trajectory(0, [(2, 0, 4.0), (1, 2, 1.0), (1, 0, 0.5), (1, 1, 0.0), (1, 0, 2.0)]))])
    assert batch.turn_reward.tolist() == [4.0, 1.5, 2.0]
    assert batch.last.tolist() == [False, False, True]


def test_trajectory_without_sampled_tokens_keeps_its_reward():
    batch = pack([group(0, trajectory(0, [(3, 0, 4.0)]), trajectory(1, [(1, 1, 1.0)], base=50))])
    assert batch.episode_reward.tolist() == [4.0, 1.0]
    assert batch.trajectory.tolist() == [1]
    assert batch.turn_reward.tolist() == [1.0]
    assert batch.tokens.tolist() == [50, 51]


def test_tokens_after_last_sampled_one_are_dropped():
    batch = pack([group(0, trajectory(0, [(1, 1, 0.0), (5, 0, 0.0)], base=10))])
    assert batch.tokens.tolist() == [10, 11]


def test_segment_starting_with_sampled_token_is_refused():
    with pytest.raises(ValueError, match="starts with a sampled token"):
        pack([group(0, trajectory(0, [(0, 1, 0.0)]))])


def test_sampled_token_without_turn_is_refused():
    with pytest.raises(ValueError, match="belongs to no turn"):
        pack([group(0, replace(trajectory(0, [(1, 1, 0.0)]), turns=()))])


def test_token_is_fresh_only_if_all_earlier_ones_are():
    old_first = trajectory(0, [(1, 2, 0.0), (1, 1, 0.0)], versions=[3, 4])
    new_first = trajectory(1, [(1, 1, 0.0), (1, 1, 0.0), (1, 1, 0.0)], versions=[4, 3, 4])
    batch = pack([group(0, old_first, new_first, trajectory(2, [(1, 2, 0.0)], versions=[4]))])
    assert batch.sampled_by(4).tolist() == [False, False, False, True, False, False, True, True]
    assert batch.sampled_by(3).tolist() == [True, True, False, False, False, False, False, False]


@given(episodes)
def test_packed_row_contains_each_sequence(shapes: list[list[tuple[int, int, float]]]):
    batch = packed(shapes)
    for i, shape in enumerate(shapes):
        start, end = batch.cu_seqlens[i : i + 2].tolist()
        assert end - start == sum(prompt + sampled for prompt, sampled, _ in shape)
        assert batch.tokens[start:end].tolist() == list(range(100 * i, 100 * i + end - start))
        total = float(batch.turn_reward[batch.trajectory == i].sum())
        assert total == pytest.approx(float(batch.episode_reward[i]), abs=1e-5)


@given(episodes, st.integers(1, 5), st.integers(1, 40), st.integers(1, 3))
def test_micro_batches_hold_each_sampled_token_once_with_context(
    shapes: list[list[tuple[int, int, float]]], count: int, budget: int, ranks: int
):
    batch = packed(shapes)
    indexes: list[int] = []
    parts = minibatches(batch, count)
    assert len(parts) == min(count, batch.num_sequences)
    assert sorted(s for part in parts for s in part) == list(range(batch.num_sequences))
    for part in parts:
        micros = microbatches(batch, part, budget, multiple_of=ranks)
        assert len(micros) % ranks == 0 or len(micros) == len(part)
        for micro in micros:
            assert len(micro.tokens) <= budget or len(micro.cu_seqlens) == 2
            assert micro.cu_seqlens[-1] == len(micro.tokens)
            for back in (0, 1):
                got = micro.tokens[micro.positions - back]
                assert torch.equal(got, batch.tokens[batch.positions[micro.index] - back])
            starts = torch.isin(micro.positions, micro.cu_seqlens)
            assert not starts.any()
            indexes += micro.index.tolist()
    assert sorted(indexes) == list(range(batch.num_sampled))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(1, 6))
def test_minibatches_are_balanced_in_number_and_tokens(prompts: list[int], count: int):
    batch = packed([[(prompt, 1, 0.0)] for prompt in prompts])
    parts = minibatches(batch, count)
    sizes = [len(part) for part in parts]
    tokens = [sum(prompts[s] + 1 for s in part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(tokens) - min(tokens) <= 2 * (max(prompts) + 1)
    assert parts == minibatches(batch, count)


def test_minibatches_alternate_in_taking_the_longest_sequence():
    batch = packed([[(length - 1, 1, 0.0)] for length in (9, 8, 7, 6, 5, 4, 3, 2)])
    assert minibatches(batch, 2) == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_experts_stay_with_their_tokens_and_are_unknown_without_rows():
    """The engine did not compute an episode's last token, nor some episodes at all."""
    members = [
        trajectory(n, shape) for n, shape in enumerate(([(2, 2, 0.0), (3, 1, 1.0)], [(4, 1, 0.0)], [(1, 3, 0.0)]))
    ]
    rows = [np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2) for count in (7, 0, 3)]
    for n in (0, 2):  # the second has none; the first has more than are trained
        segment = replace(members[n].segments[0], routing=rows[n])
        members[n] = replace(members[n], segments=(segment,))
    batch = pack([group(0, *members)])
    assert batch.routing is not None
    starts = batch.cu_seqlens.tolist()
    expected = torch.full((batch.num_tokens, 2, 2), -1, dtype=torch.int16)
    for n in (0, 2):
        expected[starts[n] : starts[n] + len(rows[n])] = torch.from_numpy(rows[n]).to(torch.int16)
    assert torch.equal(batch.routing, expected)
    for micro in microbatches(batch, [2, 0, 1], 9):
        assert micro.routing is not None
        for token, experts in zip(micro.tokens.tolist(), micro.routing, strict=True):
            assert any(torch.equal(experts, batch.routing[at]) for at in (batch.tokens == token).nonzero()[:, 0])
    assert packed([[(1, 1, 0.0)]]).routing is None


def test_experts_of_different_models_are_refused():
    members = [trajectory(n, [(2, 2, 0.0)]) for n in range(2)]
    members = [
        replace(each, segments=(replace(each.segments[0], routing=np.zeros((3, 2, 1 + n), dtype=np.uint8)),))
        for n, each in enumerate(members)
    ]
    with pytest.raises(
        ValueError, match=r"experts of several models: \[layers, top_k\] is one of \[\(2, 1\), \(2, 2\)\]"
    ):
        pack([group(0, *members)])
