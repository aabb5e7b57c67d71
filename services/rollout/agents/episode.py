"""Episode of an external agent in the tag's env; the gateway captures its model calls.

Invariants: the learner gets exactly the gateway's record; failed sampling yields no trajectory, a failed env or agent
only by `on_env_error` or `on_agent_error`; the key is revoked before the trajectory is built.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.envs.dataset.prompt import RowPrompt
from offbeat.envs.prompts import ROW_IMAGE, fill_template
from offbeat.services.awake_clock import AwakeClock
from offbeat.services.chat.capture import Captured
from offbeat.services.chat.template import ChatTemplate, load_chat_template
from offbeat.services.chat.tool_parsers import load_parser
from offbeat.services.chat.tool_templates import load_function_template
from offbeat.services.chat.vision import reads_images
from offbeat.services.errors import EpisodeError, RolloutError
from offbeat.services.gateway.server import Gateway
from offbeat.services.gateway.session import EpisodeSession, InvalidCallError, SessionLimits
from offbeat.services.messages.types import StopReason, Trajectory
from offbeat.services.rollout.agents.pool import AgentOutcome, AgentPool
from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.config import AgentRunner, CustomEnv
from offbeat.services.rollout.envs.runners import EnvTraits, Opening, StepResult
from offbeat.services.rollout.episodes.episode import (
    EpisodeMetrics,
    EpisodePlan,
    PlayableEnv,
    Sample,
    length_metrics,
)
from offbeat.services.rollout.episodes.errors import error_metrics, reward_of


class AgentRuntime:
    def __init__(self, templates: Mapping[str | None, ChatTemplate], clock: AwakeClock | None = None) -> None:
        """templates: by tool call parser. clock: of agents' time."""
        self.templates = templates
        self.gateway = Gateway()
        self.pool = AgentPool(clock)

    async def close(self) -> None:
        await self.pool.close()
        await self.gateway.close()


def load_agent_template(model_folder: Path, tool_call_parser: str | None) -> ChatTemplate:
    """Load the template for an agent's calls.

    tool_call_parser: None detects one.

    Raises:
        RolloutError: the template is unusable, alone or with the parser.
    """
    if tool_call_parser is not None:
        return load_chat_template(model_folder, partial(load_parser, tool_call_parser))
    plain = load_chat_template(model_folder)
    if plain.tools is not None:
        return plain
    try:
        return load_function_template(model_folder)
    except RolloutError:
        return plain  # usable by an agent without tools


def runtime_for(
    custom_envs: Mapping[str, CustomEnv],
    model_folder: Path,
    clock: AwakeClock | None = None,
    *,
    image_input: bool | None = None,
) -> AgentRuntime | None:
    """Return None without agents. image_input: of the policy.

    Raises:
        RolloutError: as `load_agent_template`.
    """
    parsers = {env.agent_runner.tool_call_parser for env in custom_envs.values() if env.agent_runner}
    templates = {name: load_agent_template(model_folder, name) for name in parsers}
    if not reads_images(model_folder, image_input):
        for template in templates.values():
            template.refuse_images()
    return AgentRuntime(templates, clock) if templates else None


def agent_slot(runtime: AgentRuntime | None, tag: str, env: CustomEnv) -> AbstractAsyncContextManager[Any]:
    """Return one of a tag's `num_agents`, to be waited for before the episode's time begins."""
    if runtime is None or env.agent_runner is None:
        return nullcontext()
    return runtime.pool.limiter(tag, env.agent_runner)


class HttpEnvSession:
    def __init__(self, env: PlayableEnv, plan: EpisodePlan, traits: EnvTraits, opening: Opening) -> None:
        rules = plan.env
        self._env, self._rules = env, rules
        self._modes = traits.metrics_agg_mode
        self._system = plan.system_prompt(traits)
        self._turn = asyncio.Lock()
        self._running: asyncio.Task[StepResult] | None = None
        self._is_closed = False
        self._results: list[StepResult] = []
        self._first = self._message(opening.observation)
        self._messages = [] if plan.prompt is None else self._row_messages(plan.prompt)
        self._first = self._first.replace(ROW_IMAGE, "")
        self.row = dict(opening.row)
        """What the env gave about the task."""
        self.session: EpisodeSession | None = None
        self.task: dict[str, Any] = {}
        self.texts = [self._system]
        """System prompt, then observations and actions alternately."""
        self._observation = self._first
        self.error: EpisodeError | None = None

    def agent_task(self, origin: str, plan: EpisodePlan, session: EpisodeSession) -> AgentTask:
        self.session = session
        task = AgentTask(
            base_url=f"{origin}/v1",
            api_key=session.key,
            anthropic_base_url=origin,
            env_url=f"{origin}/env",
            model=session.model,
            tag=plan.tag,
            seed=plan.seed,
            system_prompt=self._system,
            observation=self._first,
            max_steps=self._rules.max_steps,
            messages=self._messages,
        )
        self.task = task.plain()
        return task

    @property
    def over(self) -> StopReason | None:
        if not self._results:
            return None
        last = self._results[-1]
        if last.terminated:
            return StopReason.TERMINATED
        if last.truncated:
            return StopReason.TRUNCATED
        return StopReason.MAX_STEPS if len(self._results) >= self._rules.max_steps else None

    @property
    def is_left(self) -> bool:
        """Return whether steps were taken, but not to the end."""
        return bool(self._results) and self.over is None

    async def step(self, action: str) -> dict[str, Any]:
        session = self.session
        assert session is not None, "call agent_task() first"
        async with self._turn:
            if self.error:
                raise InvalidCallError(f"the env failed: {self.error.reason}", "episode_over")
            if self.over:
                raise InvalidCallError(f"the episode is over: {self.over.value}", "episode_over")
            try:
                result = await self._step(action)
            except EpisodeError as error:
                self.error = error
                session.fail(error)
                raise
            self._results.append(result)
            self.row.update(result.row)
            self.texts += [self._observation, action]
            self._observation = self._message(result.observation)
            session.reward(result.reward)
        return {
            "observation": self._observation,
            "reward": result.reward,
            "done": self.over is not None,
            "metrics": {name: value for name, value in result.metrics.items() if math.isfinite(value)},
        }

    async def _step(self, action: str) -> StepResult:
        ended = InvalidCallError("the episode of this key is over", "episode_over")
        if self._is_closed:
            raise ended
        self._running = running = asyncio.ensure_future(self._env.step(action))
        try:
            await asyncio.wait({running})
        finally:
            running.cancel()
        if running.cancelled():
            raise ended
        return running.result()

    async def settle(self) -> None:
        async with self._turn:
            pass

    async def close(self) -> None:
        """Reject further steps; cancel a running one and wait for its end."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    def metrics(self, own: Mapping[str, float]) -> dict[str, float]:
        metrics = EpisodeMetrics(self._modes)
        for result in self._results:
            metrics.add(result.metrics)
        return {**metrics.values(), **own}

    def _row_messages(self, prompt: RowPrompt) -> list[dict[str, Any]]:
        """Return a row's conversation, ending with the first observation."""
        return prompt._replace(system=self._system or None, turns=(*prompt.turns[:-1], self._first)).messages()

    def _message(self, observation: str) -> str:
        step = len(self._results) + 1
        left = self._rules.max_steps - step + 1
        return fill_template(self._rules.agent_template, observation=observation, step=step, actions_left=left)


