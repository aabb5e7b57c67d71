"""`offbeat play` and `offbeat inspect`."""

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offbeat.deploy.cli.agent_option import check_temperature, split_endpoint, split_policy_path
from offbeat.deploy.cli.env import parse_settings
from offbeat.deploy.cli.usage import check_target, error_text, exit_usage, user_errors, writing
from offbeat.deploy.local.signals import interruptible

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
        exit_usage(f"--render {render}: write .gif or .html")
    if render is not None:
        check_target("--render", render)
    agent, settings = split_policy_path(agent, settings or [])
    endpoint, settings = split_endpoint("play ENV", agent, model, settings)
    check_temperature(agent, temperature)
    from dataclasses import replace

    from offbeat.deploy.play.target import find_target

    changes = parse_settings(settings)
    try:
        setting = find_target(env, changes, tag, max_steps, template)
        if temperature is not None:
            setting = replace(setting, temperature=temperature)
        with interruptible():
            asyncio.run(_play(setting, agent, endpoint, seed, temperature, tokenizer, render))
    except user_errors() as error:
        exit_usage(error_text(error))


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
        with writing("--render", render):
            if render.suffix == ".html":
                write_html(render, [played], title=f"{setting.tag}, seed {seed}")
            elif not write_gif(render, [played]):
                exit_usage(f"{setting.env.env_type} draws no images (render_mode rgb_array): write .html instead")
        typer.echo(f"wrote {render}")


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
    except user_errors() as error:
        exit_usage(error_text(error))
