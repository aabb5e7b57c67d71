"""Critic in processes of its own: it computes values beside the policy's pass, and trains beside the policy.

Invariant: weights, checkpoints and gauges are those of the same critic in the learner's processes, bit for bit on as many
ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.data.batch import Batch, minibatches, pack
from offbeat.trainer.data.selection import select_most_varied
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.factory import make_engine
from offbeat.trainer.engines.process_group import READY, STOP, Ranks, barrier, broadcast
from offbeat.trainer.models.loading import load_critic
from offbeat.trainer.models.policy import PackedCritic
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.critic_exchange import CriticPeer
from offbeat.trainer.training.critic_steps import CriticSteps, Gauges, merge_over_ranks
from offbeat.trainer.training.group_scorer import cut
from offbeat.trainer.training.profiler import profile_step
from offbeat.trainer.training.step_tokens import StepTokens
from offbeat.trainer.warm_start.train import Progress

CRITIC_STATE = Path("state", "critic")


def load_first_critic(run: LearnerRun) -> PackedCritic:
    """Load the critic's first weights."""
    config, args = run.config, run.config.critic.model_args
    folder = Path(config.critic_folder or run.first_weights)
    return load_critic(folder, config.actor_train.model_args.of_role(args), config.seed, args.model_type)


class CriticTrainer:
    """`Trainer` of a critic's rank; collective with the policy's ranks."""

    last_step: StepTokens | None = None
    kl_coef = 0.0

    def __init__(self, run: LearnerRun, ranks: Ranks) -> None:
        self._run = run
        self._config = run.config
        self._ranks = ranks
        self._peer = CriticPeer(ranks)
        self._engine: TrainEngine[Tensor] | None = None

    def begin(self, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        """Wait for the policy's first weights; return False if stopped."""
        del progress, should_stop
        while (message := broadcast(self._ranks)) != READY:
            if message == STOP:
                return False
        self._engine = self._build()
        return True

    def load(self, folder: Path, kl_coef: float, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        del kl_coef, progress, should_stop
        barrier(self._ranks)  # the first weights may come from the checkpoint's run
        self._engine = self._build()
        self._engine.load(folder / CRITIC_STATE)
        return True

    def train(self, batch: StepBatch) -> Gauges:
        """Train; the gauges go to the policy's rank 0."""
        selected, _ = select_most_varied(batch.shaped, self._config.variance_filter_ratio, batch.masked)
        packed = pack(selected)
        if packed.num_sampled:
            with profile_step(self._run, self._ranks, batch.step + 1):
                self._train(packed, batch.step)
        return {}

    def _train(self, batch: Batch, step: int) -> None:
        critic = CriticSteps(self._config, self._built, self._ranks)
        targets = self._peer.exchange(critic.values(batch))
        args = self._config.actor_train.training_args
        multiple_of = self._config.actor_train.num_pass_groups(self._ranks.world_size)
        parts = [
            cut(self._config, batch, part, args.max_tokens_per_microbatch, multiple_of=multiple_of)
            for part in minibatches(batch, args.num_minibatches)
        ]
        pieces: list[Gauges] = []
        for _ in range(self._config.ppo_epochs):
            for part in parts:
                pieces += critic.optimize(part, targets, step)
        self._peer.send_gauges(merge_over_ranks(self._ranks, pieces))

    def save(self, folder: Path) -> None:
        self._built.save(folder / CRITIC_STATE)
        barrier(self._ranks)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Do nothing: it is the policy's."""

    def evaluate(self, groups: Sequence[Group]) -> Gauges:
        del groups
        return {}

    def tensors(self, *, with_base: bool = True) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        """Yield nothing: a critic is not published."""
        return iter(())

    def offload_states(self) -> None:
        """Do nothing: no engine is on the critic's devices."""

    def load_states(self) -> None:
        """Do nothing: no engine is on the critic's devices."""

    @property
    def _built(self) -> TrainEngine[Tensor]:
        if self._engine is None:
            raise RuntimeError("begin or load must be called first")
        return self._engine

    def _build(self) -> TrainEngine[Tensor]:
        return make_engine(load_first_critic(self._run), self._config.actor_train, self._ranks)
