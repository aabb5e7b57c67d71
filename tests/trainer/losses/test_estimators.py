"""Each estimator from groups to advantages, against a loop over one episode, turn and token at a time."""

import statistics
from collections.abc import Callable

import pytest
import torch

from offbeat.services.messages.types import Group, StopReason, Trajectory
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.rewards import RewardNormalization
from offbeat.trainer.data.batch import pack
from offbeat.trainer.losses.targets import Targets, build_targets
from tests.copying import replace
from tests.trainer.outcome import by_token, inputs_of, rich_groups

Advantages = dict[int, float]
"""By token id, which says which token it is."""


def turn_tokens(trajectory: Trajectory) -> list[list[int]]:
    (segment,) = trajectory.segments
    return [segment.tokens[turn.start : turn.end].tolist() for turn in trajectory.turns]


def of_episodes(score: Callable[[Group, Trajectory], float]) -> Callable[[list[Group]], Advantages]:
    """An estimator that gives all tokens of an episode the same."""

    def estimator(groups: list[Group]) -> Advantages:
        return {
            token: score(group, trajectory)
            for group in groups
            for trajectory in group.trajectories
            for turn in turn_tokens(trajectory)
            for token in turn
        }

    return estimator


def siblings(group: Group) -> list[float]:
    return [t.reward for t in group.trajectories]


def grpo(group: Group, trajectory: Trajectory) -> float:
    rewards = siblings(group)
    deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return (trajectory.reward - statistics.fmean(rewards)) / (deviation + 1e-6) if deviation > 1e-6 else 0.0


def dr_grpo(group: Group, trajectory: Trajectory) -> float:
    return trajectory.reward - statistics.fmean(siblings(group))


def rloo(group: Group, trajectory: Trajectory) -> float:
    others = [t.reward for t in group.trajectories if t is not trajectory]
    return trajectory.reward - statistics.fmean(others) if others else 0.0


def opo(group: Group, trajectory: Trajectory) -> float:
    tokens = sum(t.num_sampled for t in group.trajectories)
    return trajectory.reward - sum(t.num_sampled * t.reward for t in group.trajectories) / tokens


def maxrl(group: Group, trajectory: Trajectory) -> float:
    mean = statistics.fmean(siblings(group))
    return (trajectory.reward - mean) / (mean + 1e-6)


def remax(group: Group, trajectory: Trajectory) -> float:
    (greedy,) = group.baselines
    return trajectory.reward - greedy.reward


def reinforce(groups: list[Group], gamma: float = 0.9) -> Advantages:
    out: Advantages = {}
    for trajectory in (t for g in groups for t in g.trajectories):
        following = 0.0
        for turn, tokens in reversed(list(zip(trajectory.turns, turn_tokens(trajectory), strict=True))):
            for k, token in enumerate(reversed(tokens)):
                following = (turn.reward if k == 0 else 0.0) + gamma * following
                out[token] = following
    return out


def of_turns(groups: list[Group], gamma: float) -> list[tuple[Group, Trajectory, int, float]]:
    """(group, episode, turn, its discounted return)."""
    return [
        (g, t, k, sum(gamma ** (j - k) * t.turns[j].reward for j in range(k, len(t.turns))))
        for g in groups
        for t in g.trajectories
        for k in range(len(t.turns))
    ]


def agentic_reinforce(groups: list[Group]) -> Advantages:
    return {token: value for _, t, k, value in of_turns(groups, 0.9) for token in turn_tokens(t)[k]}


def compared(value: float, peers: list[float]) -> float:
    return value - statistics.fmean(peers) if len(peers) > 1 else 0.0


def gigpo(groups: list[Group]) -> Advantages:
    turns, out = of_turns(groups, 0.95), {}
    for g, t, k, value in turns:
        here = [v for h, s, j, v in turns if h is g and s.turns[j].state_hash == t.turns[k].state_hash]
        alone = not t.turns[k].state_hash
        step = 0.0 if alone else compared(value, here)
        out |= dict.fromkeys(turn_tokens(t)[k], compared(t.reward, siblings(g)) + 0.5 * step)
    return out


def step_reinforce(groups: list[Group]) -> Advantages:
    turns, out = of_turns(groups, 0.95), {}
    for g, t, k, value in turns:
        out |= dict.fromkeys(turn_tokens(t)[k], compared(value, [v for h, _, _, v in turns if h is g]))
    return out


def whitened(plain: Callable[[list[Group]], Advantages]) -> Callable[[list[Group]], Advantages]:
    def estimator(groups: list[Group]) -> Advantages:
        advantages = plain(groups)
        mean, deviation = statistics.fmean(advantages.values()), statistics.stdev(advantages.values())
        return {token: (value - mean) / (deviation + 1e-6) for token, value in advantages.items()}

    return estimator


