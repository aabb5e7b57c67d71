import asyncio
import threading

import pytest
from ray import serve

from deploy.components import ServeStatus


async def test_all_components_of_one_look_share_one_question_and_the_next_look_asks_anew(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[int] = []
    answer = threading.Event()

    def status() -> int:
        asked.append(len(asked))
        answer.wait(10)
        return asked[-1]

    monkeypatch.setattr(serve, "status", status)
    shared = ServeStatus()
    look = [asyncio.create_task(shared()) for _ in range(5)]
    await asyncio.sleep(0)
    answer.set()
    assert await asyncio.gather(*look) == [0] * 5
    assert await shared() == 1
    assert asked == [0, 1]
