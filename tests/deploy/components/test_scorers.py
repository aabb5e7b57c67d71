import pytest

from offbeat.deploy.components.scorers import scorer_name

pytestmark = pytest.mark.slow


def test_two_runs_never_share_a_scorer():
    assert scorer_name("math", "teacher.v2-reference", 0) != scorer_name("math-teacher.v2", "reference", 0)
