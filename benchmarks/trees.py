"""`offbeat bench trees`: time of forward and backward passes over prefix trees, against separate sequences.

Invariant: both sides have one model, batch and token budget, and take turns in one process.
"""

import asyncio
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.services.generation.config import Dtype
from offbeat.services.messages.types import Group, Segment, StopReason, Trajectory, Turn, VersionSpan


@dataclass(frozen=True, slots=True)
class TreeOptions:
    size: str = "1M"
    groups: int = 4
    group_size: int = 8
    budget: int = 4096
    rounds: int = 3
    threads: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Dtype = "float32"
    """Of the passes that are timed."""


class RecordedWorkload(NamedTuple):
    """config: packaged; overrides: of it."""

    config: str
    overrides: tuple[str, ...] = ()


STEPWISE = (
    "custom_envs.SimpleSokoban.env_manager_cls=StepEnvManager",
    "+custom_envs.SimpleSokoban.history_length=2",
    "+custom_envs.SimpleSokoban.agent_template='{history} {observation}'",
)
WORKLOADS = {
    "FrozenLake": RecordedWorkload("quickstart"),
    "Sokoban, step-wise": RecordedWorkload("sokoban", STEPWISE),
    "WebShop, with history": RecordedWorkload("webshop"),
}


def run(options: TreeOptions) -> dict[str, Any]:
    """Measure each workload."""
    import torch

    from offbeat.benchmarks.weights import SHAPES
    from offbeat.trainer.config.actor_train import ModelArgs
    from offbeat.trainer.models.loading import load_policy
    from offbeat.trainer.models.tiny import write_tiny_policy

    torch.set_num_threads(options.threads)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as temporary:
        for name, (words, groups) in _workloads(options, Path(temporary)).items():
            longest = max(len(segment.tokens) for g in groups for t in g.trajectories for segment in t.segments)
            folder = Path(temporary) / "model"
            shape = SHAPES[options.size].model_copy(update={"max_position_embeddings": max(512, longest)})
            write_tiny_policy(folder, shape, words)
            policy = load_policy(folder, ModelArgs(shared_prefix=True), seed=1).to(options.device)
            rows[name] = _measure(policy, groups, options)
    _show(rows)
    return {"workloads": rows}


def _workloads(options: TreeOptions, folder: Path) -> dict[str, tuple[Sequence[str], list[Group]]]:
    played = {name: _play(workload, options, folder / "chat") for name, workload in WORKLOADS.items()}
    return {**played, "agent with sub-agents": ([f"w{i}" for i in range(1000)], _agent_groups(options))}


def _play(workload: RecordedWorkload, options: TreeOptions, folder: Path) -> tuple[Sequence[str], list[Group]]:
    from offbeat.deploy.config.vocabulary import collect_words
    from offbeat.deploy.play.agents import load_chat
    from offbeat.deploy.play.rollouts import EpisodeRequest, run_episodes
    from offbeat.deploy.play.target import load_config
    from offbeat.services.messages.types import EpisodeKind
    from offbeat.trainer.models.tiny import write_tiny_policy

    config = load_config(Path(workload.config), list(workload.overrides))
    words = collect_words(config)
    write_tiny_policy(folder, config.tiny, words)
    request = EpisodeRequest(options.groups * options.group_size, options.group_size, EpisodeKind.TRAIN, 1, 32)
    result = asyncio.run(run_episodes(config, request, load_chat(folder), None, lambda *_: None))
    played = [result.trajectories[i :: options.group_size] for i in range(options.group_size)]
    return words, [_group(number, members) for number, members in enumerate(zip(*played, strict=True))]


def _group(number: int, members: Sequence[Trajectory]) -> Group:
    return Group(f"{number}-0", f"g{number}", number, members[0].tag, 0, 0, tuple(members))


def _agent_groups(options: TreeOptions) -> list[Group]:
    """Episodes of an agent whose prompt of 120 tokens is common to all, and its task's 40 to a group.

    In four turns it answers with 10 tokens and reads 30; in every second one it hands its history and 20 tokens to two
    sub-agents, each of which answers three times with 10 tokens and reads 20.
    """
    draw = np.random.default_rng(1)

    def tokens(count: int, sampled: bool) -> list[tuple[int, bool]]:
        return [(int(token), sampled) for token in draw.integers(8, 1000, count)]

    def answers(history: list[tuple[int, bool]], times: int, read: int) -> list[tuple[int, bool]]:
        for _ in range(times):
            history = [*history, *tokens(10, True), *tokens(read, False)]
        return history

    def episode(history: list[tuple[int, bool]]) -> list[list[tuple[int, bool]]]:
        contexts: list[list[tuple[int, bool]]] = []
        for turn in range(4):
            history = answers(history, 1, 30)
            if turn % 2:
                seen = [(token, False) for token, _ in history]
                contexts += [answers([*seen, *tokens(20, False)], 3, 20) for _ in range(2)]
        return [history, *contexts]

    system = tokens(120, False)
    groups: list[Group] = []
    for number in range(options.groups):
        task = [*system, *tokens(40, False)]
        members = [_trajectory(i, episode(task)) for i in range(options.group_size)]
        groups.append(_group(number, members))
    return groups


