"""Adapter for PettingZoo's turn-based games (AEC API)."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
from pydantic import Field, JsonValue, field_validator

from offbeat.envs.adapters.text import TextEnv
from offbeat.envs.class_path import load_object
from offbeat.envs.config import Config
from offbeat.envs.optional_imports import require
from offbeat.envs.parsing import WHOLE_PATTERN, ActionParser, compile_pattern

RANDOM = "random"
MAX_OPENINGS = 32
"""An opponent's illegal move may end a game before the policy moves."""
Opponent = Callable[[str, str, np.random.Generator], str]
"""(system prompt, observation of its seat, generator of the game) -> answer."""
Board = Callable[[Any, str], str]
"""(PettingZoo's env, seat) -> text that the seat sees."""


class OpponentConfig(Config):
    path: str = RANDOM
    """`random`, a legal move, or `module:Class`, constructed with `args`, called as `Opponent`."""
    args: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])


class PettingZooConfig(Config):
    id: str
    """Id, such as `classic/tictactoe-v3`, or `module:function` of one's own AEC env."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Its arguments."""
    opponents: dict[str, OpponentConfig] = Field(default_factory=dict[str, OpponentConfig])
    """Seats that the policy doesn't play, by name; empty: it plays all (self-play)."""
    actions: tuple[str, ...] = ()
    """Names of the actions, in order; empty: numbers."""
    action_pattern: str = WHOLE_PATTERN
    """Regular expression whose (last) group is the action."""
    board: str = ""
    """`module:function` of PettingZoo's env and a seat's name that returns the seat's observation as text; empty: a
    drawing of planes, or the values.
    """
    marks: str = "XO"
    """Symbol of each plane of a drawn observation; the first is the seat's own."""
    illegal_reward: float = -1.0
    """Reward of an answer that is no action; the game ends as by an illegal move."""
    system_prompt: str = ""
    """System prompt; empty lists the actions."""
    words: tuple[str, ...] = ()
    """Observations' words, for the tiny policy's tokenizer, besides prompt's, marks' and actions'."""
    render_mode: str | None = None

    @field_validator("action_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern


class PettingZooEnv(TextEnv):
    """Game whose seats are played by the policy, or by opponents within `step`.

    Several seats of the policy are trajectories of their own (`seats` of `offbeat.envs.registry`). Illegal moves follow
    PettingZoo's rules: the classic games end, the mover gets -1, the others 0.
    """

    config_class: ClassVar[type[PettingZooConfig]] = PettingZooConfig

    def __init__(self, config: PettingZooConfig) -> None:
        """Raises ValueError for an unknown game, seat or opponent, or actions that are not discrete."""
        self.config, self.render_mode = config, config.render_mode
        self._log = require("pettingzoo.utils.env_logger", "pettingzoo").EnvLogger
        self._log.get_logger().setLevel(logging.ERROR)
        self._game = _load_game(config)
        players = tuple(cast(list[str], self._game.possible_agents))
        if unknown := [name for name in config.opponents if name not in players]:
            raise ValueError(f"{config.id} has no seat {unknown[0]!r}: it has {', '.join(players)}")
        self._played = tuple(name for name in players if name not in config.opponents)
        if not self._played:
            raise ValueError("opponents play every seat: leave one to the policy")
        self.seats = self._played if len(self._played) > 1 else ()
        self._names = _name_actions(config, self._game, players[0])
        self._opponents = {name: _load_opponent(name, each) for name, each in config.opponents.items()}
        self._board: Board = load_object(config.board) if config.board else self._draw
        numbers = {name: number for number, name in enumerate(self._names)}
        self._parser = ActionParser(config.action_pattern, numbers)
        self._totals: dict[str, float] = {}
        self._terminated: set[str] = set()
        self._truncated: set[str] = set()
        self.metadata = self._game.metadata
        super().__init__(config.system_prompt or f"Win the game. Answer with one of {' '.join(self._names)}.")
        self.words = tuple(
            dict.fromkeys((*config.words, *self.system_prompt.split(), *config.marks, ".", *players, *self._names))
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Raises RuntimeError if `MAX_OPENINGS` games are over before the policy moves."""
        super().reset(seed=seed, options=options)
        for _ in range(MAX_OPENINGS):
            self._game.reset(seed=int(cast(Any, self.np_random).integers(2**31)))
            self._totals = dict.fromkeys(self._played, 0.0)
            self._terminated, self._truncated = set(), set()
            if not self._play_opponents():
                return self._observe(), self._seat_info()
        raise RuntimeError(f"{MAX_OPENINGS} games of {self.config.id} were over before the policy moved")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        mover, before = str(self._game.agent_selection), dict(self._totals)
        is_legal = self._move(action)
        is_over = self._play_opponents()
        gained = {name: self._totals[name] - before[name] for name in self._played}
        results: dict[str, dict[str, Any]] = {
            name: {"reward": reward, "success": is_over and self._totals[name] > 0} for name, reward in gained.items()
        }
        results[mover]["action_is_valid"] = is_legal
        text = "" if is_over else self._observe()
        is_cut = is_over and bool(self._truncated) and not self._terminated
        ends = is_over and not is_cut, is_cut
        if not self.seats:
            result = results[mover]
            return text, result.pop("reward"), *ends, result
        seats = {name: result for name, result in results.items() if name == mover or result["reward"] or is_over}
        info = {"seats": seats, "action_is_valid": is_legal, **({} if is_over else self._seat_info())}
        return text, sum(gained.values()), *ends, info

    def random_answer(self, rng: np.random.Generator) -> str:
        """Return a legal move of the seat to move."""
        legal = np.flatnonzero(self._mask())
        return self._names[int(rng.choice(legal)) if len(legal) else 0]

    def render(self) -> Any:
        return self._game.render()

    def close(self) -> None:
        self._game.close()

    def _seat_info(self) -> dict[str, Any]:
        return {"seat": str(self._game.agent_selection)} if self.seats else {}

    def _move(self, answer: str) -> bool:
        """Make the move of the seat to move; return whether it is legal."""
        action = self._parser(answer).action
        if action is None:
            self._forfeit()
            return False
        is_legal = bool(self._mask()[action])
        self._game.step(action)
        if not is_legal:
            self._log.flush()  # PettingZoo keeps a warning for each
        for name, reward in cast(Mapping[str, float], self._game.rewards).items():
            if name in self._totals:
                self._totals[name] += float(reward)
        return is_legal

    def _forfeit(self) -> None:
        """End the game as an illegal move of the seat to move does."""
        game = self._game.unwrapped
        game.terminations = dict.fromkeys(game.agents, True)
        if game.agent_selection in self._totals:
            self._totals[game.agent_selection] += self.config.illegal_reward

    def _play_opponents(self) -> bool:
        """Play until a seat of the policy is to move; return whether the game is over."""
        game = self._game
        while game.agents and not self._is_over():
            seat = str(game.agent_selection)
            if game.terminations[seat] or game.truncations[seat]:
                game.step(None)
            elif seat in self._totals:
                return False
            else:
                self._move(self._ask_opponent(seat))
        return True

    def _ask_opponent(self, seat: str) -> str:
        opponent = self._opponents[seat]
        if opponent is None:
            return self.random_answer(self.np_random)
        return opponent(self.system_prompt, self._board(self._game, seat), self.np_random)

    def _is_over(self) -> bool:
        """Return whether every seat of the policy has ended; note how."""
        game = self._game
        present = [name for name in self._played if name in game.agents]
        self._terminated |= {name for name in present if game.terminations[name]}
        self._truncated |= {name for name in present if game.truncations[name]}
        return all(name in self._terminated | self._truncated for name in present)

    def _mask(self) -> np.ndarray[Any, Any]:
        """Return the legal actions of the seat to move; all if the game has no mask."""
        seat = self._game.agent_selection
        observation = self._game.observe(seat)
        own: object = (
            cast(Mapping[str, Any], observation).get("action_mask") if isinstance(observation, Mapping) else None
        )
        mask = own if own is not None else self._game.infos.get(seat, {}).get("action_mask")
        return np.ones(len(self._names), dtype=np.int8) if mask is None else np.asarray(mask)

    def _observe(self) -> str:
        return self._board(self._game, str(self._game.agent_selection))

    def _draw(self, game: Any, seat: str) -> str:
        """Draw planes [height, width, marks] with a symbol per cell; other observations are values."""
        observation: Any = game.observe(seat)
        values = (
            cast(Mapping[str, Any], observation)["observation"] if isinstance(observation, Mapping) else observation
        )
        planes: np.ndarray[Any, np.dtype[np.float64]] = np.asarray(values, dtype=np.float64)
        if planes.ndim != 3 or planes.shape[2] != len(self.config.marks):
            return " ".join(f"{value:g}" for value in planes.ravel())
        drawn = np.full(planes.shape[:2], ".")
        for plane, mark in enumerate(self.config.marks):
            drawn[planes[:, :, plane] > 0] = mark
        return "\n".join([seat, *(" ".join(row) for row in drawn)])


def _load_game(config: PettingZooConfig) -> Any:
    make = partial(require("pettingzoo", "pettingzoo").make, "aec", config.id)
    try:
        create = load_object(config.id) if ":" in config.id else make
        return create(render_mode=config.render_mode, **config.kwargs)
    except Exception as error:  # PettingZoo's have no common class
        raise ValueError(f"PettingZoo's game {config.id!r}: {type(error).__name__}: {error}") from error


def _name_actions(config: PettingZooConfig, game: Any, seat: str) -> tuple[str, ...]:
    count = getattr(game.action_space(seat), "n", None)
    if count is None:
        raise ValueError(
            f"{config.id} has a {type(game.action_space(seat)).__name__} action space; supported: Discrete"
        )
    if config.actions and len(config.actions) != count:
        raise ValueError(f"{len(config.actions)} names of actions, but {config.id} has {count}")
    return config.actions or tuple(map(str, range(int(count))))


def _load_opponent(seat: str, config: OpponentConfig) -> Opponent | None:
    if config.path == RANDOM:
        return None
    try:
        return cast(Opponent, load_object(config.path)(**config.args))
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"opponent of {seat}, {config.path!r}: {type(error).__name__}: {error}") from error
