"""Trial of an env before a run: short random episodes in a child process."""

import time
from dataclasses import dataclass, field

from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.process_env import ProcessEnv
from offbeat.services.rollout.envs.runners import EnvSpec, EnvTraits

NUM_EPISODES, MAX_STEPS = 2, 3
BUDGET_S = 10.0
"""Time after which no further episode follows."""
STEPS_BUDGET_S = 5.0
"""Time from an episode's reset after which no further step follows."""
UNLIMITED_GIB = float(1 << 20)


@dataclass(slots=True)
class Trial:
    traits: EnvTraits | None = None
    observation: str = ""
    png: bytes = b""
    """First image, if requested."""
    num_episodes: int = 0
    failures: list[EpisodeError] = field(default_factory=list[EpisodeError])

    @property
    def always_fails(self) -> bool:
        return len(self.failures) == self.num_episodes


def trial_spec(env: CustomEnv) -> EnvSpec:
    """Return an env's spec in a child process, whatever its `execution`."""
    memory_gib = env.memory_gib if env.execution == "process" else UNLIMITED_GIB
    return EnvSpec(env.env_type, env.env_config, env.reset_timeout_s, env.step_timeout_s, memory_gib)


async def try_env(env: CustomEnv, seed: int) -> Trial:
    trial, began = Trial(), time.monotonic()
    spec = trial_spec(env)
    runner = ProcessEnv(spec, quiet=True)
    try:
        for number in range(NUM_EPISODES):
            if not runner.healthy:
                runner = ProcessEnv(spec, quiet=True)
            trial.num_episodes += 1
            try:
                await _run_episode(runner, env, seed + number, trial)
            except EpisodeError as error:
                trial.failures.append(error)
                if not error.reason.startswith("step"):
                    break
            if time.monotonic() > began + BUDGET_S:
                break
    finally:
        await runner.close()
    return trial


async def _run_episode(runner: ProcessEnv, env: CustomEnv, seed: int, trial: Trial) -> None:
    if runner.pid is None:
        trial.traits = await runner.start()
    observation = (await runner.reset(seed)).observation
    if trial.num_episodes == 1:
        trial.observation = observation
        trial.png = await runner.image() if env.shows_images else b""
    deadline = time.monotonic() + STEPS_BUDGET_S
    for step in range(MAX_STEPS):
        if time.monotonic() > deadline:
            return
        result = await runner.step(await runner.random_answer(seed + step))
        if result.terminated or result.truncated:
            return
