from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.deploy.plan.closed_forms import mean_refills
from offbeat.deploy.plan.estimate import Estimate
from offbeat.deploy.plan.outcome import Setup
from offbeat.deploy.plan.workload import Measures
from offbeat.services.generation.kv_cache import bytes_per_sequence, bytes_per_token, text_config

BYTES_PER_TOKEN = 8.2
"""Of a trajectory: id and logprob, 4 bytes each, and a bit of mask."""
BYTES_PER_TRAJECTORY = 600


@dataclass(frozen=True, slots=True)
class Memory:
    redis_mib: float
    """Trajectories in the buffer: in play, waiting, and trained or refilled since the last checkpoint."""
    kv_tokens: float
    """Tokens in one engine; every episode in play keeps its prefix."""
    kv_gib: float | None
    """Of one engine; None for an unknown model."""


def memory_of(
    estimate: Estimate, setup: Setup, measures: Measures, save_steps: int, architecture: Mapping[str, Any] | None
) -> Memory:
    tokens = measures.tokens
    consumed = save_steps * (setup.limits.groups_per_step + mean_refills(setup, measures))
    groups = estimate.playing_groups + estimate.waiting_groups + consumed
    stored = groups * setup.limits.group_size * (BYTES_PER_TOKEN * tokens + BYTES_PER_TRAJECTORY)
    kv_tokens = (1 - estimate.slots_empty) * setup.slots / setup.num_replicas * tokens
    kv_gib = kv_gib_of(architecture, kv_tokens, kv_tokens / tokens) if architecture else None
    return Memory(stored / 2**20, kv_tokens, kv_gib)


def kv_gib_of(architecture: Mapping[str, Any], num_tokens: float, num_sequences: float) -> float | None:
    """Return the memory of keys, values and recurrent states, if the configuration is known."""
    text = text_config(architecture)
    itemsize = 4 if "32" in str(text.get("dtype") or text.get("torch_dtype") or "") else 2
    try:
        size = num_tokens * bytes_per_token(architecture, itemsize)
        return (size + num_sequences * bytes_per_sequence(architecture, itemsize)) / 2**30
    except (KeyError, TypeError):
        return None
