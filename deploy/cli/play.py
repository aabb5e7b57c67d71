"""`offbeat play`, `offbeat rollout` and `offbeat inspect`."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import typer

from offbeat.deploy.cli.env import parse_settings
from offbeat.deploy.local.signals import interruptible

EXIT_USAGE = 2

EnvOrConfig = Annotated[
    str, typer.Argument(metavar="ENV", help="An env's name, `module:Class`, or a run's YAML file.", show_default=False)
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the env, as YAML.", show_default=False),
]
Agent = Annotated[
    str,
    typer.Option(
        help="`human`, `random`, `openai URL`, or `policy PATH` (or PATH alone): a model's folder, or a run's."
    ),
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="Show the tokens of this folder's tokenizer. A policy brings its own.")
]


def play(
    env: EnvOrConfig,
    settings: Settings = None,
    agent: Agent = "human",
    seed: Annotated[int, typer.Option(help="Seed of the env and of the agent.")] = 0,
    tag: Annotated[
        str | None, typer.Option(help="Tag of the YAML file; the first by default.", show_default=False)
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Maximum number of turns.", show_default=False)] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.", show_default=False)
    ] = None,
    tokenizer: Tokenizer = None,
    model: Annotated[
        str, typer.Option(help="Model of an `openai` agent; the first that the endpoint lists by default.")
    ] = "",
    template: Annotated[
        str | None,
        typer.Option(
            help="User message of a turn, in place of `agent_template`; `{image}` in it shows the env's image.",
            show_default=False,
        ),
    ] = None,
    render: Annotated[Path | None, typer.Option(help="Write the episode as .gif or .html.", show_default=False)] = None,
) -> None:
    """Play and trace one episode on this machine. Needs no Ray, GPU or Redis.

    `offbeat play ENV --agent openai http://localhost:8000/v1` uses an OpenAI-compatible endpoint (key: OPENAI_API_KEY).
    """
    if render is not None and render.suffix not in (".gif", ".html"):
        _exit_usage(f"--render {render}: write .gif or .html")
    if render is not None:
        _check_target("--render", render)
    agent, settings = _split_policy_path(agent, settings or [])
    endpoint, settings = _split_endpoint("play ENV", agent, model, settings)
    _check_temperature(agent, temperature)
    from dataclasses import replace

    from offbeat.deploy.play.target import find_target

    changes = parse_settings(settings)
    try:
        setting = find_target(env, changes, tag, max_steps, template)
        if temperature is not None:
            setting = replace(setting, temperature=temperature)
        with interruptible():
            asyncio.run(_play(setting, agent, endpoint, seed, temperature, tokenizer, render))
    except _user_errors() as error:
        _exit_usage(_error_text(error))


def _check_temperature(agent: str | None, temperature: float | None) -> None:
    if temperature is not None and agent in ("human", "random"):
        _exit_usage(f"--temperature has no effect with --agent {agent}: leave it out, or take a policy")


def _split_endpoint(
    command: str, agent: str | None, model: str, words: list[str]
) -> tuple[tuple[str, str] | None, list[str]]:
    """Return URL and model of an `openai` agent, and the other words."""
    urls = [word for word in words if word.startswith(("http://", "https://"))]
    if agent == "openai" and len(urls) != 1:
        _exit_usage(
            f"--agent openai needs the endpoint's base URL: offbeat {command} --agent openai http://localhost:8000/v1"
        )
    if agent != "openai" and (urls or model):
        _exit_usage("a URL and --model belong to --agent openai")
    return (urls[0], model) if urls else None, [word for word in words if word not in urls]


def _split_policy_path(agent: str, words: list[str]) -> tuple[str, list[str]]:
    if agent != "policy":
        return agent, words
    paths = [word for word in words if "=" not in word]
    if len(paths) != 1:
        _exit_usage("--agent policy needs a path: offbeat play ENV --agent policy runs/sokoban")
    return paths[0], [word for word in words if "=" in word]


async def _play(
    setting: Any,
    agent: str,
    endpoint: tuple[str, str] | None,
    seed: int,
    temperature: float | None,
    tokenizer: Path | None,
    render: Path | None,
) -> None:
    from offbeat.deploy.play.agents import (
        TextSampler,
        UserLeftError,
        load_chat,
        make_human_agent,
        make_random_agent,
    )
    from offbeat.deploy.play.episode import trace_episode
    from offbeat.deploy.play.openai_agent import OpenAISampler
    from offbeat.deploy.play.policy import policy_folder
    from offbeat.deploy.play.session import load_sampler
    from offbeat.deploy.play.target import check_rendering, remove_token_limits
    from offbeat.envs import registry
    from offbeat.services.rollout.envs.runners import call_env
    from offbeat.trainer.rendering.episodes import make_rendered, write_gif, write_html

    spoken = agent in ("human", "random") or endpoint is not None
    if endpoint and tokenizer:
        raise ValueError("--tokenizer can't show the tokens of an endpoint's model")
    folder = tokenizer if spoken else policy_folder(Path(agent))
    chat = load_chat(folder)
    check_rendering(setting.env, chat)
    setting = remove_token_limits(setting) if spoken else setting
    make = make_rendered if render else registry.make
    made = call_env("make_error", make, setting.env.env_type, setting.env.env_config)
    try:
        if endpoint:
            sample = OpenAISampler(*endpoint, chat, temperature=temperature)
        elif spoken:
            sample = TextSampler(make_human_agent() if agent == "human" else make_random_agent(made, seed), chat)
        else:
            assert folder is not None, "a policy has a folder"
            sample = load_sampler(folder, chat, setting, seed)
        _, played = await trace_episode(
            setting, made, sample, chat, seed=seed, show_tokens=folder is not None, write=typer.echo
        )
    except UserLeftError:
        typer.echo("\nleft before the end")
        return
    finally:
        made.close()
    if render is not None:
        with _writing("--render", render):
            if render.suffix == ".html":
                write_html(render, [played], title=f"{setting.tag}, seed {seed}")
            elif not write_gif(render, [played]):
                _exit_usage(f"{setting.env.env_type} draws no images (render_mode rgb_array): write .html instead")
        typer.echo(f"wrote {render}")


def rollout(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override values of the file.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 64,
    out: Annotated[
        Path, typer.Option(help="File to write: .parquet with tokens, or .jsonl with messages alone, for TRL.")
    ] = Path("rollout.parquet"),
    per: Annotated[
        Literal["episode", "answer", "pair"],
        typer.Option(
            help="Rows of a .jsonl: an episode's `messages`, each answer's `prompt` and `completion`, or `chosen` and "
            "`rejected`, a group's best and worst episode, for `pipeline: dpo`."
        ),
    ] = "episode",
    agent: Annotated[
        str | None,
        typer.Option(
            help="`random`, `openai URL`, or `policy PATH` (or PATH alone); else the run's newest checkpoint, else "
            "`pretrain`."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model of an `openai` agent; the first that the endpoint lists by default.")
    ] = "",
    split: Annotated[
        Literal["held_out", "train"], typer.Option(help="Tasks of evaluation or of training.")
    ] = "held_out",
    group_size: Annotated[int, typer.Option(min=1, help="Number of episodes of each task, for pass@k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; the run's by default.", show_default=False)] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of episodes played at a time.")] = 32,
) -> None:
    """Play a run's episodes on this machine, for evaluation, pass@k, or training data.

    Writes messages and rewards, in a parquet file with tokens, masks and logprobs, too. `--agent openai
    http://localhost:8000/v1` plays with an OpenAI-compatible endpoint (key: OPENAI_API_KEY), whose tokens are unknown: its
    parquet has bytes in their place.
    """
    from offbeat.deploy.play.rollouts import EpisodeRequest
    from offbeat.services.messages.types import EpisodeKind

    if episodes % group_size:
        _exit_usage(f"{episodes} episodes are no whole number of groups of {group_size}")
    if out.suffix not in (".parquet", ".jsonl"):
        _exit_usage(f"--out {out}: the name must end in .parquet or .jsonl")
    if per != "episode" and out.suffix != ".jsonl":
        _exit_usage(f"--per {per} needs a .jsonl file as --out")
    if per == "pair" and group_size < 2:
        _exit_usage("--per pair compares the episodes of a task: set --group-size to at least 2")
    _check_target("--out", out)
    kind = EpisodeKind.EVAL if split == "held_out" else EpisodeKind.TRAIN
    try:
        from offbeat.deploy.play.target import load_config

        endpoint, overrides = _split_endpoint("rollout CONFIG", agent, model, overrides or [])
        if agent is not None:
            agent, overrides = _split_policy_path(agent, overrides)
        _check_temperature(agent, temperature)
        loaded = load_config(config, overrides)
        manager = loaded.val_env_manager if kind is EpisodeKind.EVAL else loaded.train_env_manager
        tags = manager.tags_of(loaded.custom_envs)
        agents = [tag for tag, env in loaded.custom_envs.items() if env.agent_runner and tag in tags]
        if out.suffix == ".jsonl" and agents:
            _exit_usage(
                f"--out {out}: the conversations of {agents[0]}'s agent with the policy are recorded as tokens alone: write "
                "a .parquet"
            )
        if per == "pair" and (tag := _longest_stepwise(loaded)):
            _exit_usage(f"--per pair: {tag} has a context per turn, so episodes are no conversations: use --per answer")
        order = EpisodeRequest(episodes, group_size, kind, loaded.seed if seed is None else seed, concurrency)
        _rollout(loaded, order, agent, endpoint, temperature, out, per)
    except _user_errors() as error:
        _exit_usage(_error_text(error))


def _longest_stepwise(config: Any) -> str | None:
    """Return a tag whose episodes have several contexts of one turn, if any."""
    from offbeat.deploy.play.conversations import stepwise_tags

    return next((tag for tag in sorted(stepwise_tags(config)) if config.custom_envs[tag].max_steps > 1), None)


def _rollout(
    config: Any,
    order: Any,
    agent: str | None,
    endpoint: tuple[str, str] | None,
    temperature: float | None,
    out: Path,
    per: Any,
) -> None:
    from rich.progress import Progress

    from offbeat.deploy.play.conversations import stepwise_tags, write_conversations
    from offbeat.deploy.play.parquet import decode_episode, write_parquet
    from offbeat.deploy.play.session import collect, find_policy
    from offbeat.services.messages.types import EpisodeKind

    if temperature is not None:
        name = "val_env_manager" if order.kind is EpisodeKind.EVAL else "actor_infer"
        table = getattr(config, name)
        args = table.generating_args.model_copy(update={"temperature": temperature})
        config = config.model_copy(update={name: table.model_copy(update={"generating_args": args})})
    typer.echo(f"collecting {order.episodes} episodes with {endpoint[0] if endpoint else agent or find_policy(config)}")
    with interruptible(), Progress(transient=True) as bar:
        line = bar.add_task("episodes", total=order.episodes)

        def show(done: int, _: int) -> None:
            bar.update(line, completed=done)

        rollouts = asyncio.run(
            collect(config, order, agent, show, needs_messages=out.suffix == ".jsonl", endpoint=endpoint)
        )
    played, chat = rollouts.result, rollouts.chat
    if not played.trajectories:
        _print_summary(played, order)
        typer.echo(f"no episode was played: {out} was not written", err=True)
        raise typer.Exit(1)
    if out.suffix == ".jsonl":
        with _writing("--out", out):
            num_rows = write_conversations(out, played.trajectories, per, stepwise_tags(config))
        typer.echo(f"{num_rows} rows")
    else:
        episodes = [decode_episode(trajectory, chat) for trajectory in played.trajectories]
        with _writing("--out", out):
            write_parquet(out, episodes)
        stepwise = stepwise_tags(config)
        for tag in sorted({t.tag for t in played.trajectories if t.seats or (t.tag in stepwise and len(t.turns) > 1)}):
            typer.echo(f"`messages` of {tag} are turns of several contexts in a row: for training data write a .jsonl")
        played_tags = {t.tag for t in played.trajectories}
        for tag in [tag for tag, env in config.custom_envs.items() if env.agent_runner and tag in played_tags]:
            typer.echo(f"`messages` of {tag} are the env's and its agent's: only the tokens are the policy's")
        for tag in rollouts.calling_tags:
            typer.echo(
                f"`messages` of {tag} are without its functions: only the tokens are what the policy reads and writes"
            )
    _print_summary(played, order)
    typer.echo(f"wrote {out}" + (f": offbeat inspect {out}" if out.suffix == ".parquet" else ""))


def _print_summary(played: Any, order: Any) -> None:
    from itertools import groupby

    from offbeat.deploy.play.rollouts import read_success
    from offbeat.trainer.learner.evaluation_metrics import pass_at_k

    for reason, count in played.failures.items():
        what = "1 episode" if count == 1 else f"{count} episodes"
        typer.secho(f"{what} could not be played: {played.last_errors[reason]}", fg=typer.colors.RED)
    done = played.trajectories
    if not done:
        return
    typer.echo(f"reward {sum(t.reward for t in done) / len(done):.4g}, mean of {len(done)} episodes")
    groups = [[bool(read_success(t)) for t in members] for _, members in groupby(done, key=lambda t: t.group_id)]
    if any(read_success(t) is not None for t in done):
        complete = [group for group in groups if len(group) == order.group_size]
        powers = [2**i for i in range(order.group_size.bit_length())]
        for k in [k for k in dict.fromkeys((*powers, order.group_size)) if k <= order.group_size and complete]:
            typer.echo(
                f"pass@{k} {pass_at_k(complete, k):.4g}"
                if order.group_size > 1
                else f"success {pass_at_k(complete, 1):.4g}"
            )


def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE|RUN", help="A file of `offbeat rollout`, or a run's folder.")],
    color: Annotated[
        Literal["logprob", "version", "mask"], typer.Option(help="Quantity that colours the tokens.")
    ] = "logprob",
    episode: Annotated[int | None, typer.Option(help="Show only this episode.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of episodes.")] = 3,
) -> None:
    """Show recorded trajectories by token."""
    from offbeat.deploy.play.inspector import render_episodes

    try:
        for line in render_episodes(path, colour=color, episode=episode, limit=limit):
            typer.echo(line)
    except _user_errors() as error:
        _exit_usage(_error_text(error))


def _check_target(option: str, path: Path) -> None:
    """Refuse a file that can't be written, before anything is played."""
    with _writing(option, path):
        if not path.parent.is_dir():
            _exit_usage(f"{option} {path}: there is no folder {path.parent}")
        if path.is_dir():
            _exit_usage(f"{option} {path}: is a folder")
        TemporaryFile(dir=path.parent).close()


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _exit_usage(f"{option} {path}: can't be written: {error}")


def _user_errors() -> tuple[type[Exception], ...]:
    from offbeat.deploy.config.errors import ConfigError
    from offbeat.services.errors import RolloutError

    return ConfigError, RolloutError, ValueError


def _error_text(error: Exception) -> str:
    from offbeat.deploy.config.errors import ConfigError

    if isinstance(error, ConfigError):
        return "\n".join(str(issue) for issue in error.issues)
    return str(error)


def _exit_usage(message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(EXIT_USAGE)
