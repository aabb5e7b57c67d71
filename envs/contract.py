"""Contract of an env, checked by running episodes; used by `offbeat env check` and the tests of all envs."""

import math
import random
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, cast

import numpy as np
from pydantic import JsonValue

from offbeat.envs import registry
from offbeat.envs.registry import TextEnv

NONSENSE = ("", " ", "<answer>", "no such action", "\x00\u00e9\u4e2d\U0001f600", "a " * 2_000)
"""Odd answers that an env must handle like any other."""

MOST_BYTES = 1 << 20
"""Memory per env above which the check advises to share data; a worker holds one env per episode slot."""

Call = Callable[[str], None]
"""Callback with the name of each call before it is made, so that a hanging call can be named."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Violation of the contract."""

    severity: Literal["problem", "advice"]
    """A problem breaks training; advice may be ignored."""
    rule: str
    message: str


@dataclass(slots=True)
class ContractReport:
    """Result of a contract check."""

    findings: list[Finding] = field(default_factory=list[Finding])
    num_episodes: int = 0
    num_turns: int = 0
    make_s: float = 0.0
    reset_s: float = 0.0
    """Longest reset."""
    step_s: float = 0.0
    mean_s: float = 0.0
    """Mean of resets and steps."""
    bytes_per_env: int = 0
    """Memory of one env in this process."""
    sandbox: str = ""
    """Isolation of the programs that the env runs; empty if it runs none."""
    digest: str = ""
    """Digest of observations and rewards; equal on every machine."""

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "problem"]


def check_contract(
    env_type: str,
    env_config: Mapping[str, JsonValue],
    *,
    num_seeds: int = 8,
    max_turns: int = 20,
    on_call: Call = lambda _: None,
) -> ContractReport:
    """Run an env on `num_seeds` seeds, at most `max_turns` turns each, and report every violation."""
    report = ContractReport()
    if wrong := registry.check_env_config(env_type, env_config):
        report.findings += [Finding("problem", "settings", message) for message in wrong]
        return report
    player = _Player(env_type, env_config, max_turns, report, on_call)
    for rule, check in _CHECKS.items():
        try:
            report.findings += [Finding(severity, rule, message) for severity, message in check(player, num_seeds)]
        except Exception as error:
            # Whatever the env raises is what is wrong with it.
            report.findings.append(Finding("problem", rule, f"{player.doing} raised {type(error).__name__}: {error}"))
            break
        if rule == "text" and report.problems:
            break
    player.close()
    report.mean_s = player.spent_s / max(1, report.num_episodes + report.num_turns)
    return report


def random_answer(env: TextEnv, rng: np.random.Generator) -> str:
    """Return the env's own `random_answer(rng)`, else one of its `words`, else a common short answer."""
    inner = env.unwrapped
    own = cast(Callable[[np.random.Generator], str] | None, getattr(inner, "random_answer", None))
    if own is not None:
        return own(rng)
    words = cast(tuple[str, ...], getattr(inner, "words", ()))
    if words:
        return words[int(rng.integers(len(words)))]
    return ("yes", "no", "1", "2", "a", "b")[int(rng.integers(6))]


