"""Conversion of a call tree to trajectory segments.

Invariants: each delivered sampled token is trained in exactly one segment, and context in others; segments equal the
engine's input and output; undelivered completions are never trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from offbeat.services.chat.token_tree import TokenTree
from offbeat.services.messages.types import Segment, Turn, VersionSpan


class Reward(NamedTuple):
    """Reward after `after` completions."""

    after: int
    value: float


@dataclass(frozen=True, slots=True)
class Captured:
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    """Trained answers, in sampling order."""
    metrics: Mapping[str, float]
    """`agent_calls`, `branches` (segments), `masked_answers` and `masked_tokens` (undelivered), `unverified_messages`
    (assistant messages not known to be sampled).
    """


def capture(tree: TokenTree, rewards: Sequence[Reward] = ()) -> Captured:
    """Cut the tree into a segment per branch.

    A reward belongs to the last trained answer before it, else the first; without trained answers it is lost.
    """
    nodes = tree.nodes
    parents = {node.prompt.parent for node in nodes if node.delivered}
    leaves = [n for n, node in enumerate(nodes) if node.delivered and n not in parents]
    positions: dict[int, tuple[int, int, int]] = {}
    segments: list[Segment] = []
    for leaf in leaves:
        own = [n for n in tree.path(leaf) if n not in positions]
        for number in own:
            start = len(nodes[number].prompt.tokens)
            positions[number] = (len(segments), start, start + nodes[number].num_kept)
        segments.append(_segment(tree, leaf, own))
    trained = sorted(positions)
    values = _rewards_by_answer(trained, rewards)
    turns = tuple(
        Turn(*positions[n], values[n], _digest(nodes[n].prompt.anchor), nodes[n].is_truncated) for n in trained
    )
    masked = [node for node in nodes if not node.delivered]
    metrics = {
        "agent_calls": float(len(nodes)),
        "branches": float(len(segments)),
        "masked_answers": float(len(masked)),
        "masked_tokens": float(sum(len(node.completion.token_ids) for node in masked)),
        "unverified_messages": float(sum(node.prompt.unverified for node in nodes)),
    }
    return Captured(tuple(segments), turns, metrics)


def _segment(tree: TokenTree, leaf: int, own: Sequence[int]) -> Segment:
    """Train the answers `own`."""
    tokens = np.array(tree.nodes[leaf].tokens, dtype=np.int32)
    mask = np.zeros(len(tokens), dtype=np.bool_)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    spans: list[VersionSpan] = []
    for number in sorted(own):
        node = tree.nodes[number]
        start, end = len(node.prompt.tokens), len(node.tokens)
        mask[start:end] = True
        logprobs[start:end] = node.completion.logprobs[: node.num_kept]
        spans += [
            VersionSpan(start + span.start, start + min(span.end, node.num_kept), span.version)
            for span in node.completion.versions
            if span.start < node.num_kept
        ]
    parts = tree.routing_of(leaf)
    routing = np.concatenate(parts) if parts else None
    return Segment(tokens, mask, logprobs, tuple(spans), tree.nodes[leaf].prompt.images, routing)


def _rewards_by_answer(trained: Sequence[int], rewards: Sequence[Reward]) -> dict[int, float]:
    values = dict.fromkeys(trained, 0.0)
    for after, value in rewards:
        before = [n for n in trained if n < after]
        if trained:
            values[before[-1] if before else trained[0]] += value
    return values


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest() if text else ""
