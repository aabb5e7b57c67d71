"""Every metric has one name, a unit and a sentence, and docs/metrics.md says so."""

import itertools
from collections import Counter

import pytest
import torch

from offbeat.deploy.report.metrics_page import render_page
from offbeat.services.generation.engine import KvLoad, LoadTimes, SessionCounts
from offbeat.services.generation.metrics import Counts
from offbeat.services.messages.types import Completion
from offbeat.services.metric_registry import METRICS, RENAMED, current_names, find_metric
from offbeat.services.rollout.metrics import OWN_METRICS
from offbeat.services.telemetry import MetricRecord, Partial, decode_record, encode_record
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import ImportanceWeight, MismatchFilter, TrainInferCorrection
from offbeat.trainer.data.replay_buffer import ReplayedGroups
from offbeat.trainer.learner.reporter import replay_values, step_values
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.losses.metrics import batch_gauges, with_effective_sample_size
from tests.paths import ROOT
from tests.trainer.config.key_effects import EFFECTS, NESTED
from tests.trainer.outcome import VERSION, Outcome, outcome, rich_groups

CORRECTION = TrainInferCorrection(
    is_weight=ImportanceWeight(upper_bound=1.1), filters=(MismatchFilter(ratio_low=0.9, ratio_high=1.2),)
)
RICH = AlgorithmConfig(
    old_logprobs="recompute",
    adv_estimator="gae",
    gamma=0.9,
    use_kl_loss=True,
    kl_loss_coef=0.3,
    ppo_epochs=2,
    entropy_loss_coef=0.1,
    train_infer_correction=CORRECTION,
)


def of_step(trained: Outcome, version: int = VERSION) -> dict[str, float]:
    """A step's metrics, from the same functions as the learner's."""
    values = torch.linspace(0.1, 0.7, trained.batch.num_sampled)
    gauges = {name: Partial("last", value) for name, value in trained.gauges.items()}
    everything = torch.ones(trained.batch.num_trajectories, dtype=torch.bool)
    gauges |= batch_gauges(
        trained.batch, everything, trained.targets.advantages, trained.targets.returns, values, version
    )
    groups = rich_groups()
    taken = StepGroups(groups=groups, trained=groups[:3], dropped={"stale": 2})
    seconds = {"wait": 1.01, "train": 2.52, "publish": 0.23, "checkpoint": 0.54, "settle": 0.126, "step": 4.07}
    replayed = replay_values(ReplayedGroups(groups[:2], [1.0, 1.0]), version)
    step = step_values(taken, version + 1, with_effective_sample_size(gauges) | replayed, seconds)
    return {name: partial.value for name, partial in step.items()}


def test_rows_have_one_name_and_a_sentence():
    assert [row for row, count in Counter((m.source, m.name) for m in METRICS).items() if count > 1] == []
    assert [
        m.name
        for m in METRICS
        if not m.description.endswith(".") or not m.description[0].isupper() | m.description.startswith(("`", "1"))
    ] == []
    assert [m.name for m in METRICS if m.name.endswith("_s") and m.unit not in ("s", "tokens/s")] == []


def test_the_page_is_that_of_the_registry():
    """`make docs` writes it."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == render_page()


@pytest.mark.parametrize("key", [*EFFECTS, *NESTED])
def test_what_a_step_emits_is_in_the_registry(key: str):
    for base, change in (EFFECTS | NESTED)[key]:
        names = of_step(outcome(AlgorithmConfig(**base | change)))
        assert [name for name in names if find_metric("learner", name) is None] == []
        assert set(names) & set(RENAMED["learner"]) == set()


def test_no_value_is_emitted_under_two_names():
    """On a batch whose old, behavior and current policy differ, so that no two metrics agree by chance."""
    steps = [of_step(outcome(RICH, groups)) for groups in (rich_groups(), rich_groups()[:3])]
    by_chance = ("min", "max", "odd")
    compared = [name for name, value in steps[0].items() if (value >= 10 or value % 1) and not name.endswith(by_chance)]
    pairs = itertools.combinations(compared, 2)
    twice = [(one, two) for one, two in pairs if all(step[one] == step[two] for step in steps)]
    assert len(compared) > 30
    assert twice == [], twice


def test_the_services_metrics_are_in_the_registry():
    own = {m.name for m in METRICS if m.source == "rollout" and "{" not in m.name}
    assert own == OWN_METRICS | {"playing", "hung_threads", "generation_calls", "cpu_s"}
    counts = Counts()
    counts.completed(Completion("r", (1, 2)), 4)
    counts.loaded(LoadTimes(0.1, 0.2))
    emitted = counts.take(SessionCounts(), KvLoad(tokens=64), replica_id="a", version=1, running=2, waiting=3).values
    assert set(emitted) == {m.name for m in METRICS if m.source == "generation"}


def test_stored_records_are_read_under_todays_names():
    """A build before 0.2 had the computed tokens under `tokens_trained` and the sampled ones under `tokens/trained`."""
    stored = {
        "tokens_trained": 17.0,
        "tokens/trained": 10.0,
        "tokens/computed": 17.0,
        "mismatch_kl": 0.5,
        "reward": 1.0,
    }
    today = {"tokens_trained": 10.0, "tokens/computed": 17.0, "actor/mismatch_kl": 0.5, "reward": 1.0}
    assert current_names("learner", stored) == today
    blob = encode_record(MetricRecord("learner", {name: Partial("last", value) for name, value in stored.items()}))
    assert {name: partial.value for name, partial in decode_record(blob).values.items()} == today
    assert current_names("rollout", stored) == stored
    assert current_names("learner", today) == today


def test_every_new_name_is_a_row():
    new = [(source, name) for source, names in RENAMED.items() for name in names.values()]
    assert [row for row in new if find_metric(*row) is None] == []
    assert [old for source, names in RENAMED.items() for old in names if find_metric(source, old)] == []
