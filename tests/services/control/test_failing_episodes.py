import pytest

from offbeat.deploy.report.history import RunHistory
from offbeat.services.control.failing_episodes import FailingEpisodes, find_failing
from offbeat.services.messages.types import EpisodeKind, StopReason, Trajectory
from offbeat.services.rollout.metrics import WorkerMetrics


def totals(num_finished: int, failed: dict[str, int]) -> dict[str, float]:
    """Return a report's sums of what a worker counts."""
    worker, history = WorkerMetrics("w"), RunHistory()
    for kind in EpisodeKind:
        for _ in range(num_finished):
            worker.finished(kind, Trajectory("g", 0, 0, "Lake", 1, (), (), StopReason.TERMINATED, {}))
        for reason, count in failed.items():
            for _ in range(count):
                worker.failed(kind, "Lake", reason)
    history.add(
        ("1-0", record) for record in worker.records(playing=0, hung_threads=0, calls=0, cpu_s=0.0, failed_attempts={})
    )
    return history.totals


def test_a_report_names_the_reasons_of_failing_episodes():
    finding = find_failing(totals(6, {"step_error": 3, "env_crashed": 1}))
    assert finding is not None
    assert (finding.name, finding.seen) == (
        "failing_episodes",
        "8 of 20 episodes failed (step_error 6, env_crashed 2)",
    )


@pytest.mark.parametrize("failed", [{"step_error": 1}, {"generation_timeout": 9}, {}])
def test_few_failures_and_those_of_generation_are_no_finding(failed: dict[str, int]):
    assert find_failing(totals(6, failed)) is None


def test_rows_that_can_not_be_read_are_the_datasets_problem():
    finding = find_failing(totals(6, {"bad_row": 4}))
    assert finding is not None
    assert finding.keys == ("data.dataset_name",)
    counts = {"finished": 0, "failed": 16, "recent": 16, "recent_failed": 16, "limit": 16}
    last = {"key": "data.dataset_name", "error": "bad_row: a.jsonl:3: no assistant turn", "trace": ""}
    failing = FailingEpisodes.of([{"at": 1.0, "episodes": {**counts, **last}}], since=0.0)
    assert failing.describe_all().endswith("a.jsonl:3: no assistant turn\nFix data.dataset_name.")
    assert failing.finding is not None
    assert failing.finding.keys == ("data.dataset_name",)


def test_a_worker_that_is_gone_fails_no_recent_episodes():
    counts = {"finished": 64, "failed": 0, "recent": 64, "recent_failed": 0, "limit": 16}
    gone = {**counts, "finished": 0, "failed": 64, "recent_failed": 64, "error": "make_error", "key": "custom_envs.A"}
    reports = [{"at": 100.0, "episodes": gone}, {"at": 100.5, "episodes": counts}]
    assert FailingEpisodes.of(reports, since=0.0).many_fail
    failing = FailingEpisodes.of([reports[0], {"at": 200.0, "episodes": counts}], since=0.0)
    assert (failing.many_fail, failing.failed, failing.error) == (False, 64, "make_error")
    behind = {"at": 40.0, "received": 100.0, "episodes": gone}
    ahead = {"at": 100.5, "received": 100.5, "episodes": counts}
    assert FailingEpisodes.of([behind, ahead], since=0.0).many_fail, "its node's clock is behind"


def test_rewards_that_fail_are_named():
    finding = find_failing(totals(6, {"reward_timeout": 3, "reward_error": 1}))
    assert finding is not None
    assert finding.keys == ("rewards",)
    sampler = find_failing(totals(6, {"bad_task": 4}))
    assert sampler is not None
    assert sampler.keys == ("train_env_manager.task_sampler",)
    mixed = find_failing(totals(6, {"reward_timeout": 3, "step_error": 1}))
    assert mixed is not None
    assert mixed.keys == ("custom_envs.TAG",)
