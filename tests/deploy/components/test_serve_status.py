import asyncio
import threading

import pytest
from ray.serve.schema import ApplicationStatus

from offbeat.deploy.components import serve_status
from offbeat.deploy.components.serve_status import AppStatus, ServeStatus


async def test_components_share_one_status_request_per_check(
    monkeypatch: pytest.MonkeyPatch,
):
    requests: list[int] = []
    answer = threading.Event()

    def statuses() -> dict[str, AppStatus]:
        requests.append(len(requests))
        answer.wait(10)
        return {"app": AppStatus(ApplicationStatus.RUNNING, str(requests[-1]))}

    monkeypatch.setattr(serve_status, "read_app_statuses", statuses)
    shared = ServeStatus()
    calls = [asyncio.create_task(shared()) for _ in range(5)]
    await asyncio.sleep(0)
    answer.set()
    assert [status["app"].message for status in await asyncio.gather(*calls)] == ["0"] * 5
    assert (await shared())["app"].message == "1"
    assert requests == [0, 1]
