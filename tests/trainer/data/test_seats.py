"""Games of several seats: each seat's trajectories are compared with those of its own seat alone."""

from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.deploy.console.trajectories import _sampled_places
from offbeat.services.messages.types import Group, Trajectory
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.rewards import RewardShaping
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.pairs import best_and_worst
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.seats import reward_deviation, split_seats
from offbeat.trainer.data.selection import carries_signal
from offbeat.trainer.learner.evaluation_metrics import evaluation_values
from offbeat.trainer.losses.targets import build_targets
from offbeat.trainer.training.recorded_steps import decode_tokens
from tests.copying import replace
from tests.fakes import train_on
from tests.trainer.losses.test_estimators import ESTIMATORS
from tests.trainer.outcome import rich_groups
from tests.trainer.training.test_optimizer_step import GROUPS, config, trainer, weights
from tests.trainer.trajectories import group, trajectory


def merge(first: Trajectory, second: Trajectory) -> Trajectory:
    """A game of seats `a` and `b` in turns, as a worker records it."""
    start = len(first.segments)
    moved = [turn._replace(segment=start + turn.segment) for turn in second.turns]
    pairs = zip_longest(zip(first.turns, "a" * len(first.turns)), zip(moved, "b" * len(moved)))  # noqa: B905
    turns, seats = zip(*[each for pair in pairs for each in pair if each], strict=True)
    segments = (*first.segments, *second.segments)
    return replace(first, segments=segments, turns=turns, seats=seats, metrics={})


def games(first: Group, second: Group) -> Group:
    members = tuple(map(merge, first.trajectories, second.trajectories))
    return replace(first, trajectories=members, baselines=tuple(map(merge, first.baselines, second.baselines)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_by_the_definition_within_each_seat(name: str) -> None:
    """Two seats of a group have states in common, too."""
    algorithm, by_hand = ESTIMATORS[name]
    rich = rich_groups()
    batch = pack([games(rich[1], rich[4]), rich[3], games(rich[0], rich[2])])
    targets = build_targets(batch, algorithm)
    got = dict(zip(batch.tokens[batch.positions].tolist(), targets.advantages.tolist(), strict=True))
    plain = [
        replace(rich[n], trajectories=tuple(replace(t, metrics={}) for t in rich[n].trajectories)) for n in range(5)
    ]
    expected = by_hand([plain[1], plain[4], plain[3], plain[0], plain[2]])
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert batch.num_trajectories == 3 + 3 + 1 + 4 + 4


def of_rewards(*rewards: tuple[float, float]) -> Group:
    """Games of one turn per seat."""
    members = [
        merge(trajectory(i, [(1, 1 + i, a)], base=20 * i), trajectory(i, [(2, 2, b)], base=20 * i + 10))
        for i, (a, b) in enumerate(rewards)
    ]
    return group(0, *members)


def test_only_rewards_that_differ_within_a_seat_are_signal() -> None:
    won, drawn = of_rewards((1, -1), (1, -1)), of_rewards((1, -1), (0, 0))
    assert not carries_signal(won, AlgorithmConfig())
    assert carries_signal(drawn, AlgorithmConfig())
    assert (reward_deviation(won), reward_deviation(drawn)) == (0.0, 0.5)
    assert list(best_and_worst([won])) == []
    pairs = [[t.reward for t in pair.trajectories] for pair in best_and_worst([drawn])]
    assert pairs == [[1.0, 0.0], [0.0, -1.0]]


def test_a_seat_is_shaped_by_its_own_turns_and_metrics() -> None:
    game = replace(of_rewards((1, -1)).trajectories[0], metrics={"a/action_is_valid": 0.5, "b/action_is_valid": 0.0})
    shaping = RewardShaping(format_penalty=0.4, response_length_penalty_coef=0.1)
    (shaped,) = shape_rewards([group(0, game)], AlgorithmConfig(reward_shaping=shaping))
    rewards = [turn.reward for turn in shaped.trajectories[0].turns]
    assert rewards == pytest.approx([1 - 0.1 * 1 - 0.4 * 0.5, -1 - 0.1 * 2 - 0.4])


def test_a_seat_that_never_moved_is_no_trajectory() -> None:
    lone = replace(of_rewards((1, -1)).trajectories[0], seats=("a",), turns=(trajectory(0, [(1, 1, 1.0)]).turns))
    parts = split_seats([replace(of_rewards((1, -1)), trajectories=(lone, *of_rewards((0, 0)).trajectories))])
    assert [len(part.trajectories) for part in parts] == [2, 1]


def test_games_train_the_same_weights_as_their_seats_do_apart(folder: Path) -> None:
    """With weights per group; the tokens of a game are kept in the order in which the console reads them."""
    first, second, third = GROUPS
    together, engine, _ = trainer(folder, config())
    apart, other, _ = trainer(folder, config())
    game = games(first, second)
    train_on(together, [game, third], 0, weights=(0.5, 1.0))
    train_on(apart, GROUPS, 0, weights=(0.5, 0.5, 1.0))
    torch.testing.assert_close(weights(engine), weights(other), rtol=0, atol=1e-7)

    assert together.last_step is not None
    assert apart.last_step is not None
    rows = {(row.group, row.index): row for row in decode_tokens(together.last_step.encode())}
    expected = {(row.group, row.index): row for row in decode_tokens(apart.last_step.encode())}
    assert len(rows) == 8
    for member in game.trajectories:
        places = _sampled_places(member)
        lengths = [len(positions) for _, positions in places]
        row = rows[first.number, member.index]
        seats = [expected[number, member.index] for number in (first.number, second.number)]
        assert [segment for segment, _ in places] == sorted(segment for segment, _ in places)
        assert sum(lengths) == len(row.logprobs)
        np.testing.assert_allclose(row.logprobs, np.concatenate([seat.logprobs for seat in seats]), atol=1e-6)
        np.testing.assert_allclose(row.advantages, np.concatenate([seat.advantages for seat in seats]), atol=1e-6)


def test_an_evaluation_reports_each_seat_of_a_tag() -> None:
    drawn = replace(of_rewards((0, 0)).trajectories[0], metrics={"a/success": 0.0, "a/reward": 0.0, "b/reward": 0.0})
    won = replace(
        of_rewards((1, -1)).trajectories[0], index=1, metrics={"a/success": 1.0, "a/reward": 1.0, "b/reward": -1.0}
    )
    values = evaluation_values([drawn, won], 2, step=0)
    seats = {name: value.value for name, value in values.items() if name.startswith(("env/lake/a/", "env/lake/b/"))}
    assert seats == {"env/lake/a/success": 0.5, "env/lake/a/reward": 0.5, "env/lake/b/reward": -0.5}
    assert values["env/lake/reward"].value == 0.0