async def play_with_agent(
    plan: EpisodePlan, runner: AgentRunner, env: PlayableEnv, traits: EnvTraits, sample: Sample, runtime: AgentRuntime
) -> Trajectory:
    """Run an episode in its `agent_slot`.

    Raises:
        EpisodeError: env, generation or agent failed; retry.
    """
    began = time.monotonic()
    http_env = HttpEnvSession(env, plan, traits, await env.reset(plan.seed))
    max_new_tokens = min(plan.env.max_tokens_per_step, plan.sampling.max_new_tokens)
    limits = SessionLimits(plan.sequence_length, max_new_tokens, runner.max_calls)
    session = EpisodeSession(runtime.templates[runner.tool_call_parser], sample, limits, env=http_env)
    runtime.gateway.start()
    task = http_env.agent_task(runtime.gateway.origin, plan, session)
    try:
        with runtime.gateway.open_session(session):
            outcome, error = await _finish(plan.env, http_env, session, _run(runtime.pool, runner, task, session))
    finally:
        await http_env.close()
    captured = session.close()
    if not captured.turns:
        raise error or EpisodeError("agent_silent", "the agent ended without an answer of the policy")
    if plan.transcript is not None:
        plan.transcript.read(session.conversation, is_chat=session.is_chat)
        plan.transcript.row.update(http_env.row)
        plan.transcript.has_left_env = http_env.is_left
    metrics = http_env.metrics(outcome.metrics)
    return Trajectory(
        group_id=plan.task.group_id,
        index=plan.task.index,
        attempt=plan.task.attempt,
        tag=plan.tag,
        seed=plan.seed,
        segments=captured.segments,
        turns=captured.turns,
        stop_reason=StopReason.ERROR if error else http_env.over or _end_of_agent(session),
        metrics={**metrics, **error_metrics(plan.env, metrics, error), **_count_metrics(captured)},
        worker_id=plan.worker_id,
        duration_s=time.monotonic() - began,
        text=tuple(http_env.texts) if plan.keep_text else (),
        error=str(error or ""),
    )


async def _finish(
    env: CustomEnv, http_env: HttpEnvSession, session: EpisodeSession, running: Awaitable[AgentOutcome]
) -> tuple[AgentOutcome, EpisodeError | None]:
    """Await the agent and reward the episode; return the outcome or the error that ended it."""
    try:
        outcome = await running
        await http_env.settle()
        if http_env.error is not None:
            raise http_env.error
        if outcome.answer is not None and not http_env.over:
            await http_env.step(outcome.answer)
    except EpisodeError as error:
        await http_env.settle()
        if error is http_env.error:
            session.reward(reward_of(env.on_env_error, error))
            return AgentOutcome(), error
        outcome, failure = AgentOutcome(reward=reward_of(env.on_agent_error, error)), error
    else:
        failure = None
    if outcome.reward is not None:
        session.rewards.clear()
        session.reward(outcome.reward)
    return outcome, failure


def _end_of_agent(session: EpisodeSession) -> StopReason:
    return StopReason.MAX_LENGTH if session.ran_out else StopReason.TERMINATED


async def _run(pool: AgentPool, runner: AgentRunner, task: AgentTask, session: EpisodeSession) -> AgentOutcome:
    """Run the agent; kill it once capture has failed."""
    running = asyncio.ensure_future(pool.run(runner, task))
    failing = asyncio.ensure_future(session.failed.wait())
    try:
        await asyncio.wait((running, failing), return_when=asyncio.FIRST_COMPLETED)
        if session.failure is not None:
            raise _as_episode_error(session.failure)
        return await running
    finally:
        failing.cancel()
        running.cancel()
        await asyncio.wait({running})


def _as_episode_error(error: Exception) -> EpisodeError:
    return error if isinstance(error, EpisodeError) else EpisodeError("generation_invalid", str(error))


def _count_metrics(captured: Captured) -> dict[str, float]:
    return {**captured.metrics, **length_metrics(captured.turns)}
