"""Contract of external agents, checked by episodes with a scripted policy."""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from offbeat.deploy.config import hub
from offbeat.deploy.config.checks.agents import check_agent as check_settings
from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.agents import TextSampler, load_chat
from offbeat.deploy.play.target import PlayTarget, remove_token_limits
from offbeat.envs.contract import Finding
from offbeat.envs.dataset.files import open_rows
from offbeat.envs.dataset.prompt import PromptConfig, RowPrompt, read_prompt
from offbeat.envs.registry import check_env_config
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import Completion, EpisodeKind, EpisodeTask, PromptImage, Sampling, Trajectory
from offbeat.services.rollout.agents.episode import AgentRuntime, play_with_agent
from offbeat.services.rollout.agents.pool import AgentOutcome, AgentPool
from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.config import PROMPT_ENV, TOOL_ENV, AgentRunner, CustomEnv
from offbeat.services.rollout.data.images import read_images
from offbeat.services.rollout.envs.process_env import ProcessEnv
from offbeat.services.rollout.envs.runners import Opening, StepResult
from offbeat.services.rollout.envs.trial import trial_spec
from offbeat.services.rollout.episodes.episode import EpisodePlan, PlayableEnv
from offbeat.services.rollout.tracebacks import strip_own_frames
from offbeat.trainer.config.issue import ConfigIssue

logger = logging.getLogger(__name__)

REMEDIES = {
    "agent_silent": "it must call the policy: take task.base_url as base URL and task.api_key as key "
    "(a command: OPENAI_BASE_URL and OPENAI_API_KEY)",
    "agent_result": "return a number (the reward), a string (an answer for the env), None after task.step, or "
    "{'reward': ..., 'answer': ..., 'metrics': {...}}",
    "agent_timeout": "raise agent_runner.timeout_s, or limit its steps",
    "agent_crashed": "its process ended by itself; its last words are above",
    "agent_error": "it fails before its first call to the policy, whatever the policy answers",
}
PRINTED_NUMBER = (
    "the last line that it printed is a number, and so the reward: a number that is the answer must be printed as JSON "
    'text ("42") or {"answer": ...}'
)
NO_REWARD = (
    "it returned None and did not step the env, so that its reward is always 0: return the reward or an answer, or step the "
    "env by task.step"
)
CERTAIN = frozenset(
    ("agent_silent", "agent_error", "agent_crashed", "path", "command", "python", "episodes_per_process")
)
"""Rules that random answers can't violate."""
ANSWER_ENVS = frozenset(("math", "qa", "prompt", "reasoning_gym"))
"""Envs that score an answer."""
TRIAL_S = 90.0
"""Limit of an agent's trial before a run."""


@dataclass(slots=True)
class AgentReport:
    findings: list[Finding] = field(default_factory=list[Finding])
    num_calls: int = 0
    """Calls to the policy."""
    num_steps: int = 0
    """Steps of the env."""
    durations_s: list[float] = field(default_factory=list[float])
    """The first includes the agent's imports."""
    rewards: list[float] = field(default_factory=list[float])
    """Of finished episodes."""

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "problem"]

    def add(self, severity: Literal["problem", "advice"], rule: str, message: str) -> None:
        finding = Finding(severity, rule, message)
        if finding not in self.findings:
            self.findings.append(finding)


async def check_agent(
    tag: str,
    env: CustomEnv,
    *,
    num_episodes: int = 3,
    limit_s: float | None = None,
    seed: int = 0,
    has_images: bool = True,
    is_scored: bool = False,
) -> AgentReport:
    """Run episodes of an agent with the real gateway and env, and random answers, up to the first problem.

    limit_s: per episode, at most the runner's. has_images: whether the policy has image input. is_scored: whether a
    run's rewards score the episodes.
    """
    report, runner = AgentReport(), env.agent_runner
    assert runner is not None, "a tag with an agent is needed"
    for issue in check_settings(tag, runner):
        report.add("problem", issue.path.rpartition(".")[2], issue.message)
    for message in check_env_config(env.env_type, env.env_config):
        report.add("problem", "env", message)
    if report.problems:
        return report
    timeout_s = runner.timeout_s if limit_s is None else min(limit_s, runner.timeout_s)
    runner = runner.model_copy(update={"timeout_s": timeout_s, "tool_call_parser": None})
    rules = env.model_copy(update={"on_agent_error": None, "on_env_error": None})
    check = _AgentCheck(tag, rules, runner, report, load_chat(None, has_images=has_images), is_scored=is_scored)
    try:
        for number in range(num_episodes):
            await check.run(seed + number)
            if report.problems:
                break
    finally:
        await check.close()
    return report


