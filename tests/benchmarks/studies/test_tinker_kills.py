"""When a study's kills happen."""

from typing import cast

import pytest

from offbeat.benchmarks.studies import tinker_kills
from offbeat.benchmarks.studies.tinker_kills import PARTS, STEP, Killer
from offbeat.benchmarks.tinker.recording import RecordedCommand
from offbeat.benchmarks.tinker.server import RunningServer


class Server:
    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill(self, part: str) -> None:
        self.killed.append(part)


def test_kills_are_optimizer_steps_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_kills, "MAX_DELAY_S", 0.0)
    server = Server()
    killer = Killer(cast(RunningServer, server), len(PARTS), seed=1, every=3)
    kills: list[int] = []
    for route in ("forward", STEP, STEP, "forward", STEP, STEP, STEP, STEP, STEP, STEP):
        killer.schedule(RecordedCommand(route, b""))
        if (pending := killer._next) is not None:
            pending.result(10.0)
        kills.append(len(server.killed))
    killer.close()
    assert kills == [0, 1, 1, 1, 1, 2, 2, 2, 3, 3]
    assert sorted(killer.killed) == sorted(PARTS)
    assert killer.is_done
