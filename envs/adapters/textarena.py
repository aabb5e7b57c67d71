"""Adapter for TextArena's single-player games."""

from typing import Any, ClassVar, cast

from pydantic import Field, JsonValue

from offbeat.envs.adapters.text import OwnRandomness, TextEnv
from offbeat.envs.config import Config
from offbeat.envs.optional_imports import require


class TextArenaConfig(Config):
    """`env_config` of a tag with `env_type: textarena`."""

    id: str
    """A single-player game, such as `GuessTheNumber-v0`."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Keyword arguments of `textarena.make`."""


class TextArenaEnv(TextEnv):
    """A game with a final reward; `success` is a reward of at least 1.

    Games draw from Python's global generator: run them inline or in a process, not in threads.
    """

    config_class: ClassVar[type[TextArenaConfig]] = TextArenaConfig
    system_prompt: str = "Play the game. Put your move into square brackets, such as [5]."

    def __init__(self, config: TextArenaConfig) -> None:
        """Raises ValueError for an unknown game."""
        super().__init__()
        self.config, self._library = config, require("textarena", "textarena")
        self._randomness = OwnRandomness()
        self._seen = ""
        self._game: Any = self._make()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        number = int(self.np_random.integers(2**31))
        self._randomness.seed(number)
        with self._randomness():
            self._game = self._make()
            try:
                self._game.reset(num_players=1, seed=number)
            except AssertionError as error:
                raise ValueError(f"{self.config.id} is no game for one player: {error}") from error
            self._seen = ""
            return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._randomness():
            done, _ = self._game.step(action)
            if not done:
                return self._news(), 0.0, False, False, {"success": False}
            rewards, told = cast(tuple[dict[int, float] | None, dict[int, dict[str, Any]]], self._game.close())
        reward, info = float((rewards or {}).get(0, 0.0)), told.get(0, {})
        valid = not info.get("invalid_move", False)
        return str(info.get("reason", "")), reward, True, False, {"success": reward >= 1, "action_is_valid": valid}

    def _make(self) -> Any:
        try:
            return self._library.make(self.config.id, **self.config.kwargs)
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"textarena.make({self.config.id!r}): {' '.join(str(error).split())}") from error

    def _news(self) -> str:
        """Return the part of the game's log that has not been shown yet."""
        _, shown = self._game.get_observation()
        if not isinstance(shown, str):
            return "\n".join(str(message[1]) for message in shown if message[0] != 0)
        new = shown.removeprefix(self._seen)
        self._seen = shown
        return new.strip()