def takes_images(config: RunConfig) -> bool:
    """Return whether the policy has image input, or is a hub's, which may not be here."""
    return has_vision(config) or hub.is_hub_id(config.pretrain)


def scored_tags(config: RunConfig) -> set[str]:
    """Return the tags whose episodes rewards score."""
    return set() if config.scoring is None else {tag for tag in config.custom_envs if config.scoring.of_tag(tag)}


def try_agents(config: RunConfig) -> list[ConfigIssue]:
    """Run an episode of each agent; return failures independent of the policy, log others."""
    agents = {tag: env for tag, env in config.custom_envs.items() if env.agent_runner}
    if not agents:
        return []
    # The caller's thread may run an event loop.
    with ThreadPoolExecutor(1) as thread:
        reports = thread.submit(asyncio.run, _try_all(config, agents, has_images=takes_images(config))).result()
    issues: list[ConfigIssue] = []
    for tag, report in reports.items():
        for finding in report.findings:
            if finding.severity == "problem" and finding.rule in CERTAIN:
                issues.append(ConfigIssue(f"custom_envs.{tag}.agent_runner", finding.message))
            else:
                logger.warning("agent of %s: %s", tag, finding.message)
    return issues


async def _try_all(config: RunConfig, agents: Mapping[str, CustomEnv], *, has_images: bool) -> dict[str, AgentReport]:
    scored = scored_tags(config)
    checks = (
        check_agent(
            tag,
            env,
            num_episodes=1,
            limit_s=TRIAL_S,
            seed=config.seed,
            has_images=has_images,
            is_scored=tag in scored,
        )
        for tag, env in agents.items()
    )
    return dict(zip(agents, await asyncio.gather(*checks), strict=True))


class _CountingPool(AgentPool):
    def __init__(self) -> None:
        super().__init__()
        self.outcome: AgentOutcome | None = None

    async def run(self, runner: AgentRunner, task: AgentTask) -> AgentOutcome:
        self.outcome = await super().run(runner, task)
        return self.outcome


class _CountingEnv:
    """An env and the random answers to it, one call at a time."""

    def __init__(self, env: ProcessEnv, seed: int) -> None:
        self._env = env
        self._seeds = itertools.count(seed * 1_000_003)
        self._lock = asyncio.Lock()
        self.num_steps = 0

    async def reset(self, seed: int) -> Opening:
        async with self._lock:
            return await self._env.reset(seed)

    async def step(self, action: str) -> StepResult:
        self.num_steps += 1
        async with self._lock:
            return await self._env.step(action)

    async def image(self) -> bytes:
        async with self._lock:
            return await self._env.image()

    async def random_answer(self) -> str:
        async with self._lock:
            return await self._env.random_answer(next(self._seeds))


