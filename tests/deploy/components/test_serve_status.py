import asyncio
import threading

import pytest
from ray.serve.schema import ApplicationStatus

from offbeat.deploy.components import serve_status
from offbeat.deploy.components.serve_status import AppStatus, ServeStatus


async def test_components_share_one_status_request_per_check(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[int] = []
    answer = threading.Event()

    def statuses() -> dict[str, AppStatus]:
        asked.append(len(asked))
        answer.wait(10)
        return {"app": AppStatus(ApplicationStatus.RUNNING, str(asked[-1]))}

    monkeypatch.setattr(serve_status, "read_app_statuses", statuses)
    shared = ServeStatus()
    look = [asyncio.create_task(shared()) for _ in range(5)]
    await asyncio.sleep(0)
    answer.set()
    assert [told["app"].message for told in await asyncio.gather(*look)] == ["0"] * 5
    assert (await shared())["app"].message == "1"
    assert asked == [0, 1]