MEAN = RewardNormalization(method="mean")
ESTIMATORS: dict[str, tuple[AlgorithmConfig, Callable[[list[Group]], Advantages]]] = {
    "grpo": (AlgorithmConfig(), of_episodes(grpo)),
    "dr_grpo": (AlgorithmConfig(adv_estimator="dr_grpo"), of_episodes(dr_grpo)),
    "rloo": (AlgorithmConfig(adv_estimator="rloo"), of_episodes(rloo)),
    "opo": (AlgorithmConfig(adv_estimator="opo"), of_episodes(opo)),
    "maxrl": (AlgorithmConfig(adv_estimator="maxrl"), of_episodes(maxrl)),
    "remax": (AlgorithmConfig(adv_estimator="remax"), of_episodes(remax)),
    "reinforce": (AlgorithmConfig(adv_estimator="reinforce", gamma=0.9), reinforce),
    "reinforce_plus_plus": (AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.9), whitened(reinforce)),
    "reinforce_plus_plus_baseline": (
        AlgorithmConfig(adv_estimator="reinforce_plus_plus_baseline"),
        whitened(of_episodes(dr_grpo)),
    ),
    "agentic_reinforce": (AlgorithmConfig(adv_estimator="agentic_reinforce", gamma=0.9), agentic_reinforce),
    "gigpo": (AlgorithmConfig(adv_estimator="gigpo", step_reward_weight=0.5, reward_normalization=MEAN), gigpo),
    "step_reinforce": (AlgorithmConfig(adv_estimator="step_reinforce", reward_normalization=MEAN), step_reinforce),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_equal_the_definition(name: str):
    config, by_hand = ESTIMATORS[name]
    groups = rich_groups()
    batch = pack(groups)
    targets = build_targets(batch, config)
    got = dict(zip(batch.tokens[batch.positions].tolist(), targets.advantages.tolist(), strict=True))
    assert got == pytest.approx(by_hand(groups), rel=1e-4, abs=1e-5)


def of_gae(**settings: object) -> tuple[Targets, Advantages, Advantages]:
    config = AlgorithmConfig.model_validate({"adv_estimator": "gae", "gamma": 0.9, "lambd": 0.8, **settings})
    batch = pack(rich_groups())
    targets = build_targets(batch, config, **inputs_of(batch, config))
    ids = batch.tokens[batch.positions].tolist()
    values = dict(zip(ids, by_token(batch, 0.4, 3.0).tolist(), strict=True))
    return targets, dict(zip(ids, targets.advantages.tolist(), strict=True)), values


def test_turn_gae_uses_and_trains_values_at_turn_starts_only():
    targets, got, values = of_gae(gae_level="turn")
    expected: Advantages = {}
    firsts: list[bool] = []
    for trajectory in (t for g in rich_groups() for t in g.trajectories):
        following, value_after = 0.0, 0.0
        for turn, tokens in reversed(list(zip(trajectory.turns, turn_tokens(trajectory), strict=True))):
            value = values[tokens[0]]
            following = turn.reward + 0.9 * value_after - value + 0.9 * 0.8 * following
            value_after = value
            expected |= dict.fromkeys(tokens, following)
        firsts += [k == 0 for tokens in turn_tokens(trajectory) for k in range(len(tokens))]
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    share = torch.tensor(firsts).float() / sum(firsts)
    assert targets.critic_weights is not None
    torch.testing.assert_close(targets.critic_weights, share)
    assert targets.returns is not None
    assert targets.old_values is not None
    torch.testing.assert_close(targets.returns[firsts], (targets.advantages + targets.old_values)[firsts])


def test_vtrace_uses_ratio_of_learner_to_behavior():
    """One trajectory by the recursion of remark 1: v_t - V_t = rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})."""
    targets, got, values = of_gae(value_targets="vtrace", old_logprobs="recompute", vtrace_rho_bar=1.1)
    ratio = (targets.old_logprobs - targets.behavior_logprobs).exp()
    ratios = dict(zip(got, ratio.tolist(), strict=True))
    assert targets.returns is not None
    taught = dict(zip(got, targets.returns.tolist(), strict=True))
    for trajectory in (t for g in rich_groups() for t in g.trajectories):
        rewards = {
            tokens[-1]: turn.reward for turn, tokens in zip(trajectory.turns, turn_tokens(trajectory), strict=True)
        }
        correction = value_after = 0.0
        for token in reversed([token for tokens in turn_tokens(trajectory) for token in tokens]):
            delta = rewards.get(token, 0.0) + 0.9 * value_after - values[token]
            assert got[token] == pytest.approx(delta + 0.9 * 0.8 * correction, abs=1e-5)
            correction = min(1.1, ratios[token]) * delta + 0.9 * 0.8 * min(1.0, ratios[token]) * correction
            value_after = values[token]
            assert taught[token] == pytest.approx(values[token] + correction, abs=1e-5)


