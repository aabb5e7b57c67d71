"""Trajectories as a parquet file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.deploy.play.conversations import Messages, to_messages
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import Trajectory


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """Episode; lists are per token unless noted."""

    tag: str
    seed: int
    group: int
    member: int
    reward: float
    success: bool | None
    stop_reason: str
    metrics: dict[str, float]
    tokens: list[int]
    token_texts: list[str]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    """-1: not sampled."""
    turn_ends: list[int]
    """Last position of each completion."""
    turn_rewards: list[float]
    messages: Messages
    """As in TRL's conversational format; step-wise, or of several seats, all turns in a row, and with an agent the env's
    observations and the agent's actions, which is no context."""
    images: list[bytes]
    image_starts: list[int]
    """First position of each image."""
    image_tokens: list[int]


def decode_episode(trajectory: Trajectory, chat: ChatFormat) -> RecordedTokens:
    segments = trajectory.segments
    starts = [sum(len(segment.tokens) for segment in segments[:i]) for i in range(len(segments))]
    tokens = [int(token) for segment in segments for token in segment.tokens]
    shown = [(start, p) for start, segment in zip(starts, segments, strict=True) for p in segment.images]
    success = trajectory.metrics.get("success")
    return RecordedTokens(
        tag=trajectory.tag,
        seed=trajectory.seed,
        group=int(trajectory.group_id),
        member=trajectory.index,
        reward=trajectory.reward,
        success=None if success is None else success > 0,
        stop_reason=trajectory.stop_reason.value,
        metrics=trajectory.metrics,
        tokens=tokens,
        token_texts=[chat.token_text(token) for token in tokens],
        loss_mask=[bool(value) for segment in segments for value in segment.loss_mask],
        logprobs=[float(value) for segment in segments for value in segment.logprobs],
        versions=[int(value) for segment in segments for value in segment.token_versions()],
        turn_ends=[starts[turn.segment] + turn.end for turn in trajectory.turns],
        turn_rewards=[turn.reward for turn in trajectory.turns],
        messages=to_messages(trajectory.text),
        images=[image.png for _, image in shown],
        image_starts=[start + image.start for start, image in shown],
        image_tokens=[image.count for _, image in shown],
    )


def write_parquet(path: Path, episodes: Sequence[RecordedTokens]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{name: _to_column(name, getattr(episode, name)) for name in SCHEMA} for episode in episodes]
    kinds = {"int": pa.int64(), "float": pa.float64(), "text": pa.string(), "bool": pa.bool_()}
    small = {
        "ints": pa.int32(),
        "floats": pa.float32(),
        "texts": pa.string(),
        "bools": pa.bool_(),
        "files": pa.binary(),
        "messages": pa.struct([("role", pa.string()), ("content", pa.string())]),
    }
    schema = pa.schema([(name, kinds.get(kind) or pa.list_(small[kind])) for name, kind in SCHEMA.items()])
    temporary = path.with_name(f".{path.name}.part")
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), temporary, compression="zstd")
    temporary.replace(path)


def read_parquet(path: Path) -> list[RecordedTokens]:
    """Read a file of `write_parquet`; raises ValueError for another format."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error
    if missing := [name for name in SCHEMA if name not in table.column_names]:
        raise ValueError(f"{path} was not written by this build's `offbeat rollout`: it has no column {missing[0]!r}")
    rows: list[dict[str, Any]] = table.select(list(SCHEMA)).to_pylist()
    return [RecordedTokens(**{**row, **_decode(row)}) for row in rows]


def _decode(row: dict[str, Any]) -> dict[str, Any]:
    messages = row["messages"]
    if messages and isinstance(messages[0], str):  # files of builds before 0.2
        messages = to_messages(messages)
    return {"metrics": json.loads(row["metrics"]), "messages": messages}


SCHEMA = {
    "tag": "text",
    "seed": "int",
    "group": "int",
    "member": "int",
    "reward": "float",
    "success": "bool",
    "stop_reason": "text",
    "metrics": "text",
    "tokens": "ints",
    "token_texts": "texts",
    "loss_mask": "bools",
    "logprobs": "floats",
    "versions": "ints",
    "turn_ends": "ints",
    "turn_rewards": "floats",
    "messages": "messages",
    "images": "files",
    "image_starts": "ints",
    "image_tokens": "ints",
}


def _to_column(name: str, value: Any) -> Any:
    return json.dumps(value) if name == "metrics" else value