class _Player:
    """Runs and times episodes."""

    def __init__(
        self, env_type: str, env_config: Mapping[str, JsonValue], max_turns: int, report: ContractReport, on_call: Call
    ) -> None:
        self.env_type, self.env_config, self.max_turns, self.report = env_type, env_config, max_turns, report
        self.doing = ""
        self.spent_s = 0.0
        self._on_call = on_call
        self._made: list[TextEnv] = []

    def make(self, **changes: JsonValue) -> TextEnv:
        env, seconds = self._timed("make", lambda: registry.make(self.env_type, {**self.env_config, **changes}))
        self.report.make_s = max(self.report.make_s, seconds)
        self._made.append(env)
        return env

    def reset(self, env: TextEnv, seed: int) -> tuple[object, object]:
        result, seconds = self._timed(f"reset(seed={seed})", lambda: env.reset(seed=seed))
        self.report.reset_s = max(self.report.reset_s, seconds)
        self.spent_s += seconds
        self.report.num_episodes += 1
        if not isinstance(cast(object, result), tuple) or len(result) != 2:
            raise TypeError(f"returned {_shown(result)}, not (observation, info)")
        return result

    def step(self, env: TextEnv, answer: str) -> tuple[object, Any, object, object, object]:
        result, seconds = self._timed(f"step({_shown(answer)})", lambda: env.step(answer))
        self.report.step_s = max(self.report.step_s, seconds)
        self.spent_s += seconds
        self.report.num_turns += 1
        if not isinstance(cast(object, result), tuple) or len(result) != 5:
            raise TypeError(f"returned {_shown(result)}, not (observation, reward, terminated, truncated, info)")
        return result

    def episode(self, env: TextEnv, seed: int) -> list[object]:
        """Return all observations and rewards of an episode whose answers depend on `seed` alone."""
        rng = np.random.default_rng(seed)
        seen: list[object] = [self.reset(env, seed)[0]]
        for _ in range(self.max_turns):
            observation, reward, terminated, truncated, _ = self.step(env, random_answer(env, rng))
            seen += [observation, float(reward), bool(terminated), bool(truncated)]
            if terminated or truncated:
                break
        return seen

    def weigh(self) -> int:
        """Measure the memory of an env after its first reset; untimed, because tracing slows it down."""
        self._tell("make")
        tracemalloc.start(1)
        try:
            before, _ = tracemalloc.get_traced_memory()
            env = registry.make(self.env_type, self.env_config)
            self._made.append(env)
            self._tell("reset(seed=1)")
            env.reset(seed=1)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return max(0, after - before)

    def close(self) -> None:
        for env in self._made:
            env.close()

    def _tell(self, doing: str) -> None:
        self.doing = doing
        self._on_call(doing)

    def _timed(self, doing: str, call: Callable[[], Any]) -> tuple[Any, float]:
        self._tell(doing)
        began = time.perf_counter()
        return call(), time.perf_counter() - began


Found = Iterator[tuple[Literal["problem", "advice"], str]]


def _speaks_text(player: _Player, _: int) -> Found:
    env = player.make()
    observation, info = player.reset(env, 0)
    if not isinstance(observation, str):
        yield "problem", f"reset's observation is a {type(observation).__name__}, not a str"
    if not isinstance(info, dict):
        yield "problem", f"reset's info is a {type(info).__name__}, not a dict"
    observation, reward, terminated, truncated, info = player.step(env, random_answer(env, np.random.default_rng(0)))
    if not isinstance(observation, str):
        yield "problem", f"step's observation is a {type(observation).__name__}, not a str"
    if isinstance(reward, bool) or not isinstance(reward, int | float | np.integer | np.floating):
        yield "problem", f"the reward is {_shown(reward)}, not a number"
    elif not math.isfinite(float(cast(float, reward))):
        yield "problem", f"the reward is {reward}, which is not finite"
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            yield "problem", f"{name} is {_shown(value)}, not a bool"
    if not isinstance(info, dict):
        yield "problem", f"step's info is a {type(info).__name__}, not a dict"
    elif "success" not in info:
        yield "advice", "step's info has no `success`: evaluations will show rewards alone"
    if not getattr(env.unwrapped, "system_prompt", ""):
        yield (
            "advice",
            "no `system_prompt`: the policy is not told what the task is, unless agent_system_template says so",
        )


