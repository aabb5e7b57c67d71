"""`why` names engines whose KV cache is too small."""

import json

import pytest

from offbeat.services.control.explain import chain
from offbeat.services.control.run import RunState
from offbeat.services.weights.replica_reports import ReplicaLoad, ReplicaReport
from tests.copying import replace
from tests.services.control.test_explain import NOW, snapshot

LOAD = ReplicaLoad(running=9, kv_usage=0.97, kv_tokens=8352, preemptions=40, recent_preemptions=12)


def texts(
    load: ReplicaLoad, *, at: float = NOW - 0.3, state: RunState = RunState.RUNNING, **config: object
) -> list[str]:
    seen = snapshot(state, replicas={"r0": ReplicaReport(12, at, load)})
    seen = replace(seen, record=replace(seen.record, config=json.dumps(config)))
    return [link.text for link in chain(seen) if link.state == "preempts"]


def test_preemptions_are_shown_with_the_key_that_helps() -> None:
    assert texts(LOAD) == [
        "replica r0 preempted 12 requests in 30 s, as its KV cache of 8,352 tokens is too small for so many turns at a "
        "time: set rollout.kv_usage_target to 0.7, or raise kv_cache_gib, or lower train_env_manager.num_env_groups"
    ]


def test_a_target_that_is_set_is_to_be_lowered() -> None:
    (text,) = texts(LOAD, rollout={"kv_usage_target": 0.8}, actor_infer={"device": "cuda"})
    assert text.endswith(
        "lower rollout.kv_usage_target, 0.8 now, or raise gpu_memory_utilization, or lower train_env_manager.num_env_groups"
    )


@pytest.mark.parametrize(
    "quiet",
    [
        {"load": replace(LOAD, recent_preemptions=4)},
        {"load": LOAD, "at": NOW - 60.0},
        {"load": LOAD, "state": RunState.FINISHED},
    ],
)
def test_few_old_or_past_preemptions_are_not_shown(quiet: dict) -> None:
    assert texts(**quiet) == []
