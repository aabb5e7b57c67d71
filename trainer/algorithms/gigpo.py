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
    """Return A = w_e A_episode + w_s A_step per turn [R] (eq. 8): episode rewards normalized by group, discounted
    returns by state.

    episode_rewards, group: [T]; turn_rewards, owner, last_turn, anchor (number of state and group): [R]; scale: divide
    by standard deviations.
    """
    episode = normalize_by_group(episode_rewards, group, scale=scale)[owner]
    returns = discounted_returns(turn_rewards.double(), last_turn, gamma)
    step = normalize_by_group(returns, anchor, scale=scale).to(turn_rewards)
    return episode_weight * episode + step_weight * step