def _passes_gymnasium(player: _Player, _: int) -> Found:
    from gymnasium.utils.env_checker import check_env  # noqa: PLC0415

    env = player.make()
    if getattr(env, "observation_space", None) is None or getattr(env, "action_space", None) is None:
        yield (
            "advice",
            "no observation_space or action_space (gymnasium.spaces.Text): gymnasium's check_env was left out",
        )
        return
    player.doing = "gymnasium's check_env"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=env.render_mode is None)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        if "spec" not in text and "render mode" not in text:
            yield "advice", f"gymnasium's check_env: {' '.join(text.split())}"


def _is_the_same_for_the_same_seed(player: _Player, num_seeds: int) -> Found:
    used, digest = player.make(), blake2b(digest_size=16)
    firsts: set[object] = set()
    for seed in range(num_seeds):
        first, again = player.episode(used, seed), player.episode(player.make(), seed)
        digest.update(repr(first).encode())
        firsts.add(first[0])
        if first != again:
            place = next((i for i, (a, b) in enumerate(zip(first, again, strict=False)) if a != b), -1)
            shown = f"{_shown(first[place])} and {_shown(again[place])}"
            yield "problem", f"seed {seed} played twice differs ({shown}): draw all that is random from self.np_random"
            return
    player.report.digest = digest.hexdigest()
    if len(firsts) == 1 < num_seeds:
        yield "advice", f"the first observation of {num_seeds} seeds is the same: does reset use its seed?"


def _leaves_global_generators_alone(player: _Player, num_seeds: int) -> Found:
    env = player.make()
    before: dict[str, object] = _global_states()
    for seed in range(num_seeds):
        player.episode(env, seed)
    for name, now in _global_states().items():
        if before[name] != now:
            yield "problem", f"an episode drew from the global generator of `{name}`: use self.np_random"


def _takes_any_answer(player: _Player, _: int) -> Found:
    env = player.make()
    for answer in NONSENSE:
        player.reset(env, 1)
        reward = player.step(env, answer)[1]
        if not math.isfinite(float(reward)):
            yield "problem", f"the reward of the answer {_shown(answer)} is {reward}"


def _knows_its_tasks(player: _Player, num_seeds: int) -> Found:
    env = player.make()
    task_id = cast(Callable[[int], object] | None, getattr(env.unwrapped, "task_id", None))
    if task_id is None:
        return
    first = player.reset(env, 0)[0]
    ids = [task_id(seed) for seed in range(num_seeds)]
    if player.make().unwrapped.task_id(0) != ids[0]:  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
        yield "problem", "task_id(0) differs between two instances"
    player.reset(env, 0)
    if player.reset(env, 0)[0] != first or [task_id(seed) for seed in range(num_seeds)] != ids:
        yield "problem", "asking for a task_id changes what the env plays"
    held_out = registry.held_out_config(player.env_type, player.env_config)
    if held_out != dict(player.env_config):
        other = player.make(**held_out)
        shared = set(ids) & {cast(Any, other.unwrapped).task_id(seed) for seed in range(num_seeds)}
        if shared:
            yield "problem", f"{len(shared)} task(s) of `split: held_out` turn up in training too"


def _is_small(player: _Player, _: int) -> Found:
    player.report.bytes_per_env = player.weigh()
    if player.report.bytes_per_env > MOST_BYTES:
        mib = player.report.bytes_per_env / (1 << 20)
        yield (
            "advice",
            f"one more env takes {mib:.1f} MiB, and a worker holds one for each episode that it plays: keep what all share "
            "in the class or a cache",
        )


_CHECKS: dict[str, Callable[[_Player, int], Found]] = {
    "text": _speaks_text,
    "gymnasium": _passes_gymnasium,
    "determinism": _is_the_same_for_the_same_seed,
    "own generator": _leaves_global_generators_alone,
    "any answer": _takes_any_answer,
    "tasks": _knows_its_tasks,
    "memory": _is_small,
}


def _global_states() -> dict[str, object]:
    state = np.random.get_state(legacy=False)["state"]
    return {"random": random.getstate(), "numpy.random": (state["key"].tobytes(), int(state["pos"]))}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
