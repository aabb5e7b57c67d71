"""Trials of a configuration's envs, each in a process."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from offbeat.deploy.config.run import RunConfig
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.trial import Trial, try_env
from offbeat.services.rollout.tracebacks import strip_own_frames
from offbeat.trainer.config.issue import ConfigIssue

logger = logging.getLogger(__name__)

OWN_ENVS = frozenset(("frozen_lake", "sokoban", "webshop", "math", "qa", "code", "prompt"))
"""Envs that Offbeat's tests check."""
MAX_CONCURRENT_TRIALS = 4
FAILURES = {"make": "can't be made", "reset": "can't be reset", "step": "can't be stepped", "image": "draws no image"}
"""Reason's first word -> failure."""
ON_STEP = "; a policy may cause this by answers that the env can't take: give such episodes a reward by on_env_error"


class TrialError(Exception):
    """An env failed in every episode of its trial."""


def try_envs(config: RunConfig) -> dict[str, Trial]:
    """Try foreign envs by tag, except a notebook's, which other processes can't find."""
    envs = {
        tag: env
        for tag, env in config.custom_envs.items()
        if env.env_type not in OWN_ENVS and not env.env_type.startswith("__main__:")
    }
    if not envs:
        return {}
    # The caller's thread may run an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _try_all(envs, config.seed)).result()


async def _try_all(envs: dict[str, CustomEnv], seed: int) -> dict[str, Trial]:
    slots = asyncio.Semaphore(MAX_CONCURRENT_TRIALS)

    async def try_one(env: CustomEnv) -> Trial:
        async with slots:
            return await try_env(env, seed)

    return dict(zip(envs, await asyncio.gather(*map(try_one, envs.values())), strict=True))


def check_trials(config: RunConfig) -> list[ConfigIssue]:
    """Return an issue per env that fails in every episode."""
    issues: list[ConfigIssue] = []
    for tag, trial in try_envs(config).items():
        try:
            refuse_failures(config.custom_envs[tag], trial)
        except TrialError as error:
            key = f"custom_envs.{tag}.env_type"
            issues.append(ConfigIssue(key, f"{config.custom_envs[tag].env_type} {error}"))
    return issues


def refuse_failures(env: CustomEnv, trial: Trial) -> None:
    """Raise `TrialError`, with the traceback, if an env always fails; log occasional failures.

    Errors covered by `on_env_error` don't count.
    """
    rule = env.on_env_error
    failures = [error for error in trial.failures if rule is None or error.reason not in rule.reasons]
    if not failures:
        return
    if trial.always_fails:
        raise TrialError(_describe(failures[0]))
    logger.warning("%s failed in %d of %d episodes: %s", env.env_type, len(failures), trial.num_episodes, failures[0])


def _describe(error: EpisodeError) -> str:
    what, _, how = error.reason.partition("_")
    detail = str(error).removeprefix(f"{error.reason}: ")
    trace = f"\n{strip_own_frames(error.trace)}" if error.trace else ""
    return f"{FAILURES.get(what, 'crashes')}: {detail}{ON_STEP if (what, how) == ('step', 'error') else ''}{trace}"
