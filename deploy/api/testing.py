"""Test harness for envs, agents and trackers.

from offbeat.testing import FakeModel, assert_env, run_episode

def test_my_env_holds_the_contract():
    assert_env("my_envs:Echo")

def test_my_agent_reaches_the_goal():
    with FakeModel(["Right", "Down"]) as model:
        assert play(model.task("frozen_lake", seed=1)) == 1.0
"""

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from pydantic import JsonValue
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from offbeat.deploy.api.episode import check_env
from offbeat.deploy.play.agents import OneTokenImages
from offbeat.envs import registry
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.server import Gateway
from offbeat.services.gateway.session import EpisodeSession, InvalidCallError, SessionLimits
from offbeat.services.messages.types import Completion, FinishReason, PromptImage, VersionSpan
from offbeat.services.rollout.agents.task import AgentTask, EnvReply
from offbeat.services.rollout.envs.runners import do_step, read_traits
from offbeat.services.telemetry import MetricRecord, mean
from offbeat.services.text_samples import TextSample
from offbeat.trainer.trackers.base import Row, TrackedRun, Tracker
from offbeat.trainer.trackers.cursor import read_progress
from offbeat.trainer.trackers.delivery import Delivery
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile

START, END, IMAGE = "<|im_start|>", "<|im_end|>", "<|image|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROGRESS = "progress.json"


def assert_env(env: str | type, env_config: Mapping[str, JsonValue] | None = None) -> None:
    """Fail with the problems of `offbeat.check_env`.

    Examples:
        >>> assert_env("frozen_lake", {"size": 4})

    Raises:
        AssertionError: the env breaks the contract.
    """
    problems = check_env(env, env_config).problems
    assert not problems, "\n".join(f"{problem.rule}: {problem.message}" for problem in problems)


@dataclass(frozen=True, slots=True)
class EpisodeTrace:
    """Outputs of an env in one episode."""

    observations: list[str]
    """One more than actions."""
    rewards: list[float]
    infos: list[dict[str, Any]]
    terminated: bool
    truncated: bool

    @property
    def reward(self) -> float:
        """Sum of the rewards."""
        return sum(self.rewards)


def run_episode(
    env: str | registry.TextEnv,
    actions: Sequence[str],
    *,
    seed: int = 0,
    env_config: Mapping[str, JsonValue] | None = None,
) -> EpisodeTrace:
    """Reset an env with `seed` and step it with `actions` until the episode ends.

    env: an env, its name or `module:Class`.

    Examples:
        >>> trace = run_episode("frozen_lake", ["Right", "Right", "Down", "Down", "Right", "Down"], seed=1)
        >>> trace.reward, trace.terminated, trace.infos[-1]["success"]
        (1.0, True, True)
    """
    made = registry.make(env, dict(env_config or {})) if isinstance(env, str) else env
    try:
        observation, _ = made.reset(seed=seed)
        observations, rewards, infos = [str(observation)], [], []
        terminated = truncated = False
        for action in actions:
            observation, reward, terminated, truncated, info = made.step(action)
            observations.append(str(observation))
            rewards.append(float(reward))
            infos.append(info)
            if terminated or truncated:
                break
    finally:
        if isinstance(env, str):
            made.close()
    return EpisodeTrace(observations, rewards, infos, bool(terminated), bool(truncated))


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token per byte, ChatML's, and one for images."""
    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END, IMAGE)])
    return tokenizer


def chat_template(text: str = CHATML) -> ChatTemplate:
    """Return a Jinja chat template over `byte_tokenizer`."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (seconds, and only fake models need it)

    tokenizer = byte_tokenizer()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=text)

    def render(messages: Sequence[dict[str, Any]], tools: Sequence[Any], prompt: bool) -> str:
        rendered = fast.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )
        assert isinstance(rendered, str)
        return rendered

    (image_id,) = tokenizer.encode(IMAGE).ids
    return ChatTemplate(render, tokenizer, reader=lambda: OneTokenImages(image_id))


class FakeModel:
    """Scripted model behind OpenAI's and Anthropic's APIs, served by the gateway of real runs; takes images.

    completions: answers in turn; the last one is repeated.
    """

    def __init__(self, completions: Sequence[str], *, template: str = CHATML) -> None:
        if not completions:
            raise ValueError("FakeModel needs at least one completion")
        self._completions = tuple(completions)
        self._template = chat_template(template)
        self._loop = asyncio.new_event_loop()
        self._gateway = Gateway()
        self._sessions: list[Any] = []
        self._envs: list[_Env] = []

    def __enter__(self) -> "FakeModel":
        threading.Thread(target=self._loop.run_forever, name="fake model", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._sessions:
            opened.__exit__(None, None, None)
        asyncio.run_coroutine_threadsafe(self._gateway.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for env in self._envs:
            env.env.close()

    async def _start(self) -> None:
        self._gateway.start()

    def task(
        self, env: str, env_config: Mapping[str, JsonValue] | None = None, *, seed: int = 0, max_steps: int = 100
    ) -> AgentTask:
        """Return an agent's task with a real env and this endpoint."""
        made = _Env(registry.make(env, dict(env_config or {})), max_steps)
        session = EpisodeSession(self._template, self._sampler(), SessionLimits(1_000_000, 100_000), env=made)
        opened = self._gateway.open_session(session)
        opened.__enter__()
        self._sessions.append(opened)
        self._envs.append(made)
        observation, _ = made.env.reset(seed=seed)
        origin = self._gateway.origin
        task = AgentTask(
            base_url=f"{origin}/v1",
            api_key=session.key,
            anthropic_base_url=origin,
            env_url=f"{origin}/env",
            model=session.model,
            tag=env,
            seed=seed,
            system_prompt=read_traits(made.env).system_prompt,
            observation=str(observation),
            max_steps=max_steps,
        )
        made.task = task.plain()
        return task

    def _sampler(self) -> Any:
        remaining = list(self._completions)

        async def sample(
            _: Sequence[int], max_tokens: int, __: Sequence[PromptImage] = (), **___: tuple[str, ...]
        ) -> Completion:
            text = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            whole = (*self._template.encode(text), self._template.end_id)
            ids = whole[:max_tokens]
            reason = FinishReason.STOP if ids == whole else FinishReason.LENGTH
            return Completion("", ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),), reason)

        return sample


