"""Selection of groups and episodes, and reward shaping."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from offbeat.services.messages.types import Group, StopReason, Trajectory
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.checks.algorithm import check_algorithm
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import ImportanceWeight, TrainInferCorrection
from offbeat.trainer.config.rewards import RewardNormalization, RewardShaping
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.selection import (
    carries_signal,
    episode_weights,
    masked_counts,
    select_most_varied,
    trained_episodes,
)
from offbeat.trainer.data.step_batch import StepBatch
from tests.copying import replace
from tests.trainer.outcome import outcome
from tests.trainer.trajectories import group, trajectory

KL_REWARD = {"add_token_level_kl": True, "init_kl_coef": 0.1}


def of_rewards(number: int, *rewards: float) -> Group:
    return group(number, *(trajectory(i, [(1, 1 + i, r)], base=100 * number + 10 * i) for i, r in enumerate(rewards)))


class LongGroups:
    def __call__(self, group: Group) -> bool:
        return len(group.trajectories) > 2


def test_most_varied_groups_keep_their_order():
    groups = [of_rewards(0, 0, 1), of_rewards(1, 0, 0.2), of_rewards(2, 0, 3), of_rewards(3, 1, 1), of_rewards(4, 0, 3)]

    def chosen(ratio: float) -> list[int]:
        return [group.number for group in select_most_varied(groups, ratio)[0]]

    assert chosen(0.6) == [0, 2, 4]
    assert chosen(0.2) == [2]  # of equals the earlier
    assert chosen(0.01) == [2]
    assert chosen(1.0) == [0, 1, 2, 3, 4]
    assert select_most_varied([], 0.5, MaskedCounts(8, 4, 2)) == ([], MaskedCounts(8, 4, 2))


def test_share_counts_all_groups_and_selects_masked_ones_last():
    groups = [of_rewards(n, 0, 1 + n) for n in range(4)]
    masked = masked_counts([of_rewards(9 + n, 1, 1, 1) for n in range(4)], AlgorithmConfig())
    assert masked == MaskedCounts(tokens=24, sequences=12, groups=4, episodes=12)
    for ratio, numbers, counted in (
        (0.25, [2, 3], MaskedCounts()),
        (0.5, [0, 1, 2, 3], MaskedCounts()),
        (0.75, [0, 1, 2, 3], MaskedCounts(12, 6, 2, 6)),
        (1.0, [0, 1, 2, 3], masked),
    ):
        chosen, silent = select_most_varied(groups, ratio, masked)
        assert ([group.number for group in chosen], silent) == (numbers, counted)


def test_difficulty_mask_bounds_the_mean_reward():
    config = AlgorithmConfig(difficulty_mask=True, difficulty_low_threshold=0.2, difficulty_high_threshold=0.8)
    assert carries_signal(of_rewards(0, 0.0, 1.0), config)
    assert not carries_signal(of_rewards(0, 0.0, 0.4), config)
    assert not carries_signal(of_rewards(0, 0.8, 0.8, 0.9), config)


def test_remax_group_has_signal_unless_all_equal_the_greedy_reward():
    config = AlgorithmConfig(adv_estimator="remax")
    greedy = replace(trajectory(3, [(1, 1, 1.0)], base=90), baseline=True)
    assert carries_signal(replace(of_rewards(0, 0.0, 0.0), baselines=(greedy,)), config)
    assert carries_signal(replace(of_rewards(0, 0.0), baselines=(greedy,)), config)
    assert not carries_signal(replace(of_rewards(0, 1.0, 1.0), baselines=(greedy,)), config)
    assert not carries_signal(replace(of_rewards(0, 0.0, 0.0), baselines=(greedy,)), AlgorithmConfig())


def test_greedy_episode_is_shaped_but_not_packed():
    config = AlgorithmConfig(adv_estimator="remax", reward_shaping=RewardShaping(response_length_penalty_coef=0.1))
    greedy = replace(trajectory(3, [(1, 4, 1.0)], base=90), baseline=True)
    batch = pack(shape_rewards([replace(of_rewards(0, 0.0, 0.5), baselines=(greedy,))], config))
    assert batch.greedy_reward is not None
    torch.testing.assert_close(batch.greedy_reward, torch.tensor([0.6]))
    assert batch.num_trajectories == 2
    assert int(batch.tokens.max()) < 90


def test_custom_filter_is_applied():
    config = AlgorithmConfig(group_filter_cls=f"{__name__}:LongGroups")
    assert carries_signal(of_rewards(0, 0, 1, 0), config)
    assert not carries_signal(of_rewards(0, 0, 1), config)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.at.all:X", "can't import"),
        ("offbeat.trainer.data.selection", "module:Class"),
        ("offbeat.trainer.data.selection:Nothing", "nor a class of that name"),
        ("offbeat.services.messages.types:Turn", "instances can be called"),
    ],
)
def test_unusable_filter_is_refused_at_validation(path: str, message: str):
    issues = list(
        check_algorithm(AlgorithmConfig(group_filter_cls=path), group_size=4, groups_per_step=4, max_steps=10, tags=())
    )
    assert [(c.path, message in c.message) for c in issues] == [("group_filter_cls", True)]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"adv_estimator": "rloo"}, "train_env_manager.group_size"),
        ({"adv_estimator": "gigpo"}, "train_env_manager.group_size"),
        ({"adv_estimator": "grpo"}, "train_env_manager.group_size"),
        *(
            (
                {"adv_estimator": estimator, "reward_normalization": RewardNormalization(method="mean")},
                "train_env_manager.group_size",
            )
            for estimator in ("reinforce", "gae", "agentic_reinforce", "reinforce_plus_plus")
        ),
        (
            {"adv_estimator": "reinforce", "reward_normalization": RewardNormalization(norm_std_type="group")},
            "train_env_manager.group_size",
        ),
        (
            {"adv_estimator": "reinforce", "pg_variant": "tis", "tis_lower_bound": 2.5},
            "tis_lower_bound",
        ),
        ({"adv_estimator": "reinforce", "variance_filter_ratio": 0.5}, "variance_filter_ratio"),
        ({"adv_estimator": "gae", "critic_warmup": 10}, "critic_warmup"),
        ({"adv_estimator": "gae", "value_targets": "vtrace"}, "value_targets"),
        ({"adv_estimator": "reinforce", "pg_variant": "gpg", "old_logprobs": "loglinear", **KL_REWARD}, "old_logprobs"),
        ({"adv_estimator": "reinforce", "pg_variant": "vanilla", "old_logprobs": "recompute"}, "old_logprobs"),
        ({"adv_estimator": "reinforce", "use_kl_loss": True}, "kl_loss_coef"),
        ({"adv_estimator": "reinforce", "pg_clip": 0.1, "pg_clip_low": 0.2, "pg_clip_high": 0.3}, "pg_clip"),
        ({"adv_estimator": "reinforce", "add_token_level_kl": True}, "init_kl_coef"),
        (
            {"adv_estimator": "reinforce", "add_token_level_kl": True, "init_kl_coef": 0.1, "kl_penalty": "full"},
            "kl_penalty",
        ),
        (
            {"adv_estimator": "reinforce", "difficulty_mask": True, "difficulty_low_threshold": 1.0},
            "difficulty_low_threshold",
        ),
    ],
)
def test_algorithm_incompatible_with_run_is_refused(settings: dict, path: str):
    issues = list(check_algorithm(AlgorithmConfig(**settings), group_size=1, groups_per_step=1, max_steps=10, tags=()))
    assert [c.path for c in issues] == [path]


@pytest.mark.parametrize(
    "settings",
    [
        {"reward_normalization": RewardNormalization(norm_mean_type="batch", norm_std_type="batch")},
        {"adv_estimator": "reinforce", "reward_normalization": RewardNormalization(grouping="batch", method="mean")},
        {"adv_estimator": "remax"},
        {"adv_estimator": "gae"},
    ],
)
def test_groups_of_one_are_accepted_where_no_sibling_is_compared(settings: dict):
    config = AlgorithmConfig(**settings)
    assert not list(check_algorithm(config, group_size=1, groups_per_step=8, max_steps=10, tags=()))


@pytest.mark.parametrize(
    "settings",
    [
        {"adv_estimator": "reinforce", **KL_REWARD},
        {"adv_estimator": "reinforce", **KL_REWARD, "kl_penalty": "full"},
        {"adv_estimator": "gae", "value_targets": "vtrace",
         "train_infer_correction": TrainInferCorrection(is_weight=ImportanceWeight(upper_bound=1.0))},
    ],
)  # fmt: skip
@pytest.mark.parametrize("variant", ["vanilla", "gpg"])
def test_recomputed_logprobs_are_used_by_rewards_beside_losses_without_a_ratio(settings: dict, variant: str):
    config = AlgorithmConfig(pg_variant=variant, old_logprobs="recompute", **settings)
    assert not list(check_algorithm(config, group_size=4, groups_per_step=8, max_steps=10, tags=()))


def test_equal_rewards_carry_signal_for_a_critic():
    """GAE's advantages depend on the critic's values, which must be trained on equal rewards, too."""
    equal = of_rewards(0, 1.0, 1.0)
    normalized = RewardNormalization(method="mean")
    assert carries_signal(equal, AlgorithmConfig(adv_estimator="gae", reward_normalization=normalized))
    assert not carries_signal(equal, AlgorithmConfig(adv_estimator="reinforce", reward_normalization=normalized))


def test_masked_episodes_count_in_group_statistics():
    config = AlgorithmConfig(max_len_mask=True, reward_normalization=RewardNormalization(method="mean"))
    got = outcome(config)
    plain = outcome(AlgorithmConfig(reward_normalization=config.reward_normalization))
    left_out = got.batch.truncated[got.batch.trajectory]
    assert 0 < int(left_out.sum()) < len(left_out)
    assert torch.equal(got.targets.advantages, plain.targets.advantages)
    assert got.targets.weights[left_out].abs().max() == 0
    assert got.masked.tokens > 0, "one group has no signal"
    weight = 1.0 / (int((~left_out).sum()) + got.masked.tokens)
    torch.testing.assert_close(got.targets.weights[~left_out], torch.full_like(got.gradient[~left_out], weight))
    scale = weight / plain.targets.weights[0]
    torch.testing.assert_close(got.gradient[~left_out], plain.gradient[~left_out] * scale)


def test_long_failures_are_masked_but_long_successes_kept():
    config = AlgorithmConfig(error_max_len_clip=True, error_max_len_threshold=2)
    batch = pack([of_rewards(0, 0.0, 0.0, 0.0, 1.0)])
    assert trained_episodes(batch, config).tolist() == [True, True, False, True]


def test_truncated_episodes_are_masked_but_not_those_that_recovered():
    whole = trajectory(0, [(1, 1, 0.0), (1, 1, 1.0)])
    without_room = replace(whole, stop_reason=StopReason.MAX_LENGTH)
    first, last = (turn._replace(is_truncated=True) for turn in whole.turns)
    last_cut, first_cut = replace(whole, turns=(whole.turns[0], last)), replace(whole, turns=(first, whole.turns[1]))
    batch = pack([group(0, whole, without_room, last_cut, first_cut)])
    assert trained_episodes(batch, AlgorithmConfig(max_len_mask=True)).tolist() == [True, False, False, True]


def test_hard_groups_and_short_episodes_weigh_more_when_configured():
    batch = pack([of_rewards(0, 0.0, 1.0), of_rewards(1, 1.0, 1.0, 1.0, 5.0)])
    hard = episode_weights(batch, AlgorithmConfig(difficulty_loss_weight=True))
    short = episode_weights(batch, AlgorithmConfig(length_loss_weight=True))
    assert hard is not None
    assert short is not None
    assert hard.tolist() == pytest.approx([1.25] * 2 + [0.5] * 4)
    assert short.tolist() == pytest.approx([1.25, 1.0, 1.25, 1.0, 0.75, 0.5])
    assert episode_weights(batch, AlgorithmConfig()) is None


def test_shaping_changes_last_turn_and_normalization():
    config = AlgorithmConfig(
        reward_shaping=RewardShaping(
            overlong_max_length=6,
            overlong_buffer=4,
            overlong_penalty=2.0,
            response_length_penalty_coef=0.1,
            format_penalty=0.5,
        )
    )
    short = replace(trajectory(0, [(1, 1, 0.0), (1, 1, 1.0)]), metrics={"action_is_valid": 0.5})
    long = trajectory(1, [(1, 5, 1.0)], base=20)
    (after,) = shape_rewards([group(0, short, long)], config)
    rewards = [[turn.reward for turn in t.turns] for t in after.trajectories]
    assert rewards[0] == pytest.approx([0.0, 1.0 - 0.2 - 0.25])
    assert rewards[1] == pytest.approx([1.0 - 0.5 - 2.0 * 3 / 4])
    assert carries_signal(group(0, short, long), config)
    assert not carries_signal(group(0, short, long), AlgorithmConfig())
    assert shape_rewards([group(0, short)], AlgorithmConfig()) == [group(0, short)]


def test_all_ranks_train_with_the_shaping_of_the_first() -> None:
    """A function of the user's may return something else each time."""
    config = AlgorithmConfig(reward_shaping=RewardShaping(function=f"{__name__}:count_calls"))
    groups = [group(0, trajectory(0, [(1, 1, 0.0), (1, 1, 1.0)]), trajectory(1, [(1, 5, 1.0)], base=20))]
    groups.append(replace(of_rewards(1, 0.0, 1.0), baselines=(trajectory(2, [(1, 1, 0.5)], base=40),)))
    batch = StepBatch.build(3, groups, config)
    received = StepBatch.unpack(batch.pack(), config)
    assert rewards_of(batch.shaped) == [[2.0, 3.0], [3.0, 5.0, 5.5]]
    assert rewards_of(received.shaped) == rewards_of(batch.shaped)
    assert rewards_of(received.groups) == rewards_of(groups)
    plain = StepBatch.build(3, groups, AlgorithmConfig())
    assert rewards_of(StepBatch.unpack(plain.pack(), AlgorithmConfig()).shaped) == rewards_of(groups)