CUTS = (
    {"stop_reason": StopReason.MAX_LENGTH},
    {"stop_reason": StopReason.MAX_STEPS},
    {"stop_reason": StopReason.TRUNCATED},
)
GAMMA, LAMBDA = 0.9, 0.8


def cut_groups() -> list[Group]:
    """`rich_groups` in which every limit cuts an episode, by index: tokens, turns, time, or its last answer alone."""

    def cut(trajectory: Trajectory) -> Trajectory:
        if trajectory.index < len(CUTS):
            return replace(trajectory, **CUTS[trajectory.index])
        *turns, last = trajectory.turns
        return replace(trajectory, stop_reason=StopReason.TERMINATED, turns=(*turns, last._replace(is_truncated=True)))

    everybody = rich_groups()
    ended, *others = everybody[0].trajectories
    first = replace(everybody[0], trajectories=(ended, *map(cut, others)))
    return [first, *(replace(g, trajectories=tuple(map(cut, g.trajectories))) for g in everybody[1:])]


def gae_by_hand(rewards: list[float], values: list[float], after: float) -> list[float]:
    """In float64. after: value after the last action."""
    out: list[float] = []
    following = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + GAMMA * after - value + GAMMA * LAMBDA * following
        out.insert(0, following)
        after = value
    return out


@pytest.mark.parametrize("level", ["token", "turn", "vtrace"])
@pytest.mark.parametrize("bootstraps", [True, False])
def test_cut_episodes_are_bootstrapped_with_the_value_after_their_last_token(level: str, bootstraps: bool):
    settings = {"value_targets": "vtrace", "old_logprobs": "recompute"} if level == "vtrace" else {"gae_level": level}
    config = AlgorithmConfig.model_validate(
        {"adv_estimator": "gae", "gamma": GAMMA, "lambd": LAMBDA, "bootstrap_truncated": bootstraps, **settings}
    )
    groups = cut_groups()
    batch = pack(groups)
    given = inputs_of(batch, config)
    if level == "vtrace":
        given["old_logprobs"] = batch.behavior_logprobs  # with a ratio of 1 it is GAE
    targets = build_targets(batch, config, **given)
    ids = batch.tokens[batch.positions].tolist()
    got = dict(zip(ids, targets.advantages.tolist(), strict=True))
    assert targets.returns is not None
    taught = dict(zip(ids, targets.returns.tolist(), strict=True))
    values = dict(zip(ids, by_token(batch, 0.4, 3.0).double().tolist(), strict=True))
    later = dict(zip(ids, by_token(batch, 0.4, 8.0).double().tolist(), strict=True))
    num_ended = 0
    for trajectory in (t for g in groups for t in g.trajectories):
        tokens, last = turn_tokens(trajectory), trajectory.turns[-1]
        ended = trajectory.stop_reason is StopReason.TERMINATED and not last.is_truncated
        num_ended += ended
        after = later[tokens[-1][-1]] if bootstraps and not ended else 0.0
        if level == "turn":
            rewards, firsts = [turn.reward for turn in trajectory.turns], [each[0] for each in tokens]
            expected = gae_by_hand(rewards, [values[token] for token in firsts], after)
            assert [got[token] for token in firsts] == pytest.approx(expected, abs=1e-5)
            continue
        flat = [token for each in tokens for token in each]
        rewards = [0.0] * len(flat)
        for turn, each in zip(trajectory.turns, tokens, strict=True):
            rewards[flat.index(each[-1])] = turn.reward
        expected = gae_by_hand(rewards, [values[token] for token in flat], after)
        assert [got[token] for token in flat] == pytest.approx(expected, abs=1e-5)
        returns = [advantage + values[token] for advantage, token in zip(expected, flat, strict=True)]
        assert [taught[token] for token in flat] == pytest.approx(returns, abs=1e-5)
    assert num_ended == 1


def test_bootstrapping_needs_the_values_after_the_tokens():
    config = AlgorithmConfig(adv_estimator="gae", bootstrap_truncated=True)
    batch = pack(rich_groups())
    with pytest.raises(ValueError, match="values after tokens"):
        build_targets(batch, config, values=by_token(batch, 0.4, 3.0))


def test_states_are_compared_within_group_and_unknown_ones_never():
    groups = rich_groups()
    batch = pack(groups)
    seen: dict[int, set[tuple[int, str]]] = {}
    place = 0
    for number, group in enumerate(groups):
        for turn in (turn for t in group.trajectories for turn in t.turns):
            key = (number, turn.state_hash or f"unknown {place}")
            seen.setdefault(int(batch.anchor[place]), set()).add(key)
            place += 1
    assert place == len(batch.anchor)
    assert all(len(keys) == 1 for keys in seen.values())
    assert len(seen) == len(set.union(*seen.values()))
