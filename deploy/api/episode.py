"""Episodes as Python objects."""

import html
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from pydantic import JsonValue

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.conversations import to_messages
from offbeat.envs.contract import ContractReport, check_contract
from offbeat.envs.contract_process import check_in_processes
from offbeat.envs.event_loop import run_coroutine
from offbeat.trainer.rendering.recorded_episodes import FOLDER

KINDS = ("after", "during", "before")


@dataclass(frozen=True, slots=True)
class Episode:
    """Task, conversation and rewards of an episode."""

    tag: str
    seed: int
    reward: float
    """Sum over the episode."""
    metrics: dict[str, float]
    """Final metrics, such as `success`."""
    messages: tuple[dict[str, str], ...]
    """Chat messages (`role`, `content`): system prompt, alternating observations and completions."""

    @property
    def success(self) -> bool | None:
        """Success, if the env reports it."""
        success = self.metrics.get("success")
        return None if success is None else success > 0

    @classmethod
    def from_texts(
        cls, tag: str, seed: int, reward: float, metrics: Mapping[str, float], texts: Sequence[str]
    ) -> "Episode":
        """Build an episode; texts are ordered as `messages`."""
        return cls(tag, seed, reward, dict(metrics), tuple(to_messages(texts)))

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="vertical-align:top"><b>{html.escape(message["role"])}</b></td>'
            f'<td><pre style="margin:0;text-align:left">{html.escape(message["content"])}</pre></td></tr>'
            for message in self.messages
        )
        heading = f"{self.tag}, seed {self.seed}: reward {self.reward:g}, success {self.success}"
        return f"<div>{html.escape(heading)}<table>{rows}</table></div>"


def read_episodes(folder: Path, limit: int, kind: str | None = None) -> list[Episode]:
    """Read a run's newest sampled evaluation; [] if there is none."""
    files = [
        path for name in ((kind,) if kind else KINDS) for path in (folder / FOLDER).glob(f"{name}-sampled-*.jsonl")
    ]
    if not files:
        return []
    newest = max(files, key=lambda path: path.stat().st_mtime)
    rows = (json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()[:limit])
    return [Episode.from_texts(row["tag"], row["seed"], row["reward"], row["metrics"], row["text"]) for row in rows]


def check_env(
    env: str | type, env_config: Mapping[str, JsonValue] | None = None, *, num_seeds: int = 8
) -> ContractReport:
    """Check an env: text, determinism, own generators, gymnasium's check, speed.

    env: a name (`frozen_lake`), `module:Class`, or a class. Hangs are reported, except of notebooks' classes.

    Examples:
        >>> check_env("frozen_lake", {"size": 4}).problems
        []

    Raises:
        ValueError: `num_seeds` is below 1.
    """
    if num_seeds < 1:
        raise ValueError(f"num_seeds: expected at least 1, got {num_seeds}")
    name = env if isinstance(env, str) else f"{env.__module__}:{env.__qualname__}"
    if name.startswith("__main__:"):
        return check_contract(name, env_config or {}, num_seeds=num_seeds)
    return check_in_processes(name, dict(env_config or {}), num_seeds=num_seeds)


def play(
    env: str | Path,
    env_config: Mapping[str, JsonValue] | None = None,
    *,
    agent: str | Path = "random",
    tag: str | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    show: Callable[[str], None] | None = None,
) -> Episode:
    """Run one episode in this process.

    env: a name, `module:Class`, or a run's YAML file with `tag`. agent: `random`, or a Hugging Face folder, checkpoint
    or run. show: receives a trace's lines.

    Examples:
        >>> play("frozen_lake", seed=1, max_steps=3).messages[1]["content"].splitlines()[0]
        'P _ _ _'

    Raises:
        ConfigError: no such env, tag or setting.
        ValueError: `seed` is negative.
    """
    # Here and in `rollout`: transformers takes seconds to import.
    from offbeat.deploy.play.session import run_episode  # noqa: PLC0415
    from offbeat.deploy.play.target import find_target  # noqa: PLC0415

    target = find_target(str(env), dict(env_config or {}), tag, max_steps)
    trajectory = run_coroutine(run_episode(target, agent, seed=seed, write=show or _ignore))
    return Episode.from_texts(trajectory.tag, trajectory.seed, trajectory.reward, trajectory.metrics, trajectory.text)


def rollout(
    config: RunConfig | str | Path,
    *,
    episodes: int = 64,
    group_size: int = 1,
    agent: str | Path | None = None,
    held_out: bool = True,
    seed: int | None = None,
    concurrency: int = 32,
) -> pd.DataFrame:
    """Collect episodes of a run's tasks in this process, a row each; warn of those that failed.

    config: a configuration or a YAML file. agent: `random`, or a policy's folder; None: the newest checkpoint, else
    `pretrain`. held_out: evaluation tasks. group_size: episodes per task. seed: default is the run's. Columns: `tokens`,
    `loss_mask`, `logprobs`, `versions`, `messages`, `reward`, ...

    Examples:
        >>> config = load_config("deploy/configs/quickstart.yaml")
        >>> rollout(config, episodes=4, agent="random")[["tag", "reward"]].shape
        (4, 2)

    Raises:
        ConfigError: the configuration is invalid, or names no env.
        RuntimeError: all episodes failed.
        ValueError: a number is out of range, `episodes` is not a multiple of `group_size`, or there is no policy.
    """
    from offbeat.deploy.play.parquet import decode_episode  # noqa: PLC0415
    from offbeat.deploy.play.rollouts import EpisodeRequest  # noqa: PLC0415
    from offbeat.deploy.play.session import collect  # noqa: PLC0415
    from offbeat.deploy.play.target import load_config  # noqa: PLC0415
    from offbeat.services.messages.types import EpisodeKind  # noqa: PLC0415

    if not isinstance(config, RunConfig):
        config = load_config(Path(config))
    kind = EpisodeKind.EVAL if held_out else EpisodeKind.TRAIN
    request = EpisodeRequest(episodes, group_size, kind, config.seed if seed is None else seed, concurrency)
    rollouts = run_coroutine(collect(config, request, agent, _no_progress))
    result = rollouts.result
    if result.failures:
        failed = f"{result.failures.total()} of {episodes} episodes failed: {result.describe_failures()}"
        if not result.trajectories:
            raise RuntimeError(failed)
        warnings.warn(failed, stacklevel=2)
    return pd.DataFrame([asdict(decode_episode(t, rollouts.chat)) for t in result.trajectories])


def _ignore(_: str) -> None: ...


def _no_progress(_: int, __: int) -> None: ...
