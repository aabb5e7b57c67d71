"""Env contract, checked by running episodes."""

import functools
import gc
import math
import random
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, cast

import numpy as np
from pydantic import JsonValue

from offbeat.envs import registry
from offbeat.envs.registry import TextEnv

ODD_ANSWERS = ("", " ", "<answer>", "no such action", "\x00\u00e9\u4e2d\U0001f600", "a " * 2_000)
"""Must be accepted."""

MAX_TURNS = 20
"""Of an episode."""
MAX_ENV_BYTES = 1 << 20
"""Above it, data should be shared; a worker holds one env per episode."""
MAX_FRAMES = 64
"""Of an allocation's traceback; what is allocated deeper is not counted."""

Call = Callable[[str], None]
"""Called before each call, to name a hanging one."""


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Literal["problem", "advice"]
    """Problems break training; advice may be ignored."""
    rule: str
    message: str


@dataclass(slots=True)
class ContractReport:
    findings: list[Finding] = field(default_factory=list[Finding])
    num_episodes: int = 0
    num_turns: int = 0
    make_s: float = 0.0
    reset_s: float = 0.0
    step_s: float = 0.0
    mean_s: float = 0.0
    """Of resets and steps."""
    bytes_per_env: int = 0
    sandbox: str = ""
    """Isolation of the env's programs, if any."""
    digest: str = ""
    """Of observations and rewards."""

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "problem"]


def check_contract(
    env_type: str,
    env_config: Mapping[str, JsonValue],
    *,
    num_seeds: int = 8,
    max_turns: int = MAX_TURNS,
    on_call: Call = lambda _: None,
) -> ContractReport:
    """Run an env on `num_seeds` seeds, at most `max_turns` each; report violations."""
    report = ContractReport()
    if problems := registry.check_env_config(env_type, env_config):
        report.findings += [Finding("problem", "settings", message) for message in problems]
        return report
    runner = _EpisodeRunner(env_type, env_config, max_turns, report, on_call)
    for rule, check in _CHECKS.items():
        try:
            report.findings += [Finding(severity, rule, message) for severity, message in check(runner, num_seeds)]
        except Exception as error:
            # Any exception of the env is a finding.
            report.findings.append(
                Finding("problem", rule, f"{runner.call_name} raised {type(error).__name__}: {error}")
            )
            break
        if rule == "text" and report.problems:
            break
        runner.close(keep=1)  # the first one, so that what the envs of a process share stays
    runner.close()
    report.mean_s = runner.total_s / max(1, report.num_episodes + report.num_turns)
    return report


def digest_episodes(
    env_type: str,
    env_config: Mapping[str, JsonValue],
    *,
    num_seeds: int,
    on_call: Call,
) -> str:
    """Run the episodes of a report's `digest` alone and return it."""
    runner = _EpisodeRunner(env_type, env_config, MAX_TURNS, ContractReport(), on_call)
    env, digest = runner.make(), blake2b(digest_size=16)
    for seed in range(num_seeds):
        digest.update(repr(runner.run_episode(env, seed)).encode())
    runner.close()
    return digest.hexdigest()


def random_answer(env: TextEnv, rng: np.random.Generator) -> str:
    """Return the env's own, one of its `words`, or a common answer."""
    inner = env.unwrapped
    own_answer = cast(Callable[[np.random.Generator], str] | None, getattr(inner, "random_answer", None))
    if own_answer is not None:
        return own_answer(rng)
    words = cast(tuple[str, ...], getattr(inner, "words", ()))
    if words:
        return words[int(rng.integers(len(words)))]
    return ("yes", "no", "1", "2", "a", "b")[int(rng.integers(6))]


