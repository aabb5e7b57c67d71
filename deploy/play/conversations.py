"""Episodes in TRL's conversational formats (https://huggingface.co/docs/trl/dataset_formats).

`messages` for a whole episode, `prompt` and `completion` for one answer.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from offbeat.services.messages.types import Trajectory

Messages = list[dict[str, str]]
Per = Literal["episode", "answer"]


def to_messages(texts: Sequence[str]) -> Messages:
    system, *turns = texts or [""]
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def write_conversations(path: Path, trajectories: Sequence[Trajectory], per: Per) -> None:
    """Write JSON lines atomically, without images."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            for row in _rows(trajectory, per):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    temporary.replace(path)


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
