import atexit
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from offbeat.deploy.config import hub
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.agents import TextSampler, load_chat, make_random_agent
from offbeat.deploy.play.engine import open_sampler
from offbeat.deploy.play.episode import trace_episode
from offbeat.deploy.play.openai_agent import OpenAISampler
from offbeat.deploy.play.policy import BatchingSampler, SamplingParams, TransformersPolicy, policy_folder
from offbeat.deploy.play.replicas import open_replicas
from offbeat.deploy.play.rollouts import EpisodeRequest, EpisodeResult, run_episodes
from offbeat.deploy.play.target import PlayTarget, build_target, check_rendering, remove_token_limits
from offbeat.deploy.play.vision_policy import VisionPolicy
from offbeat.deploy.run_folder import newest_saved
from offbeat.envs import registry
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.chat.template_override import write_policy_folder
from offbeat.services.chat.vision import reads_images
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.messages.types import EpisodeKind, Trajectory
from offbeat.services.rollout.agents.episode import AgentRuntime, runtime_for
from offbeat.services.rollout.envs.runners import call_env
from offbeat.trainer.config.issue import ConfigIssue

RANDOM = "random"


async def run_episode(target: PlayTarget, agent: str | Path, *, seed: int, write: Callable[[str], None]) -> Trajectory:
    """agent: `random`, or a policy's folder. Raises ValueError for a negative seed."""
    if seed < 0:
        raise ValueError(f"seed: expected at least 0, got {seed}")
    folder = None if agent == RANDOM else policy_folder(Path(agent))
    chat = load_chat(folder)
    check_rendering(target.env, chat)
    if folder is None:
        target = remove_token_limits(target)
    env = call_env("make_error", registry.make, target.env.env_type, target.env.env_config)
    try:
        if folder is None:
            sample = TextSampler(make_random_agent(env, seed), chat)
        else:
            sample = load_sampler(folder, chat, target, seed)
        trajectory, _ = await trace_episode(
            target, env, sample, chat, seed=seed, show_tokens=folder is not None, write=write
        )
    finally:
        env.close()
    return trajectory


@dataclass(frozen=True, slots=True)
class CollectedEpisodes:
    result: EpisodeResult
    chat: ChatFormat
    calling_tags: Sequence[str] = ()
    """Played tags whose envs have functions."""


async def collect(
    config: RunConfig,
    request: EpisodeRequest,
    agent: str | Path | None,
    progress: Callable[[int, int], None],
    *,
    needs_messages: bool = False,
    endpoint: tuple[str, str] | None = None,
    engine: GenerationConfig | None = None,
) -> CollectedEpisodes:
    """agent: `random`, or as in `find_policy`. endpoint: URL and model that answer in its place. engine: of
    `prepare_engine`, to sample a policy with `num_replicas` of it; None: transformers in this process.

    Raises:
        ConfigError: no envs, messages of envs with functions, or functions or external agents with an endpoint.
        GenerationError: the engine did not start.
    """
    if not config.custom_envs:
        raise ConfigError([ConfigIssue("custom_envs", "no env: name at least one tag")])
    folder = None if agent == RANDOM or endpoint else find_policy(config, agent)
    chat = load_chat(folder)
    manager = config.val_env_manager if request.kind is EpisodeKind.EVAL else config.train_env_manager
    with_functions = {tag for tag, env in config.custom_envs.items() if check_rendering(env, chat)}
    calling_tags = [tag for tag in manager.tags_of(config.custom_envs) if tag in with_functions]
    if calling_tags and needs_messages:
        problem = (
            f"messages hold neither the functions of {calling_tags[0]} nor calls in the policy's format, which the "
            "recorded tokens are: write a .parquet"
        )
        raise ConfigError([ConfigIssue("--out", problem)])
    target = build_target(config, next(iter(config.custom_envs)), request.kind)
    if endpoint is not None:
        tags = manager.tags_of(config.custom_envs)
        if calling := [tag for tag in tags if tag in with_functions or config.custom_envs[tag].agent_runner]:
            problem = f"{calling[0]} has functions or an external agent, which need the policy's own calls"
            raise ConfigError([ConfigIssue("--agent openai", problem)])
        longest = max(config.custom_envs[tag].max_tokens_per_step for tag in tags)
        limits = {
            "temperature": target.temperature,
            "top_p": target.top_p,
            "max_tokens": min(target.max_new_tokens, longest),
        }
        sample = OpenAISampler(*endpoint, chat, stop=target.stop_strings, **limits)
        try:
            result = await run_episodes(config, request, chat, sample, progress, counts_tokens=False)
        finally:
            await sample.close()
        return CollectedEpisodes(result, chat)
    runtime = (
        _random_runtime(config, chat)
        if folder is None
        else runtime_for(config.custom_envs, folder, image_input=config.actor_train.model_args.image_input)
    )
    async with AsyncExitStack() as stack:
        if folder is None:
            sample = None
        elif engine is None:
            sample = load_sampler(folder, chat, target, request.seed)
        else:
            opening = open_sampler if engine.num_replicas == 1 else open_replicas
            sample = await stack.enter_async_context(opening(engine, folder, target, chat.stop_ids, request.seed))
        result = await run_episodes(config, request, chat, sample, progress, runtime)
    return CollectedEpisodes(result, chat, calling_tags)


def _random_runtime(config: RunConfig, chat: ChatFormat) -> AgentRuntime | None:
    """Return the runtime of agents whose model answers at random; None without agents."""
    parsers = {env.agent_runner.tool_call_parser for env in config.custom_envs.values() if env.agent_runner}
    return AgentRuntime({name: chat.calling(None) for name in parsers}) if parsers else None


def find_policy(config: RunConfig, agent: str | Path | None = None) -> Path:
    """Return the model folder of `agent`, the newest checkpoint, or `pretrain`, downloaded from a hub.

    Raises ValueError without a checkpoint of a built-in policy, or of a run that starts from an adapter.
    """
    if agent or newest_saved(config.output_dir) is not None:
        return policy_folder(Path(agent or config.output_dir))
    if config.pretrain == "tiny":
        raise ValueError(
            f"{config.output_dir} holds no checkpoints: train first, or name a policy's folder or `random`"
        )
    if (adapter := config.actor_train.model_args.adapter_name_or_path) is not None:
        raise ValueError(
            f"{config.output_dir} holds no checkpoints, and pretrain is without the adapter of "
            f"actor_train.model_args.adapter_name_or_path ({adapter}): train first, or name a policy's folder or `random`"
        )
    pretrain = Path(hub.download(config.pretrain) if hub.is_hub_id(config.pretrain) else config.pretrain)
    if config.chat_template is None:
        return policy_folder(pretrain)
    folder = Path(mkdtemp(prefix="offbeat-policy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_policy_folder(pretrain, folder, config.chat_template)
    return folder


def load_sampler(folder: Path, chat: ChatFormat, target: PlayTarget, seed: int) -> BatchingSampler:
    params = SamplingParams(target.temperature, target.top_p, target.top_k)
    has_images = reads_images(folder, target.image_input or target.env.shows_images)
    policy_class = VisionPolicy if has_images else TransformersPolicy
    policy = policy_class(folder, chat.stop_ids, seed=seed)
    return BatchingSampler(
        policy,
        params,
        max_new_tokens=target.max_new_tokens,
        stop_strings=target.stop_strings,
        folder=folder,
    )
