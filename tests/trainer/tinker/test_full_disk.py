"""States that can't be written: the learner waits, and loses nothing."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from offbeat.services.tinker.audit import find_problems
from offbeat.services.tinker.records import CreateModel, OptimStep, PublishSampler
from offbeat.trainer.tinker import learner
from offbeat.trainer.tinker.adapters import AdapterPool
from tests.trainer.tinker.test_learner import LIMITS, StoppingLog, encode_request, read_evidence, run, send
from tests.trainer.tinker.tiny_base import make_data

BATCH = encode_request(make_data(("weights",)))
MODELS = ("a", "b")


class WaitingLog(StoppingLog):
    """Log whose learner waits for a path to be free, which is freed then."""

    def __init__(self, redis: Redis, blocked: Path) -> None:
        super().__init__(redis)
        self._blocked = blocked
        self.applied_then: list[int] = []

    def wait(self, timeout_s: float) -> set[str]:
        applied = [self.applied(each) for each in MODELS]
        if self._blocked.exists():
            self.applied_then = applied
            self._blocked.rmdir()
        return super().wait(timeout_s) if applied == [3, 3] else set()


@pytest.mark.parametrize(
    ("save_interval_s", "max_models"), [(0.0, 2), (20.0, 1)], ids=["due", "another needs its place"]
)
def test_a_state_that_cannot_be_written_is_waited_for(
    redis: Redis,
    pool: AdapterPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    save_interval_s: float,
    max_models: int,
) -> None:
    for name, value in {"ROOM": 0.05, "TIDY": 0.0, "SAVE": save_interval_s}.items():
        monkeypatch.setattr(learner, f"{name}_INTERVAL_S", value)
    blocked = tmp_path / "server/states/.a.safetensors"  # where the state is written first
    blocked.mkdir(parents=True)
    for model_id in MODELS:
        send(redis, model_id, [CreateModel(), BATCH, PublishSampler(f"{model_id}:0"), OptimStep()])
    limits = replace(LIMITS, max_models=max_models)
    with caplog.at_level(logging.ERROR):
        run(log := WaitingLog(redis, blocked), pool, tmp_path / "server", shared_pass_tokens=0, limits=limits)
    assert log.applied_then == [0, -1], "nothing is applied meanwhile"
    assert "the state of model a can't be written: " in caplog.text
    for model_id in MODELS:
        evidence = read_evidence(log, redis, model_id)
        assert [each.is_refused for each in evidence.commands.values()] == [False] * 4
        assert (find_problems(evidence), log.logged(model_id)) == ([], [])
