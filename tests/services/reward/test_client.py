import pytest

from offbeat.services.reward.client import app_name

pytestmark = pytest.mark.slow


def test_two_runs_never_share_an_application():
    assert app_name("math", "v2-format") != app_name("math-v2", "format")
