"""Earlier turns as text for step-wise prompts."""

from offbeat.services.rollout.config import CustomEnv


class TurnHistory:
    __slots__ = ("_shows_all", "_turns", "_window")

    def __init__(self, rules: CustomEnv) -> None:
        self._shows_all = rules.env_manager_cls == "StepConcatEnvManager"
        self._window = rules.history_length
        self._turns: list[str] = []

    def add(self, observation: str, answer: str) -> None:
        if self._shows_all or self._window:
            self._turns.append(f"{observation}\n{answer}")

    def render_history(self) -> str:
        return "\n".join(self._turns[-self._window :]) if self._window else ""

    def render_observation(self, observation: str) -> str:
        """Return `{observation}`; with `StepConcatEnvManager`, after earlier turns."""
        return "\n".join([*self._turns, observation]) if self._shows_all else observation