class _EpisodeRunner:
    def __init__(
        self, env_type: str, env_config: Mapping[str, JsonValue], max_turns: int, report: ContractReport, on_call: Call
    ) -> None:
        self.env_type, self.env_config, self.max_turns, self.report = env_type, env_config, max_turns, report
        self.call_name = ""
        self.total_s = 0.0
        self.drawn_from: list[str] = []
        """Global generators that episodes drew from."""
        self.ends_with_success: list[bool] = []
        """Of each episode that ended, whether its last info has `success`."""
        self._on_call = on_call
        self._envs: list[TextEnv] = []

    @property
    def num_envs(self) -> int:
        return len(self._envs)

    def make(self, **changes: JsonValue) -> TextEnv:
        env, seconds = self._time("make", lambda: registry.make(self.env_type, {**self.env_config, **changes}))
        self.report.make_s = max(self.report.make_s, seconds)
        self._envs.append(env)
        return env

    def reset(self, env: TextEnv, seed: int) -> tuple[object, object]:
        result, seconds = self._time(f"reset(seed={seed})", lambda: env.reset(seed=seed))
        self.report.reset_s = max(self.report.reset_s, seconds)
        self.total_s += seconds
        self.report.num_episodes += 1
        if not isinstance(cast(object, result), tuple) or len(result) != 2:
            raise TypeError(f"returned {_shorten(result)}, not (observation, info)")
        return result

    def step(self, env: TextEnv, answer: str) -> tuple[object, Any, object, object, object]:
        result, seconds = self._time(f"step({_shorten(answer)})", lambda: env.step(answer))
        self.report.step_s = max(self.report.step_s, seconds)
        self.total_s += seconds
        self.report.num_turns += 1
        if not isinstance(cast(object, result), tuple) or len(result) != 5:
            raise TypeError(f"returned {_shorten(result)}, not (observation, reward, terminated, truncated, info)")
        return result

    def run_episode(self, env: TextEnv, seed: int) -> list[object]:
        """Return observations and rewards for answers determined by `seed`."""
        rng, before = np.random.default_rng(seed), _global_states()
        transcript: list[object] = [self.reset(env, seed)[0]]
        for _ in range(self.max_turns):
            observation, reward, terminated, truncated, info = self.step(env, random_answer(env, rng))
            transcript += [observation, float(reward), bool(terminated), bool(truncated)]
            if terminated or truncated:
                self.ends_with_success.append(_has_success(info))
                break
        after = _global_states()
        self.drawn_from += [name for name in after if after[name] != before[name] and name not in self.drawn_from]
        return transcript

    def measure_memory(self) -> Counter[str]:
        """Measure, untimed, the bytes that an env holds, by the line that allocated them; other threads' do not count."""
        self._announce("make")
        tracemalloc.start(MAX_FRAMES)
        try:
            env = registry.make(self.env_type, self.env_config)
            self._envs.append(env)
            self._announce("reset(seed=1)")
            env.reset(seed=1)
            gc.collect()
            snapshot = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        sizes: Counter[str] = Counter()
        for trace in snapshot.traces:
            if any(frame.filename == __file__ for frame in trace.traceback):
                sizes[str(trace.traceback[-1])] += trace.size
        return sizes

    def close(self, keep: int = 0) -> None:
        while len(self._envs) > keep:
            self._announce("close")
            self._envs.pop().close()

    def announce_calls(self, env: TextEnv, call_name: str) -> None:
        """Announce calls that others make of an env, each of which has the time of one call."""
        for method in ("reset", "step"):
            setattr(env, method, self._announced(getattr(env, method), call_name))
        self._announce(call_name)

    def _announced(self, call: Callable[..., Any], call_name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def announced(*arguments: Any, **options: Any) -> Any:
            self._announce(call_name)
            return call(*arguments, **options)

        return announced

    def _announce(self, call_name: str) -> None:
        self.call_name = call_name
        self._on_call(call_name)

    def _time(self, call_name: str, call: Callable[[], Any]) -> tuple[Any, float]:
        self._announce(call_name)
        start = time.perf_counter()
        return call(), time.perf_counter() - start


Findings = Iterator[tuple[Literal["problem", "advice"], str]]


def _check_text(runner: _EpisodeRunner, _: int) -> Findings:
    env = runner.make()
    observation, info = runner.reset(env, 0)
    if not isinstance(observation, str):
        yield "problem", f"reset's observation is a {type(observation).__name__}, not a str"
    if not isinstance(info, dict):
        yield "problem", f"reset's info is a {type(info).__name__}, not a dict"
    observation, reward, terminated, truncated, info = runner.step(env, random_answer(env, np.random.default_rng(0)))
    if not isinstance(observation, str):
        yield "problem", f"step's observation is a {type(observation).__name__}, not a str"
    if isinstance(reward, bool) or not isinstance(reward, int | float | np.integer | np.floating):
        yield "problem", f"the reward is {_shorten(reward)}, not a number"
    elif not math.isfinite(float(cast(float, reward))):
        yield "problem", f"the reward is {reward}, which is not finite"
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            yield "problem", f"{name} is {_shorten(value)}, not a bool"
    if not isinstance(info, dict):
        yield "problem", f"step's info is a {type(info).__name__}, not a dict"
    if not getattr(env.unwrapped, "system_prompt", ""):
        yield (
            "advice",
            "no `system_prompt`: the policy gets no description of the task unless agent_system_template has one",
        )


def _has_success(info: object) -> bool:
    if not isinstance(info, dict):
        return False
    seats = cast("dict[str, object]", info).get("seats")
    results = cast("dict[str, object]", seats).values() if isinstance(seats, dict) else ()
    return "success" in info or any(isinstance(result, dict) and "success" in result for result in results)


def _check_gymnasium(runner: _EpisodeRunner, _: int) -> Findings:
    from gymnasium.utils.env_checker import check_env  # noqa: PLC0415

    env = runner.make()
    if getattr(env, "observation_space", None) is None or getattr(env, "action_space", None) is None:
        yield (
            "advice",
            "no observation_space or action_space (gymnasium.spaces.Text): gymnasium's check_env was skipped",
        )
        return
    runner.announce_calls(env, "gymnasium's check_env")
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=env.render_mode is None)
    for text in dict.fromkeys(str(warning.message) for warning in recorded):
        if "spec" not in text and "render mode" not in text:
            yield "advice", f"gymnasium's check_env: {' '.join(text.split())}"


