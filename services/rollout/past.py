"""What a step-wise policy is told of earlier turns, in words."""

from dataclasses import dataclass, field

from services.rollout.config import CustomEnv


@dataclass
class Past:
    """The turns of one episode so far."""

    rules: CustomEnv
    _turns: list[str] = field(default_factory=list[str])

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, observation: str, answer: str) -> None:
        """A turn is over."""
        self._turns.append(f"{observation}\n{answer}")

    def window(self) -> str:
        """What `{history}` stands for: the last `history_length` observations, each with its answer below it."""
        count = self.rules.history_length
        return "\n".join(self._turns[-count:]) if count else ""

    def shown(self, observation: str) -> str:
        """What `{observation}` stands for: with `StepConcatEnvManager` after all that was seen and answered before it."""
        if self.rules.env_manager_cls != "StepConcatEnvManager":
            return observation
        return "\n".join([*self._turns, observation])