def _trajectory(index: int, contexts: Sequence[list[tuple[int, bool]]]) -> Trajectory:
    segments: list[Segment] = []
    turns: list[Turn] = []
    for number, context in enumerate(contexts):
        mask = np.array([sampled for _, sampled in context])
        borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
        spans = list(zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True))
        turns += [Turn(number, start, end, float(index % 2)) for start, end in spans]
        segments.append(
            Segment(
                np.array([token for token, _ in context], dtype=np.int32),
                mask,
                np.where(mask, -2.0, 0.0).astype(np.float32),
                tuple(VersionSpan(start, end, 0) for start, end in spans),
            )
        )
    return Trajectory("g", index, 0, "agent", 0, tuple(segments), tuple(turns), StopReason.TERMINATED)


def _measure(policy: Any, groups: list[Group], options: TreeOptions) -> dict[str, Any]:
    import torch

    from offbeat.trainer.data.batch import microbatches, pack
    from offbeat.trainer.data.prefix_trees import shared_microbatches

    batch = pack(groups)
    cuts: Mapping[str, Callable[..., Any]] = {"separate": microbatches, "trees": shared_microbatches}
    timed = copy.deepcopy(policy).to(getattr(torch, options.dtype))
    seconds: dict[str, list[float]] = {side: [] for side in cuts}
    parts: dict[str, Any] = {}
    for number in range(-1, options.rounds):
        for side, cut in cuts.items():
            timed.zero_grad()
            begun = time.perf_counter()
            parts[side] = cut(batch, range(batch.num_sequences), options.budget)
            for micro in parts[side]:
                _backward(timed, micro)
            if options.device == "cuda":
                torch.cuda.synchronize()
            if number >= 0:  # the first one allocates
                seconds[side].append(time.perf_counter() - begun)
    num_tokens = {side: sum(len(micro.tokens) for micro in micros) for side, micros in parts.items()}
    distinct = _num_distinct(batch)
    bound = num_tokens["separate"] / distinct
    faster = statistics.median(seconds["separate"]) / statistics.median(seconds["trees"])
    exact = {side: _gradient(policy, micros) for side, micros in parts.items()}
    return {
        "sequences": batch.num_sequences,
        "tokens": num_tokens,
        "distinct_tokens": distinct,
        "bound": bound,
        "seconds": {side: Spread.of(values) for side, values in seconds.items()},
        "faster": faster,
        "of_bound": faster / bound,
        "gradient_difference": float((exact["trees"] - exact["separate"]).norm() / exact["separate"].norm()),
        "bfloat16": _bfloat16_errors(policy, parts),
    }


def _backward(policy: Any, micro: Any) -> None:
    from offbeat.trainer.training.group_scorer import to_input

    device = next(policy.parameters()).device
    policy(to_input(micro).to(device)).logprobs.sum().backward()


def _bfloat16_errors(policy: Any, parts: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Return each side's distance from the gradient of separate sequences in float32, under equal weights, and that of the
    sides from each other, all relative to that gradient's norm; micro-batches are summed in float64.
    """
    import torch

    rounded = copy.deepcopy(policy).to(torch.bfloat16)
    exact = _gradient(copy.deepcopy(rounded).float(), parts["separate"])
    gradients = {side: _gradient(rounded, micros) for side, micros in parts.items()}
    errors = {side: float((gradient - exact).norm() / exact.norm()) for side, gradient in gradients.items()}
    return {**errors, "between": float((gradients["trees"] - gradients["separate"]).norm() / exact.norm())}


def _gradient(policy: Any, micros: Sequence[Any]) -> Any:
    """Return the gradient of the sum of logprobs, [number of weights] float64."""
    import torch

    total: Any = 0.0
    for micro in micros:
        policy.zero_grad()
        _backward(policy, micro)
        total = total + torch.cat([p.grad.double().flatten() for p in policy.parameters() if p.grad is not None])
    return total


def _num_distinct(batch: Any) -> int:
    from offbeat.trainer.data.prefix_trees import common_len

    rows = sorted(batch.tokens[a:b].tolist() for a, b in pairwise(batch.cu_seqlens.tolist()))
    return batch.num_tokens - sum(common_len(np.array(a), np.array(b)) for a, b in pairwise(rows))


def _show(rows: Mapping[str, Any]) -> None:
    columns = ("workload", "sequences", "tokens", "computed", "distinct", "bound", "s separate", "s trees", "x faster",
               "of the bound")  # fmt: skip
    table = [
        (name, row["sequences"], row["tokens"]["separate"], row["tokens"]["trees"], row["distinct_tokens"],
         row["bound"], row["seconds"]["separate"].median, row["seconds"]["trees"].median, row["faster"], row["of_bound"])
        for name, row in rows.items()
    ]  # fmt: skip
    show("Forward and backward passes of a batch", columns, table)
    worst = max(row["gradient_difference"] for row in rows.values())
    console().print(f"gradients of both sides in float32 differ by at most {worst:.1e} of their norm")
    errors = [
        (name, *(row["bfloat16"][side] for side in ("separate", "trees", "between"))) for name, row in rows.items()
    ]
    show("Gradients in bfloat16: distance / norm", ("workload", "separate from float32", "trees from float32",
         "trees from separate"), errors)  # fmt: skip
