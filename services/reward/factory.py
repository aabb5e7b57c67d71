"""Construction of a run's scorer."""

from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.config import RewardConfig
from offbeat.services.reward.sample import RewardSample
from offbeat.services.reward.scorer import Reward, RewardScorer


def make_scorer(config: RewardsConfig, *, run_id: str = "", local: bool = False) -> RewardScorer:
    """Build the scorer of a process with an event loop.

    run_id: names the Ray Serve applications of rewards with `num_replicas`. local: without them, all in this process.

    Raises:
        ValueError: a package, function or isolation is missing.
    """
    del run_id, local
    return RewardScorer(config, {reward.name: _make_reward(reward) for reward in config.rewards})


def _make_reward(config: RewardConfig) -> Reward:
    return _NotBuilt(config)


class _NotBuilt:
    """Seam while the kinds are built."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config

    async def score(self, sample: RewardSample) -> float:
        del sample
        raise RewardError(Failure.UNAVAILABLE, f"{self._config.name} is not built yet")

    async def close(self) -> None: ...