@dataclass
class _Env:
    env: registry.TextEnv
    max_steps: int
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    num_steps: int = 0
    is_done: bool = False

    async def step(self, action: str) -> dict[str, Any]:
        if self.is_done:
            raise InvalidCallError("the episode is over", "episode_over")
        result = do_step(self.env, action)
        self.num_steps += 1
        self.is_done = result.terminated or result.truncated or self.num_steps >= self.max_steps
        metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
        return asdict(EnvReply(result.observation, result.reward, self.is_done, metrics))


class RecordingTracker(Tracker):
    """Tracker that keeps its rows in memory.

    rejects: line numbers that `write` refuses. fails_to_flush: `flush` raises.
    """

    def __init__(self, rejects: Sequence[int] = (), *, fails_to_flush: bool = False) -> None:
        super().__init__(tracked_run())
        self.rows: list[Row] = []
        self.rejects = set(rejects)
        self.fails_to_flush = fails_to_flush

    def write(self, row: Row) -> None:
        if row.number in self.rejects:
            raise ValueError(f"row {row.number} is rejected")
        self.rows.append(row)

    def flush(self) -> None:
        if self.fails_to_flush:
            raise OSError("no space left on device")

    @property
    def numbers(self) -> list[int]:
        """Line numbers of the rows."""
        return [row.number for row in self.rows]


def tracked_run(folder: Path = Path(), **config: Any) -> TrackedRun:
    """Return a run for a tracker's constructor."""
    return TrackedRun("run", "key", resumed=False, resumed_step=0, folder=folder, config=config)


def step_record(step: int, samples: tuple[TextSample, ...] = (), **values: float) -> MetricRecord:
    """Return a learner's metric record."""
    partials = {name: mean([value]) for name, value in values.items()}
    return MetricRecord("learner", partials, step=step, samples=samples)


def eval_record(step: int, *, sampling: str = "sampled", **values: float) -> MetricRecord:
    """Return an evaluation's metric record."""
    labels = {"sampling": sampling, "when": "during"}
    return MetricRecord("eval", {name: mean([value]) for name, value in values.items()}, step=step, labels=labels)


def append_records(folder: Path, *records: MetricRecord) -> None:
    """Append records to the folder's `metrics.jsonl`."""
    file = MetricsFile(folder / METRICS_FILE)
    newest = int(file.position.partition("-")[0])
    for number, record in enumerate(records, newest + 1):
        file.write(f"{number}-0", record)
    file.close()


def open_delivery(folder: Path, tracker: Tracker) -> Delivery:
    """Return the delivery of the folder's `metrics.jsonl`, resumed."""
    progress = folder / PROGRESS
    return Delivery(folder / METRICS_FILE, progress, read_progress(progress), tracker)


def deliver(tracker: Tracker, *records: MetricRecord, folder: Path | None = None) -> None:
    """Deliver records to a tracker as a run does: in order, each once.

    folder: keeps `metrics.jsonl` and the position for later calls.

    Examples:
        >>> tracker = RecordingTracker()
        >>> deliver(tracker, step_record(1, reward=0.5), eval_record(1, success=1.0))
        >>> [(row.step, dict(row.values)) for row in tracker.rows]
        [(1, {'learner/reward': 0.5}), (1, {'eval/sampled/success': 1.0})]
    """
    with TemporaryDirectory() as temporary:
        path = folder or Path(temporary)
        append_records(path, *records)
        delivery = open_delivery(path, tracker)
        while delivery.round():
            pass
