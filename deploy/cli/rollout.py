"""`offbeat rollout`."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from offbeat.deploy.cli.agent_option import check_temperature, split_endpoint, split_policy_path
from offbeat.deploy.cli.usage import check_target, error_text, exit_usage, user_errors, writing
from offbeat.deploy.local.signals import interruptible

CONCURRENCY = 32
"""Default number of episodes at a time, of each engine."""


class SamplingOptions(NamedTuple):
    engine: Any
    """`transformers`, or a `ServedName`."""
    replicas: int | None
    temperature: float | None
    scales_concurrency: bool
    """Whether each engine gets as many episodes at a time."""


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
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of episodes played at a time; 32 for each engine by default.", show_default=False
        ),
    ] = None,
    engine: Annotated[
        Literal["transformers", "config", "vllm", "hf_infer", "sglang"],
        typer.Option(
            help="What samples a policy: transformers, the engine of `actor_infer` (`config`), or one by name."
        ),
    ] = "transformers",
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of engines, each on its own GPUs; `actor_infer.num_replicas` by default, as far as this machine's "
            "GPUs suffice, and one on CPUs.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Play a run's episodes on this machine, for evaluation, pass@k, or training data.

    Writes messages and rewards, in a parquet file with tokens, masks and logprobs, too. `--engine config` samples with the
    run's engine, on GPUs if there are. `--agent openai http://localhost:8000/v1` plays with an OpenAI-compatible endpoint
    (key: OPENAI_API_KEY), whose tokens are unknown: its parquet has bytes in their place.
    """
    from offbeat.deploy.play.rollouts import EpisodeRequest
    from offbeat.services.messages.types import EpisodeKind

    if episodes % group_size:
        exit_usage(f"{episodes} episodes are no whole number of groups of {group_size}")
    if out.suffix not in (".parquet", ".jsonl"):
        exit_usage(f"--out {out}: the name must end in .parquet or .jsonl")
    if per != "episode" and out.suffix != ".jsonl":
        exit_usage(f"--per {per} needs a .jsonl file as --out")
    if engine != "transformers" and agent in ("random", "openai"):
        exit_usage(f"--engine has no effect with --agent {agent}: leave it out, or take a policy")
    if replicas is not None and engine == "transformers":
        exit_usage("--replicas needs an engine: add --engine config")
    if per == "pair" and group_size < 2:
        exit_usage("--per pair compares the episodes of a task: set --group-size to at least 2")
    check_target("--out", out)
    kind = EpisodeKind.EVAL if split == "held_out" else EpisodeKind.TRAIN
    try:
        from offbeat.deploy.play.target import load_config

        endpoint, overrides = split_endpoint("rollout CONFIG", agent, model, overrides or [])
        if agent is not None:
            agent, overrides = split_policy_path(agent, overrides)
        check_temperature(agent, temperature)
        loaded = load_config(config, overrides)
        manager = loaded.val_env_manager if kind is EpisodeKind.EVAL else loaded.train_env_manager
        tags = manager.tags_of(loaded.custom_envs)
        agents = [tag for tag, env in loaded.custom_envs.items() if env.agent_runner and tag in tags]
        if out.suffix == ".jsonl" and agents:
            exit_usage(
                f"--out {out}: the conversations of {agents[0]}'s agent with the policy are recorded as tokens alone: write "
                "a .parquet"
            )
        if per == "pair" and (tag := _longest_stepwise(loaded)):
            exit_usage(f"--per pair: {tag} has a context per turn, so episodes are no conversations: use --per answer")
        order = EpisodeRequest(
            episodes, group_size, kind, loaded.seed if seed is None else seed, concurrency or CONCURRENCY
        )
        sampling = SamplingOptions(engine, replicas, temperature, scales_concurrency=concurrency is None)
        _rollout(loaded, order, agent, endpoint, sampling, out, per, as_json=as_json)
    except user_errors() as error:
        exit_usage(error_text(error))


def _longest_stepwise(config: Any) -> str | None:
    """Return a tag whose episodes have several contexts of one turn, if any."""
    from offbeat.deploy.play.conversations import stepwise_tags

    return next((tag for tag in sorted(stepwise_tags(config)) if config.custom_envs[tag].max_steps > 1), None)


