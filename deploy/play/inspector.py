"""Recorded episodes as coloured tokens or a conversation."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import typer
from msgspec import structs

from offbeat.deploy.play.parquet import RecordedTokens, decode_episode, read_parquet
from offbeat.deploy.play.policy import CHECKPOINTS
from offbeat.deploy.printable import show_controls
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.errors import CodecError
from offbeat.services.messages.codec import decode_trajectories
from offbeat.trainer.learner.evaluations import TOKENS

T = TypeVar("T")
Colour = Literal["logprob", "version", "mask"]
EVALUATIONS = "evaluations"

LOW, HIGH = -4.0, 0.0
VERSION_COLOURS = ((90, 170, 250), (250, 180, 60), (150, 220, 120), (230, 120, 200), (120, 220, 220), (240, 120, 100))
GREY = (130, 130, 130)


def render_episodes(path: Path, *, colour: Colour, episode: int | None, limit: int) -> Iterator[str]:
    """Yield the lines of episodes in a parquet file or run; raises ValueError without any."""
    if path.is_dir():
        episodes, source = _load_newest_evaluation(path)
        if not episodes:
            yield from _render_texts(path, episode, limit)
            return
        yield f"{source.relative_to(path)} (others: {', '.join(_list_others(path, source)) or 'none'})"
    elif path.is_file():
        episodes = read_parquet(path)
    else:
        raise ValueError(f"no such file or folder: {path}")
    yield f"{len(episodes)} episodes; colour: {_render_legend(colour, episodes)}"
    for number, recorded in _select_episodes(episodes, episode, limit, path):
        yield _render_heading(
            number, recorded.tag, recorded.seed, recorded.reward, recorded.success, recorded.stop_reason
        )
        rendered = _render_images(recorded)
        yield "".join(rendered.get(i, _render_token(recorded, i, colour)) for i in range(len(recorded.tokens)))
        rewards = ", ".join(f"{reward:g}" for reward in recorded.turn_rewards)
        yield typer.style(
            f"{len(recorded.tokens)} tokens, {sum(recorded.loss_mask)} sampled; rewards {rewards}", dim=True
        )


def _load_newest_evaluation(run: Path) -> tuple[list[RecordedTokens], Path]:
    """Load the last evaluation; empty without tokens or tokenizer."""
    files = _list_evaluations(run)
    folders = [*sorted((run / CHECKPOINTS).glob("step-*")), run / "policy"]
    tokenizers = [folder for folder in folders if (folder / "tokenizer_config.json").is_file()]
    if not files or not tokenizers:
        return [], run
    chat = load_chat_format(tokenizers[0])
    try:
        trajectories = decode_trajectories(files[-1].read_bytes())
    except CodecError as error:
        raise ValueError(f"{files[-1]}: {error}") from error
    return [decode_episode(structs.replace(t, group_id=str(n)), chat) for n, t in enumerate(trajectories)], files[-1]


def _list_evaluations(run: Path) -> list[Path]:
    return sorted((run / EVALUATIONS).glob(f"*{TOKENS}"), key=lambda path: path.stat().st_mtime)


def _list_others(run: Path, source: Path) -> list[str]:
    return [path.stem for path in _list_evaluations(run) if path != source]


def _render_texts(run: Path, episode: int | None, limit: int) -> Iterator[str]:
    files = sorted((run / EVALUATIONS).glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(
            f"{run} holds no evaluations: not a run, or not evaluated yet; run `offbeat rollout` to record tokens"
        )
    rows: list[dict[str, Any]] = [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines()]
    yield f"{len(rows)} episodes of {files[-1].relative_to(run)} (others: {', '.join(path.stem for path in files[:-1])})"
    for number, row in _select_episodes(rows, episode, limit, files[-1]):
        success = row["metrics"].get("success")
        yield _render_heading(
            number, row["tag"], row["seed"], row["reward"], None if success is None else success > 0, ""
        )
        for i, text in enumerate(map(show_controls, row["text"])):
            yield typer.style(text, fg=typer.colors.CYAN, bold=True) if i and i % 2 == 0 else text


def _select_episodes(rows: Sequence[T], episode: int | None, limit: int, path: Path) -> Iterator[tuple[int, T]]:
    if episode is None:
        yield from list(enumerate(rows))[:limit]
        return
    if not 0 <= episode < len(rows):
        raise ValueError(f"{path} holds episodes 0 to {len(rows) - 1}, not {episode}")
    yield episode, rows[episode]


def _render_heading(number: int, tag: str, seed: int, reward: float, success: bool | None, stop: str) -> str:
    outcome = {True: "success", False: "no success", None: ""}[success]
    summary = ", ".join(text for text in (f"reward {reward:g}", outcome, stop) if text)
    return typer.style(f"\n== episode {number}: {tag}, seed {seed}: {summary} ==", bold=True)


def _render_images(recorded: RecordedTokens) -> dict[int, str]:
    shown: dict[int, str] = {}
    for start, count, png in zip(recorded.image_starts, recorded.image_tokens, recorded.images, strict=True):
        mark = f"[image: {count} tokens, {len(png)} bytes of PNG] "
        shown |= dict.fromkeys(range(start, start + count), "")
        shown[start] = typer.style(mark, fg=typer.colors.CYAN)
    return shown


def _render_token(recorded: RecordedTokens, i: int, colour: Colour) -> str:
    text = show_controls(recorded.token_texts[i])
    if _is_word_level(recorded):
        text = f"{text} "
    if not recorded.loss_mask[i]:
        return typer.style(text, fg=GREY)
    match colour:
        case "mask":
            return typer.style(text, fg=typer.colors.GREEN, bold=True)
        case "version":
            return typer.style(text, fg=VERSION_COLOURS[recorded.versions[i] % len(VERSION_COLOURS)], bold=True)
        case "logprob":
            share = (min(max(recorded.logprobs[i], LOW), HIGH) - LOW) / (HIGH - LOW)
            return typer.style(text, fg=(int(235 * (1 - share)) + 20, int(200 * share) + 20, 60), bold=True)


def _is_word_level(recorded: RecordedTokens) -> bool:
    return not any(" " in text for text in recorded.token_texts)


def _render_legend(colour: Colour, episodes: list[RecordedTokens]) -> str:
    match colour:
        case "mask":
            return "green was sampled, grey was not"
        case "logprob":
            return f"red (logprob {LOW:g} and below) to green (0); grey was not sampled"
        case "version":
            versions = sorted({version for episode in episodes for version in episode.versions if version >= 0})
            shown = (typer.style(str(v), fg=VERSION_COLOURS[v % len(VERSION_COLOURS)]) for v in versions[:20])
            return f"versions {' '.join(shown)}; grey was not sampled"