def rewards_of(groups: Sequence[Group]) -> list[list[float]]:
    return [[each.reward for each in (*part.trajectories, *part.baselines)] for part in groups]


calls = itertools.count(1)


def count_calls(_: Trajectory) -> float:
    return float(next(calls))


@pytest.mark.parametrize(
    ("metric", "penalty"), [(0.25, 0.75), (-3.0, 1.0), (7.0, 0.0), (math.nan, 0.0), (math.inf, 0.0)]
)
def test_format_metric_is_clamped_and_ignored_unless_finite(metric: float, penalty: float):
    episode = replace(trajectory(0, [(1, 1, 0.5)]), metrics={"action_is_valid": metric})
    config = AlgorithmConfig(reward_shaping=RewardShaping(format_penalty=1.0))
    (shaped,) = shape_rewards([group(0, episode)], config)
    assert shaped.trajectories[0].reward == pytest.approx(0.5 - penalty)


def test_a_tags_filter_compares_mean_or_deviation_strictly():
    groups = [of_rewards(0, 0, 0.5), of_rewards(1, 0.5, 0.5), of_rewards(2, 0, 1), of_rewards(3, 0.75, 1)]
    for query_filter, kept in (
        ({"type": "mean_filter", "filter_args": {"threshold_down": 0.25, "threshold_up": 0.875}}, [2]),
        ({"type": "mean_filter"}, [0, 2, 3]),
        ({"type": "std_filter"}, [0, 2, 3]),
        ({"type": "std_filter", "filter_args": {"std_threshold": 0.25}}, [2]),
    ):
        config = AlgorithmConfig.model_validate({"query_filter_config": {"lake": query_filter}})
        assert [each.number for each in groups if carries_signal(each, config)] == kept
        other = AlgorithmConfig.model_validate({"query_filter_config": {"code": query_filter}})
        assert [each.number for each in groups if carries_signal(each, other)] == [0, 2, 3]
    with pytest.raises(ValueError, match=r"filter_args\.threshold_up has no effect with type std_filter"):
        AlgorithmConfig.model_validate(
            {"query_filter_config": {"lake": {"type": "std_filter", "filter_args": {"threshold_up": 0.5}}}}
        )
