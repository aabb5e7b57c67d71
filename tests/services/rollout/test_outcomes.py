import json

import pytest

from offbeat.services.control.failing_episodes import FailingEpisodes
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.outcomes import WINDOW, EpisodeOutcomes


def fail(outcomes: EpisodeOutcomes) -> None:
    try:
        try:
            raise ZeroDivisionError("no slope")
        except ZeroDivisionError as error:
            raise EpisodeError("step_error", "ZeroDivisionError: no slope") from error
    except EpisodeError as error:
        outcomes.failed("custom_envs.Hills", error)


def test_last_failure_is_reported_with_what_the_env_raised():
    outcomes = EpisodeOutcomes(group_size=2)
    fail(outcomes)
    report = outcomes.report()
    assert (report["finished"], report["failed"], report["limit"], report["key"]) == (0, 1, 16, "custom_envs.Hills")
    assert report["error"] == "step_error: ZeroDivisionError: no slope"
    assert report["trace"].endswith("ZeroDivisionError: no slope\n")
    assert "EpisodeError" not in report["trace"]


def test_traceback_of_another_process_is_kept():
    outcomes = EpisodeOutcomes(group_size=2)
    outcomes.failed("custom_envs.Hills", EpisodeError("step_error", "no slope", "Traceback of the child"))
    assert outcomes.report()["trace"] == "Traceback of the child"


TEXT = "unknown word \ud83d"


@pytest.mark.parametrize("error", [ValueError(TEXT), EpisodeError("step_error", TEXT, TEXT)])
def test_half_a_surrogate_pair_in_a_message_is_escaped(error: Exception):
    """Redis and the REST API encode it as UTF-8."""
    outcomes = EpisodeOutcomes(group_size=2)
    outcomes.failed("custom_envs.Words", error)
    report = json.loads(json.dumps({"at": 1.0, "episodes": outcomes.report()}))
    text = FailingEpisodes.of([report], since=0.0).describe_all().encode().decode()
    assert text.count("unknown word \\ud83d") == 2


def test_failures_of_generation_are_not_counted():
    outcomes = EpisodeOutcomes(group_size=2)
    outcomes.failed("custom_envs.Hills", EpisodeError("generation_timeout"))
    assert outcomes.report() == {"finished": 0, "failed": 0, "recent": 0, "recent_failed": 0, "limit": 16}


def test_recent_episodes_are_a_window():
    outcomes = EpisodeOutcomes(group_size=16)
    for _ in range(WINDOW):
        fail(outcomes)
    for _ in range(WINDOW - 3):
        outcomes.finished()
    report = outcomes.report()
    assert (report["recent"], report["recent_failed"], report["failed"], report["limit"]) == (WINDOW, 3, WINDOW, 32)
