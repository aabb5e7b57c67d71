"""Links about engines whose KV cache is too small for the episodes in play."""

import json

from offbeat.services.control.causes import MAX_REPORT_AGE_S, Cause, RunSnapshot

FEWEST = 5
"""Preempted requests of a replica in 30 s."""
TARGET = "rollout.kv_usage_target"
SUGGESTED = 0.7


def explain_preemptions(snapshot: RunSnapshot) -> list[Cause]:
    """Report replicas that preempt requests, with the key that helps."""
    if snapshot.record.state.is_terminal:
        return []
    links: list[Cause] = []
    for name, replica in snapshot.replicas.items():
        load = replica.load
        if load.recent_preemptions < FEWEST or snapshot.now - replica.at >= MAX_REPORT_AGE_S:
            continue
        text = (
            f"replica {name} preempted {load.recent_preemptions} requests in 30 s, as its KV cache of {load.kv_tokens:,} "
            f"tokens is too small for so many turns at a time: {_advise(snapshot)}"
        )
        links.append(Cause("generation", "preempts", text, detail={"replica": name, "kv_usage": load.kv_usage}))
    return links


def _advise(snapshot: RunSnapshot) -> str:
    config = json.loads(snapshot.record.config)
    target = config.get("rollout", {}).get("kv_usage_target")
    memory = "kv_cache_gib" if config.get("actor_infer", {}).get("device", "cpu") == "cpu" else "gpu_memory_utilization"
    first = f"set {TARGET} to {SUGGESTED}" if target is None else f"lower {TARGET}, {target:g} now"
    return f"{first}, or raise {memory}, or lower train_env_manager.num_env_groups"
