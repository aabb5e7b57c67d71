"""No key of the replay or of the staleness controller is silent: each changes what is done."""

from typing import Any

import pytest

from offbeat.trainer.config.replay import ReplayConfig
from offbeat.trainer.config.staleness import StalenessControllerConfig
from tests.trainer.config.key_effects import Change
from tests.trainer.data.test_replay_buffer import numbers, replayed
from tests.trainer.learner.test_staleness_controller import Seen, asked

TWICE: dict[str, Any] = {"samples_per_insert": 2.0}
PRIORITIZED = TWICE | {"sampler": "prioritized"}
OF_THE_REPLAY: dict[str, list[Change]] = {
    "samples_per_insert": [({}, TWICE), (TWICE, {"samples_per_insert": 1.5})],
    "max_times_sampled": [({"samples_per_insert": 3.0}, {"max_times_sampled": 3})],
    "max_size": [(TWICE, {"max_size": 5})],
    "max_staleness": [(TWICE, {"max_staleness": 1.0})],
    "sampler": [(TWICE, {"sampler": name}) for name in ("fifo", "lifo", "prioritized")],
    "priority_exponent": [(PRIORITIZED, {"priority_exponent": 2.0})],
    "importance_sampling_exponent": [(PRIORITIZED, {"importance_sampling_exponent": 1.0})],
}

WELL = Seen(mismatch_kl=0.0, ess=1.0, wait_s=0.0, playing=24)
TOO_OLD, WAITS = WELL._replace(mismatch_kl=1.0), WELL._replace(wait_s=0.5)
HELD_UP, IDLE = WAITS._replace(playing=12), WELL._replace(playing=12)
OF_THE_CONTROLLER: dict[str, tuple[Seen, Any]] = {
    "interval": (TOO_OLD, 2),
    "patience": (TOO_OLD, 1),
    "min_staleness": (TOO_OLD, 1.5),
    "max_staleness": (HELD_UP, 2.5),
    "staleness_step": (TOO_OLD, 0.5),
    "min_env_groups": (IDLE, 20),
    "max_env_groups": (WAITS, 40),
    "max_mismatch_kl": (WELL._replace(mismatch_kl=0.06), 0.1),
    "min_ess": (WELL._replace(ess=0.6), 0.5),
    "max_learner_idle": (HELD_UP, 0.6),
    "max_rollout_idle": (HELD_UP, 0.6),
    "hysteresis": (HELD_UP._replace(mismatch_kl=0.04), 0.0),
}
"""What steps measure, and a value that makes the controller do something else than without it."""


@pytest.mark.parametrize(
    ("given", "more"),
    [pytest.param(*change, id=f"{key}-{n}") for key, all_ in OF_THE_REPLAY.items() for n, change in enumerate(all_)],
)
def test_a_key_of_the_replay_changes_which_groups_join_or_what_they_weigh(given: dict[str, Any], more: dict[str, Any]):
    before, after = (replayed(12, staleness=6, **each) for each in (given, given | more))
    assert [(numbers(each), each.weights) for each in before] != [(numbers(each), each.weights) for each in after]


@pytest.mark.parametrize(("key", "seen", "value"), [(key, *case) for key, case in OF_THE_CONTROLLER.items()])
def test_a_key_of_the_staleness_controller_changes_what_it_asks_for(key: str, seen: Seen, value: Any):
    assert asked(seen) != asked(seen, **{key: value})


def test_every_replay_and_staleness_key_has_a_case():
    assert set(ReplayConfig.model_fields) == set(OF_THE_REPLAY)
    assert set(StalenessControllerConfig.model_fields) == set(OF_THE_CONTROLLER)
