"""Episodes in this process, as run by `offbeat play`, `offbeat rollout` and the Python API."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.agents import SpokenAnswers, chat_of, random_speaker
from offbeat.deploy.play.episode import watch
from offbeat.deploy.play.policy import CHECKPOINTS, SamplingParams, TogetherSampler, TransformersPolicy, policy_folder
from offbeat.deploy.play.rollouts import EpisodeRequest, EpisodeResult, play_many
from offbeat.deploy.play.target import PlayTarget, check_shown, target_of, unbounded
from offbeat.deploy.play.vision_policy import VisionPolicy
from offbeat.envs import registry
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.chat.vision import model_family
from offbeat.services.messages.types import Trajectory
from offbeat.services.rollout.agents.episode import runtime_for

RANDOM = "random"


async def run_episode(target: PlayTarget, agent: str | Path, *, seed: int, tell: Callable[[str], None]) -> Trajectory:
    """Run one episode; agent: `random`, or the folder of a policy."""
    folder = None if agent == RANDOM else policy_folder(Path(agent))
    chat = chat_of(folder)
    check_shown(target.env, chat)
    if folder is None:
        target = unbounded(target)
    env = registry.make(target.env.env_type, target.env.env_config)
    try:
        if folder is None:
            sample = SpokenAnswers(random_speaker(env, seed), chat)
        else:
            sample = policy_sampler(folder, chat, target, seed)
        trajectory, _ = await watch(target, env, sample, chat, seed=seed, show_tokens=folder is not None, tell=tell)
    finally:
        env.close()
    return trajectory


@dataclass(frozen=True, slots=True)
class CollectedEpisodes:
    """Episodes that were collected, and the chat format that reads their tokens."""

    result: EpisodeResult
    chat: ChatFormat


async def collect(
    config: RunConfig, request: EpisodeRequest, agent: str | Path | None, progress: Callable[[int, int], None]
) -> CollectedEpisodes:
    """Collect the episodes of `request`; agent: `random`, the folder of a policy, or None as in `find_policy`."""
    folder = None if agent == RANDOM else find_policy(config, agent)
    chat = chat_of(folder)
    for env in config.custom_envs.values():
        check_shown(env, chat)
    target = target_of(config, next(iter(config.custom_envs)))
    sample = None if folder is None else policy_sampler(folder, chat, target, request.seed)
    runtime = None if folder is None else runtime_for(config.custom_envs, folder)
    return CollectedEpisodes(await play_many(config, request, chat, sample, progress, runtime), chat)


def find_policy(config: RunConfig, agent: str | Path | None = None) -> Path:
    """Return the model folder of `agent`, or of the run's newest checkpoint, or its `pretrain`.

    Raises:
        ValueError: the run has no checkpoint yet and its policy is the built-in one.
    """
    own = config.output_dir if (config.output_dir / CHECKPOINTS).is_dir() else Path(config.pretrain)
    if agent is None and str(own) == "tiny":
        raise ValueError(
            f"{config.output_dir} holds no checkpoints: train first, or give the folder of a policy, or `random`"
        )
    return policy_folder(Path(agent) if agent else own)


def policy_sampler(folder: Path, chat: ChatFormat, target: PlayTarget, seed: int) -> TogetherSampler:
    """Load the policy of a folder; its episodes' turns are sampled in batches."""
    params = SamplingParams(target.temperature, target.top_p, target.top_k)
    policy_class = TransformersPolicy if model_family(folder) is None else VisionPolicy
    policy = policy_class(folder, chat.stop_ids, seed=seed)
    return TogetherSampler(policy, params, max_new_tokens=target.max_new_tokens)