def _check_determinism(runner: _EpisodeRunner, num_seeds: int) -> Findings:
    reused, digest = runner.make(), blake2b(digest_size=16)
    first_observations: set[object] = set()
    num_envs = runner.num_envs
    for seed in range(num_seeds):
        first, second = runner.run_episode(reused, seed), runner.run_episode(runner.make(), seed)
        runner.close(keep=num_envs)
        digest.update(repr(first).encode())
        first_observations.add(first[0])
        if first != second:
            index = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), -1)
            values = f"{_shorten(first[index])} and {_shorten(second[index])}"
            yield "problem", f"two episodes of seed {seed} differ ({values}): draw all randomness from self.np_random"
            return
    runner.report.digest = digest.hexdigest()
    if len(first_observations) == 1 < num_seeds:
        yield "advice", f"the first observation of {num_seeds} seeds is the same: does reset use its seed?"


def _check_success(runner: _EpisodeRunner, _: int) -> Findings:
    if runner.ends_with_success and not any(runner.ends_with_success):
        yield "advice", "no episode's last info has `success`: evaluations will show rewards alone"


def _check_global_generators(runner: _EpisodeRunner, _: int) -> Findings:
    for name in runner.drawn_from:
        yield "problem", f"an episode drew from the global generator of `{name}`: use self.np_random"


def _check_odd_answers(runner: _EpisodeRunner, _: int) -> Findings:
    env = runner.make()
    for answer in ODD_ANSWERS:
        runner.reset(env, 1)
        reward = runner.step(env, answer)[1]
        if not math.isfinite(float(reward)):
            yield "problem", f"the reward of the answer {_shorten(answer)} is {reward}"


def _check_tasks(runner: _EpisodeRunner, num_seeds: int) -> Findings:
    env = runner.make()
    task_id = cast(Callable[[int], object] | None, getattr(env.unwrapped, "task_id", None))
    if task_id is None:
        return
    first = runner.reset(env, 0)[0]
    ids = [task_id(seed) for seed in range(num_seeds)]
    if cast(Any, runner.make().unwrapped).task_id(0) != ids[0]:
        yield "problem", "task_id(0) differs between two instances"
    runner.reset(env, 0)
    if runner.reset(env, 0)[0] != first or [task_id(seed) for seed in range(num_seeds)] != ids:
        yield "problem", "task_id() changes the env's tasks"
    held_out = registry.held_out_config(runner.env_type, runner.env_config)
    if held_out != dict(runner.env_config):
        other = runner.make(**held_out)
        shared = set(ids) & {cast(Any, other.unwrapped).task_id(seed) for seed in range(num_seeds)}
        if shared:
            yield "problem", f"{len(shared)} task(s) of `split: held_out` also occur in training"


def _check_seats(runner: _EpisodeRunner, num_seeds: int) -> Findings:
    del num_seeds
    env = runner.make()
    seats = cast(tuple[str, ...], getattr(env.unwrapped, "seats", ()))
    if not seats:
        return
    rng, info = np.random.default_rng(0), runner.reset(env, 0)[1]
    for _ in range(runner.max_turns):
        seat = cast(Any, info).get("seat")
        if seat not in seats:
            yield (
                "problem",
                f"info's `seat` is {_shorten(seat)} where a seat is to move: name one of {', '.join(seats)}",
            )
            return
        *_, terminated, truncated, info = runner.step(env, random_answer(env, rng))
        results = cast(dict[str, dict[str, Any]], cast(Any, info).get("seats", {}))
        if unknown := set(results) - set(seats):
            yield "problem", f"info's `seats` names {_shorten(min(unknown))}: name some of {', '.join(seats)}"
        if seat not in results or "reward" not in results[seat]:
            yield "problem", f"step's info has no `seats`: {{{seat!r}: {{'reward': ...}}}} of the seat that has moved"
            return
        if terminated or truncated:
            return


def _check_memory(runner: _EpisodeRunner, _: int) -> Findings:
    sizes = runner.measure_memory()
    runner.report.bytes_per_env = sizes.total()
    if sizes.total() > MAX_ENV_BYTES:
        [(line, largest)] = sizes.most_common(1)
        yield (
            "advice",
            f"each env takes {_mib(sizes.total())}, of which {_mib(largest)} at {line}, and a worker holds one per "
            "episode slot: keep shared data in the class or a cache",
        )


_CHECKS: dict[str, Callable[[_EpisodeRunner, int], Findings]] = {
    "text": _check_text,
    "gymnasium": _check_gymnasium,
    "determinism": _check_determinism,
    "success": _check_success,
    "own generator": _check_global_generators,
    "any answer": _check_odd_answers,
    "tasks": _check_tasks,
    "seats": _check_seats,
    "memory": _check_memory,
}


def _global_states() -> dict[str, object]:
    state = np.random.get_state(legacy=False)["state"]
    return {"random": random.getstate(), "numpy.random": (state["key"].tobytes(), int(state["pos"]))}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
