"""A run's settings change at step boundaries, and a pause ends or is waited out there."""

import numpy as np
import pytest
import torch

from offbeat.services.buffer.api import Boundary
from offbeat.services.live_settings import Change
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.batch import microbatches, pack
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.models.logprobs import token_logprobs
from tests.copying import replace
from tests.fakes import make_group
from tests.trainer.learner.harness import LearnerHarness
from tests.trainer.trajectories import group, trajectory


def test_a_learning_rate_holds_from_the_step_that_adopted_it(harness: LearnerHarness) -> None:
    harness.buffer.boundary = Boundary(
        (Change({"learning_rate": 0.5}, step=2), Change({"learning_rate": 0.25}, step=4))
    )
    learner, trainer = harness.learner()
    assert learner.run()
    assert trainer.rates == [(2, 0.5), (4, 0.25)]
    assert harness.buffer.adopted_at == list(range(6))


def test_a_resumed_learner_repeats_each_step_at_its_first_learning_rate(
    harness: LearnerHarness,
) -> None:
    harness.buffer.boundary = Boundary(
        (Change({"learning_rate": 0.5}, step=1), Change({"learning_rate": 0.25}, step=4))
    )
    learner, first = harness.learner(should_stop=lambda: len(first.history) == 3)
    assert not learner.run()
    assert first.rates == [(1, 0.5)]
    learner, trainer = harness.learner()
    assert len(trainer.history) == 3
    assert learner.run()
    assert trainer.rates == [(3, 0.5), (4, 0.25)]


def test_a_lower_bound_drops_groups_at_consumption_from_its_step_on(harness: LearnerHarness) -> None:
    harness.buffer.boundary = Boundary((Change({"max_staleness": 1.0}, step=3),))
    harness.buffer.published = 9
    versions = iter([*[0] * 6, *[0] * 3, *[9] * 100])
    numbers = iter(range(1000))
    harness.buffer.on_empty = lambda buffer: buffer.stream.append(make_group(next(numbers), version=next(versions)))
    learner, trainer = harness.learner()
    assert learner.run()
    assert harness.buffer.dropped == [(6, "stale"), (7, "stale"), (8, "stale")]
    assert trainer.history[3] == (3, (9, 10))


def test_a_paused_run_begins_no_step_until_it_is_resumed(
    harness: LearnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.trainer.learner.loop.PAUSE_POLL_S", 0.0)
    harness.buffer.boundaries = [Boundary(), Boundary(paused=True), Boundary(paused=True), Boundary()]
    learner, trainer = harness.learner()
    assert learner.run()
    assert harness.buffer.adopted_at[:4] == [0, 1, 1, 1]
    assert len(trainer.history) == 6
    assert "paused" in [record.labels.get("phase") for record in harness.sink.records]


def test_a_run_that_is_to_end_while_it_is_paused_ends_with_a_checkpoint(harness: LearnerHarness) -> None:
    harness.buffer.boundaries = [Boundary(), Boundary()]
    harness.buffer.boundary = Boundary(paused=True, ends=True)
    learner, trainer = harness.learner()
    assert not learner.run()
    assert len(trainer.history) == 2
    assert harness.buffer.trained == [0, 1, 2, 3]


def test_each_token_is_judged_at_the_temperature_that_it_was_sampled_at() -> None:
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (6,))
    temperatures = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5, 1.0], dtype=torch.float64)
    logprobs, entropies = token_logprobs(logits, targets, temperatures)
    (logprobs.sum() + entropies.sum()).backward()
    assert logits.grad is not None
    for row, temperature in enumerate(temperatures.tolist()):
        alone = logits[row : row + 1].detach().requires_grad_()
        logprob, entropy = token_logprobs(alone, targets[row : row + 1], temperature)
        (logprob + entropy).sum().backward()
        assert torch.allclose(logprobs[row], logprob[0])
        assert torch.allclose(entropies[row], entropy[0])
        assert alone.grad is not None
        assert torch.allclose(logits.grad[row], alone.grad[0])


def test_a_groups_temperature_goes_with_its_tokens() -> None:
    hot = replace(group(1, trajectory(0, [(2, 3, 1.0)]), trajectory(1, [(2, 1, 0.0)])), temperature=0.5)
    cold = group(0, trajectory(0, [(1, 2, 1.0)]))
    assert pack([cold]).temperatures is None
    batch = pack([cold, hot])
    assert batch.temperatures is not None
    np.testing.assert_array_equal(batch.temperatures.numpy(), np.array([np.nan, np.nan, 0.5, 0.5, 0.5, 0.5]))
    for micro in microbatches(batch, range(batch.num_sequences), 4):
        assert micro.temperatures is not None
        assert torch.equal(micro.temperatures.isnan(), batch.temperatures[micro.index].isnan())


def test_the_policys_own_temperature_scales_no_single_tokens() -> None:
    batch = StepBatch.build(
        0,
        [replace(group(n, trajectory(0, [(1, 2, 1.0)])), temperature=value) for n, value in enumerate((0.7, 0.5))],
        AlgorithmConfig(),
    )
    assert [each.temperature for each in batch.groups] == [0.7, 0.5]
    for part in (batch.drop_temperature(0.7).groups, batch.drop_temperature(0.7).shaped):
        assert [each.temperature for each in part] == [None, 0.5]
