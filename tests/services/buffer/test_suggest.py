"""Settings that the learner's controller asks for: once a step, never for a step that is over."""

import pytest
from redis import Redis

from offbeat.services.errors import FencedError
from offbeat.services.live_settings import settings_at
from tests.copying import replace
from tests.services.buffer.buffer_play import Run, publish
from tests.services.buffer.test_adopt import BASE, ask


async def test_a_suggestion_holds_from_its_own_boundary_on(run: Run):
    assert len(await run.buffer.claim("w", 100)) == 8
    assert run.learner.suggest(0, {"max_staleness": 2.0, "num_env_groups": 5}, "idle")
    (change,) = run.learner.adopt(0).changes
    assert (change.values, change.step, change.why) == ({"max_staleness": 2, "num_env_groups": 5}, 0, "idle")
    assert settings_at(BASE, [change], 0) == replace(BASE, max_staleness=2.0, num_env_groups=5)
    assert len(await run.buffer.claim("w", 100)) == 2  # the bound allows two groups more, the places one


async def test_a_step_is_decided_once_and_never_after_its_weights_exist(run: Run, redis: Redis):
    assert run.learner.suggest(3, {"max_staleness": 2.0}, "")
    assert not run.learner.suggest(3, {"max_staleness": 3.0}, "")
    assert not run.next_learner().suggest(2, {"max_staleness": 3.0}, "")
    publish(redis, 6)
    assert not run.learner.suggest(5, {"max_staleness": 3.0}, "")
    assert run.learner.suggest(6, {"max_staleness": 3.0}, "")
    assert [change.values["max_staleness"] for change in run.learner.adopt(6).changes] == [2.0, 3.0]


async def test_what_was_decided_is_sent_again_only_where_it_is_lost(run: Run, redis: Redis):
    ask(redis, learning_rate=0.5)
    assert run.learner.suggest(4, {"max_staleness": 2.0}, "", if_lost=True)
    assert not run.learner.suggest(5, {"max_staleness": 3.0}, "", if_lost=True)


async def test_a_learner_that_was_replaced_suggests_nothing(run: Run):
    old = run.learner
    run.next_learner()
    with pytest.raises(FencedError):
        old.suggest(0, {"max_staleness": 2.0}, "")


async def test_groups_that_are_being_played_are_counted(run: Run):
    assert run.learner.num_playing() == 0
    await run.buffer.claim("w", 3)
    assert run.learner.num_playing() == 2
