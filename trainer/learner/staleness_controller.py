"""Controller of the staleness bound and the number of group slots.

Too stale data (mismatch KL, effective sample size) lowers the bound. While the learner waits, the bound rises if slots
are empty and the data allows it, the number of slots if all are taken. Otherwise, empty slots are removed. Invariants:
settings change between steps, through the REST API's list of changes, at most once a step, never for a step whose
weights exist.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from offbeat.services.live_settings import Settings
from offbeat.services.telemetry import Partial
from offbeat.trainer.config.staleness import StalenessControllerConfig

logger = logging.getLogger(__name__)

FILE = Path("state", "staleness.json")
Move = Literal["fresher", "staler", "more", "fewer"]


class WindowMeans(NamedTuple):
    mismatch_kl: float | None
    ess: float | None
    learner_idle: float
    """Fraction of time waiting for groups."""
    rollout_idle: float
    """Fraction of group slots empty when training ended."""


@dataclass(slots=True)
class WindowSums:
    steps: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0
    empty: float = 0.0
    mismatch_kl: float = 0.0
    ess: float = 0.0
    judged: int = 0
    """Steps with `mismatch_kl` and `ess`."""

    def add(self, gauges: Mapping[str, Partial], wait_s: float, step_s: float, empty: float) -> None:
        self.steps += 1
        self.wait_s += wait_s
        self.step_s += step_s
        self.empty += empty
        if "actor/mismatch_kl" in gauges and "actor/ess" in gauges:
            self.judged += 1
            self.mismatch_kl += gauges["actor/mismatch_kl"].value
            self.ess += gauges["actor/ess"].value

    def window(self) -> WindowMeans:
        kl, ess = (total / self.judged if self.judged else None for total in (self.mismatch_kl, self.ess))
        return WindowMeans(kl, ess, self.wait_s / self.step_s if self.step_s else 0.0, self.empty / max(self.steps, 1))


@dataclass(slots=True)
class ControllerState:
    averages: WindowSums = field(default_factory=WindowSums)
    move: Move | None = None
    """Latest judgement, `times` in a row."""
    times: int = 0
    decided: dict[str, float] = field(default_factory=dict[str, float])
    """Last set by the controller."""


def judge(config: StalenessControllerConfig, window: WindowMeans) -> Move | None:
    kl, ess, loose = window.mismatch_kl, window.ess, 1.0 - config.hysteresis
    if kl is not None and ess is not None and (kl > config.max_mismatch_kl or ess < config.min_ess):
        return "fresher"
    fresh = (
        kl is not None
        and ess is not None
        and kl <= loose * config.max_mismatch_kl
        and 1.0 - ess <= loose * (1.0 - config.min_ess)
    )
    empty = window.rollout_idle > config.max_rollout_idle
    if window.learner_idle > config.max_learner_idle:
        if not empty:
            return "more"
        return "staler" if fresh else None
    return "fewer" if empty and window.learner_idle <= loose * config.max_learner_idle else None


def apply_move(
    config: StalenessControllerConfig, move: Move, settings: Settings, groups_per_step: int, num_env_groups: int
) -> dict[str, float]:
    """Return the settings after a move, within limits; a number of groups beyond them, set by hand, is only moved back.

    num_env_groups: maximum without `max_env_groups`.
    """
    if move in ("fresher", "staler"):
        step = config.staleness_step if move == "staler" else -config.staleness_step
        bound = min(max(settings.max_staleness + step, config.min_staleness), config.max_staleness)
        return {} if bound == settings.max_staleness else {"max_staleness": bound}
    low, high = _env_group_limits(config, groups_per_step, num_env_groups)
    step = groups_per_step if move == "more" else -groups_per_step
    current = settings.num_env_groups
    count = min(max(current + step, min(low, current)), max(high, current))
    return {} if count == current else {"num_env_groups": count}


def _env_group_limits(config: StalenessControllerConfig, groups_per_step: int, num_env_groups: int) -> tuple[int, int]:
    low = groups_per_step if config.min_env_groups is None else config.min_env_groups
    return low, num_env_groups if config.max_env_groups is None else config.max_env_groups


class SettingsProposer(Protocol):
    def suggest(self, step: int, values: Mapping[str, float], why: str, *, if_lost: bool = False) -> bool: ...

    def num_playing(self) -> int: ...


class StalenessController:
    """Inactive without a configuration."""

    def __init__(
        self,
        config: StalenessControllerConfig | None,
        buffer: SettingsProposer,
        *,
        groups_per_step: int,
        num_env_groups: int,
    ) -> None:
        self._config = config
        self._buffer = buffer
        self._groups_per_step = groups_per_step
        self._num_env_groups = num_env_groups
        self._state = ControllerState()
        self._num_running: int | None = None
        self._first = True

    def sample_slots(self) -> None:
        """Count running groups after training, before publishing."""
        if self._config is not None:
            self._num_running = self._buffer.num_playing()

    def observe(
        self, gauges: Mapping[str, Partial], seconds: Mapping[str, float], settings: Settings
    ) -> dict[str, Partial]:
        """Record a step and return metrics; skip a process's first.

        seconds: durations of `wait` and `step`.
        """
        if self._config is None or self._num_running is None:
            return {}
        empty = 1.0 - min(1.0, self._num_running / settings.num_env_groups)
        wait_s, step_s = seconds.get("wait", 0.0), seconds.get("step", 0.0)
        if not self._first:
            self._state.averages.add(gauges, wait_s, step_s, empty)
        self._first = False
        return {
            "staleness_controller/learner_idle": Partial("mean", wait_s, step_s),
            "staleness_controller/rollout_idle": Partial("mean", empty, 1.0),
            "staleness_controller/max_staleness": Partial("last", settings.max_staleness),
            "staleness_controller/num_env_groups": Partial("last", float(settings.num_env_groups)),
        }

    def decide(self, step: int, settings: Settings) -> None:
        """Propose settings if enough judgements agree."""
        state, config = self._state, self._config
        if config is None or state.averages.steps < config.interval:
            return
        window, state.averages = state.averages.window(), WindowSums()
        move = judge(config, window)
        state.move, state.times = move, state.times + 1 if move == state.move else 1
        if move is None or state.times < config.patience:
            return
        values = apply_move(config, move, settings, self._groups_per_step, self._num_env_groups)
        if values and self._buffer.suggest(step, values, _reason(move, window)):
            state.decided |= values
            logger.info("staleness controller, step %d: %s because %s", step, values, _reason(move, window))
        state.times = 0

    def save(self, folder: Path) -> None:
        if self._config is not None:
            (folder / FILE).parent.mkdir(exist_ok=True)
            (folder / FILE).write_text(json.dumps(asdict(self._state)))

    def load(self, folder: Path, step: int, *, is_own: bool = True) -> None:
        """Load the state; propose again what Redis lost, within the limits.

        is_own: of this run's lineage; a fork, whose settings are its own, begins without.
        """
        if self._config is None or not is_own or not (folder / FILE).is_file():
            return
        tree = json.loads((folder / FILE).read_text())
        self._state = ControllerState(**{**tree, "averages": WindowSums(**tree["averages"])})
        self._state.decided = {name: self._limit(self._config, name, x) for name, x in self._state.decided.items()}
        if self._state.decided:
            self._buffer.suggest(step, self._state.decided, "restored from the checkpoint", if_lost=True)

    def _limit(self, config: StalenessControllerConfig, name: str, value: float) -> float:
        low, high = (
            (config.min_staleness, config.max_staleness)
            if name == "max_staleness"
            else _env_group_limits(config, self._groups_per_step, self._num_env_groups)
        )
        return min(max(value, low), high)


def _reason(move: Move, window: WindowMeans) -> str:
    measured = f"learner idle {window.learner_idle:.0%}, group slots empty {window.rollout_idle:.0%}"
    if window.mismatch_kl is not None and window.ess is not None:
        measured += f", mismatch KL {window.mismatch_kl:.3g}, effective sample size {window.ess:.2f}"
    reason = {
        "fresher": "the data is too old",
        "staler": "the learner waits for rollouts that wait for it",
        "more": "the learner waits while all group slots are taken",
        "fewer": "rollouts run further ahead than the learner needs",
    }[move]
    return f"{reason} ({measured})"
