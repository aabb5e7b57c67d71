"""Test harness for envs, agents and trackers; see `offbeat.deploy.api.testing`."""

from offbeat.deploy.api.testing import (
    EpisodeTrace,
    FakeModel,
    RecordingTracker,
    append_records,
    assert_env,
    deliver,
    eval_record,
    run_episode,
    step_record,
    tracked_run,
)

__all__ = [
    "EpisodeTrace",
    "FakeModel",
    "RecordingTracker",
    "append_records",
    "assert_env",
    "deliver",
    "eval_record",
    "run_episode",
    "step_record",
    "tracked_run",
]
