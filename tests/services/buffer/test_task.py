"""What a task sampler draws: settled once for a group, by the newest state, and gone with the group."""

import pytest

from offbeat.services.errors import FencedError
from tests.services.buffer.buffer_play import Run


async def test_the_first_draw_of_a_group_holds_for_all_its_members(run: Run):
    first, second, *_ = await run.buffer.claim("w", 100)
    assert await run.buffer.task(0) == ("", "")
    assert await run.buffer.task(0, "one") == ("one", "")
    assert await run.buffer.task(0, "two") == ("one", "")
    assert await run.buffer.task(1) == ("", "")
    await run.submit(first)
    assert await run.buffer.task(0) == ("one", "")
    await run.submit(second)
    assert run.keys_left("unit:t:0") == []
    assert await run.buffer.task(0, "three") == ("three", "")
    assert run.keys_left("unit:t:0") == [], "a group that is over keeps nothing"


async def test_workers_hear_what_the_learner_taught_last(run: Run):
    run.learner.teach("1")
    run.learner.teach("2")
    assert await run.buffer.task(0) == ("", "2")
    old, new = run.learner, run.next_learner()
    new.teach("3")
    with pytest.raises(FencedError):
        old.teach("4")
    assert await run.buffer.task(0) == ("", "3")
