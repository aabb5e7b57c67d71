"""`offbeat agent`."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.deploy.cli.env import EXIT_FOUND, EXIT_USAGE, load_settings
from offbeat.deploy.cli.options import refuse_unread

agent_app = typer.Typer(help="Check external agents.", no_args_is_help=True)


@agent_app.callback()
def agent() -> None:
    """Check external agents."""


@agent_app.command("check")
def check(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|AGENT",
            help="A run's YAML file, whose agents are checked, or `module:function`.",
            show_default=False,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Overrides of CONFIG, or settings of AGENT's env.", show_default=False
        ),
    ] = None,
    env: Annotated[str, typer.Option(help="Env of AGENT.")] = "frozen_lake",
    python: Annotated[str, typer.Option(help="Python of AGENT.", show_default="this one")] = "",
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 3,
    limit_s: Annotated[float, typer.Option(min=0.1, help="Time limit of an episode, in seconds.")] = 120.0,
) -> None:
    """Run an agent against a policy that answers at random; list what is wrong.

    Exit code 1 for problems; advice alone: 0.
    """
    from offbeat.deploy.play.agent_check import check_agent

    if not _is_agent(target):
        refuse_unread(context, f"{target} configures its envs and agents: leave it out", "env", "python")
    found = False
    agents, has_images, scored = _agents(target, settings, env, python)
    for tag, rules in agents.items():
        scope: dict[str, Any] = {"has_images": has_images, "is_scored": tag in scored}
        report = asyncio.run(check_agent(tag, rules, num_episodes=episodes, limit_s=limit_s, **scope))
        for finding in report.findings:
            colour = typer.colors.RED if finding.severity == "problem" else typer.colors.YELLOW
            typer.secho(f"{finding.severity:8}", fg=colour, nl=False)
            typer.echo(f"{finding.rule}: {finding.message}")
        if report.durations_s:
            typer.echo(_describe(report))
        if report.problems:
            found = True
        elif not report.rewards:
            typer.secho(f"no episode of the agent of {tag} finished", fg=typer.colors.YELLOW)
        else:
            typer.secho(f"the agent of {tag} holds the contract", fg=typer.colors.GREEN)
    if found:
        raise typer.Exit(EXIT_FOUND)


def _describe(report: Any) -> str:
    first, *later = report.durations_s
    times = f"the first took {first:.1f} s" + (
        f", the others {sum(later) / len(later):.2f} s on average" if later else ""
    )
    rewards = ", ".join(f"{reward:g}" for reward in report.rewards) or "none"
    count = len(report.durations_s)
    return f"{count} episodes, {report.num_calls} calls, {report.num_steps} env steps; {times}; rewards: {rewards}"


def _is_agent(target: str) -> bool:
    return ":" in target and not target.endswith((".yaml", ".yml"))


def _agents(target: str, settings: list[str] | None, env: str, python: str) -> tuple[dict[str, Any], bool, set[str]]:
    """Return agents by tag, whether the policy takes images, and the tags that rewards score."""
    from pydantic import ValidationError

    from offbeat.deploy.config.errors import ConfigError
    from offbeat.deploy.play.agent_check import scored_tags, takes_images
    from offbeat.deploy.play.target import load_config
    from offbeat.services.rollout.config import AgentRunner, CustomEnv

    try:
        if _is_agent(target):
            runner = AgentRunner(path=target, python=python)
            return (
                {target: CustomEnv(env_type=env, env_config=load_settings(env, settings), agent_runner=runner)},
                True,
                set(),
            )
        config = load_config(Path(target), settings or [])
    except (ConfigError, ValidationError) as error:
        typer.echo(f"{target}: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    agents = {tag: rules for tag, rules in config.custom_envs.items() if rules.agent_runner}
    if not agents:
        typer.echo(f"{target} has no agent_runner", err=True)
        raise typer.Exit(EXIT_USAGE)
    return agents, takes_images(config), scored_tags(config)
