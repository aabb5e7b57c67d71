"""Episodes in TRL's conversational formats (https://huggingface.co/docs/trl/dataset_formats).

`messages` for a whole episode, `prompt` and `completion` for one answer, `chosen` and `rejected` for a group's best and
worst.

Invariant: the messages of a row are one context of the policy: a seat's, or step-wise a turn's. Those of envs with
functions, and of agents, are none.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from offbeat.deploy.config.run import RunConfig
from offbeat.services.messages.types import Trajectory

Messages = list[dict[str, str]]
Per = Literal["episode", "answer", "pair"]


def to_messages(texts: Sequence[str]) -> Messages:
    system, *turns = texts or [""]
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def stepwise_tags(config: RunConfig) -> frozenset[str]:
    """Return the tags whose turns have a context each."""
    return frozenset(tag for tag, env in config.custom_envs.items() if env.env_manager_cls != "TrajEnvManager")


class Context(NamedTuple):
    messages: Messages
    seat: str
    """"" without seats."""
    first_turn: int
    """Of its seat."""
    reward: float
    success: float | None
    """Of the episode, or of the seat."""
    num_given: int = 0
    """Messages of a row, before the policy's first turn."""


def split_contexts(trajectory: Trajectory, *, is_stepwise: bool = False) -> list[Context]:
    """Return an episode's conversations, each as the policy saw it."""
    if not trajectory.seats and not is_stepwise:
        success = trajectory.metrics.get("success")
        messages = to_messages(trajectory.text)
        num_given = max(0, len(messages) - 2 * len(trajectory.turns))
        return [Context(messages, "", 0, trajectory.reward, success, num_given)]
    system, *texts = trajectory.text or ("",)
    turns = list(zip(texts[::2], texts[1::2], strict=False))
    by_seat: dict[str, list[tuple[str, str]]] = {}
    for seat, turn in zip(trajectory.seats or ("",) * len(turns), turns, strict=True):
        by_seat.setdefault(seat, []).append(turn)
    contexts: list[Context] = []
    for seat, own in by_seat.items():
        prefix = f"{seat}/" if seat else ""
        success = trajectory.metrics.get(f"{prefix}success")
        reward = trajectory.metrics[f"{seat}/reward"] if seat else trajectory.reward
        for first, part in [(i, [turn]) for i, turn in enumerate(own)] if is_stepwise else [(0, own)]:
            messages = to_messages([system, *(text for turn in part for text in turn)])
            contexts.append(Context(messages, seat, first, reward, success))
    return contexts


def write_conversations(
    path: Path, trajectories: Sequence[Trajectory], per: Per, stepwise: Collection[str] = ()
) -> int:
    """Write JSON lines atomically, without images; return their number. stepwise: tags."""
    temporary, count = path.with_name(f".{path.name}.part"), 0
    rows = (
        make_pairs(trajectories)
        if per == "pair"
        else (row for each in trajectories for row in _rows(each, per, is_stepwise=each.tag in stepwise))
    )
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    temporary.replace(path)
    return count


def make_pairs(trajectories: Sequence[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield each group's best and worst episode, the first of equal ones, unless all rewards are equal; of a seat, those
    with the same first message.

    trajectories: ordered by group.
    """
    for _, members in groupby(trajectories, key=lambda trajectory: trajectory.group_id):
        alike: dict[tuple[str, str], list[tuple[Trajectory, Context]]] = {}
        for trajectory in members:
            for context in split_contexts(trajectory):
                opening = next((each["content"] for each in context.messages if each["role"] == "user"), "")
                alike.setdefault((context.seat, opening if context.seat else ""), []).append((trajectory, context))
        for (seat, _), group in alike.items():
            (first, best), (_, worst) = (choose(group, key=lambda each: each[1].reward) for choose in (max, min))
            if best.reward > worst.reward:
                yield {
                    "chosen": best.messages,
                    "rejected": worst.messages,
                    "chosen_reward": best.reward,
                    "rejected_reward": worst.reward,
                    "tag": first.tag,
                    "seed": first.seed,
                    "group": int(first.group_id),
                    **({"seat": seat} if seat else {}),
                }


def _rows(trajectory: Trajectory, per: Per, *, is_stepwise: bool) -> Iterator[dict[str, Any]]:
    for context in split_contexts(trajectory, is_stepwise=is_stepwise):
        messages = context.messages
        facts = {
            "reward": context.reward,
            "success": None if context.success is None else context.success > 0,
            "tag": trajectory.tag,
            "seed": trajectory.seed,
            "group": int(trajectory.group_id),
            "member": trajectory.index,
            "stop_reason": trajectory.stop_reason.value,
            **({"seat": context.seat} if context.seat else {}),
        }
        if per == "episode":
            yield {"messages": messages, **({"turn": context.first_turn} if is_stepwise else {}), **facts}
            continue
        answers = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i >= context.num_given]
        for turn, i in enumerate(answers, start=context.first_turn):
            yield {"prompt": messages[:i], "completion": [messages[i]], "turn": turn, **facts}