class _AgentCheck:
    def __init__(
        self,
        tag: str,
        env: CustomEnv,
        runner: AgentRunner,
        report: AgentReport,
        chat: ChatFormat,
        *,
        is_scored: bool,
    ) -> None:
        self._is_scored = is_scored
        self._target = remove_token_limits(PlayTarget(tag, env, 0))
        self._runner, self._report = runner, report
        self._chat = chat
        self._runtime = AgentRuntime({None: self._chat.calling(None)})
        self._runtime.pool = self._pool = _CountingPool()

    async def run(self, seed: int) -> None:
        target, report = self._target, self._report
        rules = target.env
        runner = ProcessEnv(trial_spec(rules))
        env, before, began = _CountingEnv(runner, seed), report.num_calls, time.monotonic()
        try:
            traits = await runner.start()

            async def answer(
                prompt: tuple[int, ...], max_tokens: int, _: tuple[PromptImage, ...] = (), **__: tuple[str, ...]
            ) -> Completion:
                report.num_calls += 1
                text = await env.random_answer()
                return await TextSampler(lambda: text, self._chat)(prompt, max_tokens)

            sampling = Sampling(max_new_tokens=target.max_new_tokens, stop_token_ids=self._chat.stop_ids)
            episode = EpisodeTask(EpisodeKind.EVAL, "check", seed, 0, 0, 0)
            row = await asyncio.to_thread(_read_row, rules, seed)
            plan = EpisodePlan(
                episode, target.tag, seed, rules, target.sequence_length, sampling, False, "check", prompt=row
            )
            playable: PlayableEnv = env
            played = await play_with_agent(plan, self._runner, playable, traits, answer, self._runtime)
        except EpisodeError as error:
            self._explain(error, report.num_calls - before)
        else:
            report.rewards.append(played.reward)
            if not self._is_scored and _has_no_reward(self._pool.outcome, env.num_steps):
                report.add("problem", "reward", NO_REWARD)
            for severity, rule, message in _read_trajectory(played):
                report.add(severity, rule, message)
            if rules.env_type in ANSWER_ENVS and self._runner.command and _is_number(self._pool.outcome):
                report.add("advice", "reward", PRINTED_NUMBER)
        finally:
            report.num_steps += env.num_steps
            report.durations_s.append(time.monotonic() - began)
            await runner.close()

    async def close(self) -> None:
        await self._runtime.close()

    def _explain(self, error: EpisodeError, num_calls: int) -> None:
        what, trace = (
            str(error).removeprefix(f"{error.reason}: "),
            f"\n{strip_own_frames(error.trace)}" if error.trace else "",
        )
        if error.reason == "agent_error" and num_calls:
            message = (
                f"{what} after {num_calls} call(s) to the policy, whose answers were random: where those of a real policy "
                f"raise it, too, set on_agent_error, or such episodes are repeated until they pass{trace}"
            )
            self._report.add("advice", error.reason, message)
            return
        remedy = REMEDIES.get(error.reason, "the env failed: try it by `offbeat env check`")
        self._report.add("problem", error.reason, f"{what}; {remedy}{trace}")


def _has_no_reward(outcome: AgentOutcome | None, num_steps: int) -> bool:
    return outcome is not None and outcome.reward is None and outcome.answer is None and not num_steps


def _is_number(outcome: AgentOutcome | None) -> bool:
    return outcome is not None and outcome == AgentOutcome(reward=outcome.reward) != AgentOutcome()


Findings = Iterator[tuple[Literal["problem", "advice"], str, str]]


def _read_row(env: CustomEnv, seed: int) -> RowPrompt | None:
    """Return the row that an env of type `prompt` shows, also within `tools`; None for other envs."""
    settings: Mapping[str, Any] = env.env_config
    env_type: Any = env.env_type
    while env_type == TOOL_ENV:
        env_type, settings = settings.get("env_type"), cast(Mapping[str, Any], settings.get("env_config") or {})
    if env_type != PROMPT_ENV:
        return None
    config = PromptConfig.model_validate(settings, strict=False)
    rows = open_rows(config.dataset_name)
    row = rows[seed % len(rows)]
    prompt = read_prompt(row, config.messages_key, config.prompt_key, config.images_key)
    images = read_images(row.get(config.images_key), rows.folder) if prompt.num_images else ()
    return prompt._replace(images=images)


def _read_trajectory(played: Trajectory) -> Findings:
    metrics = played.metrics
    if metrics.get("branches", 1.0) > 1.0:
        yield (
            "advice",
            "history",
            f"{metrics['agent_calls']:.0f} calls became {metrics['branches']:.0f} sequences, as later calls do not repeat "
            "earlier answers: correct, but each sequence is computed by itself",
        )
    if metrics.get("masked_answers"):
        yield "advice", "delivery", "it hung up before an answer had arrived: such answers are not trained"
    if metrics.get("unverified_messages"):
        yield (
            "advice",
            "history",
            "it sends assistant messages that the policy did not write: they are context, not trained",
        )
    if metrics.get("ignored_parameters"):
        yield "advice", "sampling", "it sets parameters that are the run's or have no effect here: they are ignored"
