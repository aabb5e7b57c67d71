"""Group-in-group policy optimization (GiGPO, arXiv:2505.10978)."""

from torch import Tensor

from offbeat.trainer.algorithms.normalization import normalize_by_group
from offbeat.trainer.algorithms.reinforce import discounted_returns


def group_in_group(
    episode_rewards: Tensor,
    group: Tensor,
    turn_rewards: Tensor,
    owner: Tensor,
    last_turn: Tensor,
    anchor: Tensor,
    *,
    gamma: float,
    episode_weight: float,
    step_weight: float,
    scale: bool,
) -> Tensor:
    """Return A_k = w_e A_episode + w_s A_step per turn (eq. 8): the episode's reward normalized within its group, and the
    turn's discounted return normalized over the group's turns at the same state. A_step is 0 for an anchor with one turn.

    episode_rewards: [T] float; group: [T] int64; turn_rewards: [R] float, trajectory after trajectory; owner: [R] int64;
    last_turn: [R] bool; anchor: [R] int64, one number per state and group; scale: divide by standard deviations too
    -> [R] float
    """
    episode = normalize_by_group(episode_rewards, group, scale=scale)[owner]
    returns = discounted_returns(turn_rewards, last_turn, gamma)
    return episode_weight * episode + step_weight * normalize_by_group(returns, anchor, scale=scale)