def _rollout(
    config: Any,
    order: Any,
    agent: str | None,
    endpoint: tuple[str, str] | None,
    sampling: SamplingOptions,
    out: Path,
    per: Any,
    *,
    as_json: bool,
) -> None:
    from offbeat.deploy.play.engine import prepare_engine
    from offbeat.deploy.play.session import RANDOM, find_policy
    from offbeat.services.messages.types import EpisodeKind

    if sampling.temperature is not None:
        name = "val_env_manager" if order.kind is EpisodeKind.EVAL else "actor_infer"
        table = getattr(config, name)
        args = table.generating_args.model_copy(update={"temperature": sampling.temperature})
        config = config.model_copy(update={name: table.model_copy(update={"generating_args": args})})
    say = partial(typer.echo, err=as_json)  # a reader of the JSON gets nothing else
    source = endpoint[0] if endpoint else RANDOM if agent == RANDOM else str(find_policy(config, agent))
    say(f"collecting {order.episodes} episodes with {source}")
    served = None
    if sampling.engine != "transformers":
        served = prepare_engine(config, sampling.engine, Path(source), sampling.replicas)
        say(f"starting {_describe(served, config.actor_infer.num_replicas if sampling.replicas is None else None)}")
        if sampling.scales_concurrency:
            order = replace(order, concurrency=CONCURRENCY * served.num_replicas)
    rollouts = _collect(config, order, source, endpoint, served, needs_messages=out.suffix == ".jsonl", as_json=as_json)
    played = rollouts.result
    if played.trajectories:
        _write(config, rollouts, out, per, say)
    sampler = None if endpoint or agent == RANDOM else served.strategy_args.strategy_name if served else sampling.engine
    _print_summary(played, order, source, sampler, served.num_replicas if served else None, as_json=as_json)
    if not played.trajectories:
        typer.echo(f"no episode was played: {out} was not written", err=True)
        raise typer.Exit(1)
    say(f"wrote {out}" + (f": offbeat inspect {out}" if out.suffix == ".parquet" else ""))


def _describe(served: Any, wanted: int | None) -> str:
    """wanted: engines of the run, if it decides their number."""
    name, number = f"{served.strategy_args.strategy_name} ({served.device})", served.num_replicas
    if wanted is not None and number < wanted:
        reason = "as this machine has no GPUs for more" if served.device == "cuda" else "--replicas starts more"
        return f"{name}, {number} of the run's {wanted} engines: {reason}"
    return name if number == 1 else f"{name}, {number} engines"


def _collect(
    config: Any,
    order: Any,
    agent: str,
    endpoint: tuple[str, str] | None,
    engine: Any,
    *,
    needs_messages: bool,
    as_json: bool,
) -> Any:
    from rich.console import Console
    from rich.progress import Progress

    from offbeat.deploy.play.session import collect

    bar = Progress(console=Console(stderr=as_json), transient=True)
    line = bar.add_task("episodes", total=order.episodes)

    def show(done: int, _: int) -> None:
        bar.start()  # not before: an engine takes the standard streams while it starts
        bar.update(line, completed=done)

    try:
        with interruptible():
            return asyncio.run(
                collect(config, order, agent, show, needs_messages=needs_messages, endpoint=endpoint, engine=engine)
            )
    finally:
        bar.stop()


def _write(config: Any, rollouts: Any, out: Path, per: Any, say: Callable[[str], None]) -> None:
    from offbeat.deploy.play.conversations import stepwise_tags, write_conversations
    from offbeat.deploy.play.parquet import decode_episode, write_parquet

    played = rollouts.result
    if out.suffix == ".jsonl":
        with writing("--out", out):
            num_rows = write_conversations(out, played.trajectories, per, stepwise_tags(config))
        say(f"{num_rows} rows")
        return
    episodes = [decode_episode(trajectory, rollouts.chat) for trajectory in played.trajectories]
    with writing("--out", out):
        write_parquet(out, episodes)
    stepwise = stepwise_tags(config)
    for tag in sorted({t.tag for t in played.trajectories if t.seats or (t.tag in stepwise and len(t.turns) > 1)}):
        say(f"`messages` of {tag} are turns of several contexts in a row: for training data write a .jsonl")
    played_tags = {t.tag for t in played.trajectories}
    for tag in [tag for tag, env in config.custom_envs.items() if env.agent_runner and tag in played_tags]:
        say(f"`messages` of {tag} are the env's and its agent's: only the tokens are the policy's")
    for tag in rollouts.calling_tags:
        say(f"`messages` of {tag} are without its functions: only the tokens are what the policy reads and writes")


def _print_summary(
    played: Any, order: Any, source: str, engine: str | None, replicas: int | None, *, as_json: bool
) -> None:
    """engine: what sampled the policy; None: text of no policy, without its tokens. replicas: engines, if it is one."""
    from offbeat.deploy.play.summary import describe, summarize, to_json

    for reason, count in played.failures.items():
        what = "1 episode" if count == 1 else f"{count} episodes"
        typer.secho(f"{what} could not be played: {played.last_errors[reason]}", fg=typer.colors.RED, err=as_json)
    summaries = summarize(played.trajectories, order.group_size, has_tokens=engine is not None)
    if as_json:
        tree = {"policy": source, "engine": engine, "replicas": replicas, "failed": dict(played.failures)}
        typer.echo(json.dumps({**tree, "duration_s": round(played.duration_s, 3), **to_json(summaries)}, indent=2))
    elif played.trajectories:
        for line in describe(summaries):
            typer.echo(line)
        num_tokens = sum(t.num_sampled for t in played.trajectories)
        rate = f", {num_tokens / played.duration_s:.4g} tokens/s" if engine else ""
        typer.echo(f"{played.duration_s:.1f} s{rate}")
