"""Episodes in TRL's conversational formats (https://huggingface.co/docs/trl/dataset_formats).

`messages` for a whole episode, `prompt` and `completion` for one answer, `chosen` and `rejected` for a group's best and
worst.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from offbeat.services.messages.types import Trajectory

Messages = list[dict[str, str]]
Per = Literal["episode", "answer", "pair"]


def to_messages(texts: Sequence[str]) -> Messages:
    system, *turns = texts or [""]
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def write_conversations(path: Path, trajectories: Sequence[Trajectory], per: Per) -> int:
    """Write JSON lines atomically, without images; return their number."""
    temporary, count = path.with_name(f".{path.name}.part"), 0
    rows = make_pairs(trajectories) if per == "pair" else (row for each in trajectories for row in _rows(each, per))
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    temporary.replace(path)
    return count


def make_pairs(trajectories: Sequence[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield each group's best and worst episode, the first of equal ones, unless all rewards are equal.

    trajectories: ordered by group.
    """
    for _, members in groupby(trajectories, key=lambda trajectory: trajectory.group_id):
        group = list(members)
        best, worst = max(group, key=lambda t: t.reward), min(group, key=lambda t: t.reward)
        if best.reward > worst.reward:
            yield {
                "chosen": to_messages(best.text),
                "rejected": to_messages(worst.text),
                "chosen_reward": best.reward,
                "rejected_reward": worst.reward,
                "tag": best.tag,
                "seed": best.seed,
                "group": int(best.group_id),
            }


def _rows(trajectory: Trajectory, per: Per) -> Iterator[dict[str, Any]]:
    messages, success = to_messages(trajectory.text), trajectory.metrics.get("success")
    facts = {
        "reward": trajectory.reward,
        "success": None if success is None else success > 0,
        "tag": trajectory.tag,
        "seed": trajectory.seed,
        "group": int(trajectory.group_id),
        "member": trajectory.index,
        "stop_reason": trajectory.stop_reason.value,
    }
    if per == "episode":
        yield {"messages": messages, **facts}
        return
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, i in enumerate(answers):
        yield {"prompt": messages[:i], "completion": [messages[i]], "turn": turn, **facts}
