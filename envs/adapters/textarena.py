"""Adapter for TextArena."""

import re
from typing import Any, ClassVar, cast

from pydantic import Field, JsonValue

from offbeat.envs.adapters.text import PrivateRandomState, TextEnv
from offbeat.envs.config import Config
from offbeat.envs.optional_imports import require

SENDER = re.compile(r"\s*\[[^\]\n]+\] ")
"""Name before each message of the log, such as `[Player 0]`."""


class TextArenaConfig(Config):
    id: str
    """Single-player game, such as `GuessTheNumber-v0`."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Arguments of `textarena.make`."""


class TextArenaEnv(TextEnv):
    """Single-player game of TextArena; the reward is final, `success` means at least 1.

    Not for threads, as games use Python's global generator.
    """

    config_class: ClassVar[type[TextArenaConfig]] = TextArenaConfig
    system_prompt: str = "Play the game. Put your move into square brackets, such as [5]."

    def __init__(self, config: TextArenaConfig) -> None:
        """Raises ValueError for an unknown game."""
        super().__init__()
        self.config, self._library = config, require("textarena", "textarena")
        self._random_state = PrivateRandomState()
        self._shown_log = ""
        self._game: Any = self._make()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        game_seed = int(self.np_random.integers(2**31))
        self._random_state.seed(game_seed)
        with self._random_state():
            self._game = self._make()
            try:
                self._game.reset(num_players=1, seed=game_seed)
            except AssertionError as error:
                raise ValueError(f"{self.config.id} is no game for one player: {error}") from error
            self._shown_log = ""
            return self._new_log(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._random_state():
            done, _ = self._game.step(action)
            if not done:
                return self._new_log(action), 0.0, False, False, {"success": False}
            rewards, infos = cast(tuple[dict[int, float] | None, dict[int, dict[str, Any]]], self._game.close())
        reward, info = float((rewards or {}).get(0, 0.0)), infos.get(0, {})
        valid = not info.get("invalid_move", False)
        return str(info.get("reason", "")), reward, True, False, {"success": reward >= 1, "action_is_valid": valid}

    def _make(self) -> Any:
        try:
            return self._library.make(self.config.id, **self.config.kwargs)
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"textarena.make({self.config.id!r}): {' '.join(str(error).split())}") from error

    def _new_log(self, action: str = "") -> str:
        """Return what the game says since the last call, without the player's own action."""
        _, log = self._game.get_observation()
        if not isinstance(log, str):
            return "\n".join(str(message[1]) for message in log if message[0] != 0)
        new = log.removeprefix(self._shown_log)
        self._shown_log = log
        return _remove_action(new, action).strip() if action else new.strip()


def _remove_action(log: str, action: str) -> str:
    sender = SENDER.match(log)
    for own in (f"[{action}]", action):  # TextArena adds missing brackets
        if sender and log.startswith(own, sender.end()):
            return log[sender.end() + len(own) :]
    return log
