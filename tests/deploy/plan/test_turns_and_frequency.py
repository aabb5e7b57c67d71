"""Engines that sleep while the learner trains, and weights that only some steps publish."""

from typing import Any

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.plan.closed_forms import closed_forms, expected_lag
from offbeat.deploy.plan.machine import Machine, PartSizes, divisions
from offbeat.deploy.plan.measurements import measure
from offbeat.deploy.plan.plan import bounds_of, setup_of
from offbeat.deploy.plan.simulation import Simulation
from offbeat.deploy.plan.sleep import measured_notes, planned_notes
from tests.copying import replace
from tests.deploy.plan.settings import measures_of, setup_with
from tests.deploy.plan.test_measurements import rollout_rows, step_rows
from tests.paths import QUICKSTART

SLEEP = "actor_infer.strategy_args.strategy_config.enable_sleep_mode=true"


@pytest.mark.parametrize("bound", [0.0, 1.0, 4.0])
def test_no_bound_lets_turns_go_on_while_engines_sleep(bound: float) -> None:
    """Turns of 1 s of the engine, training of 3 s: both, one after the other, under each bound."""
    measures = measures_of(env_s="0", turn_s="1:0.015625,64:1", train_s=3.0)
    awake, asleep = (
        Simulation(replace(setup_with(max_staleness=bound), sleeps=sleeps), measures, 0).run(60, 10).step_s
        for sleeps in (False, True)
    )
    assert asleep == pytest.approx(4.0, rel=0.05)
    assert awake == pytest.approx(4.0 if bound == 0 else 3.0, rel=0.05)


def test_envs_go_on_while_engines_sleep() -> None:
    """An env's step of 3 s fits into the training that interrupts its episode."""
    setup = replace(setup_with(max_staleness=1.0), sleeps=True)
    measures = measures_of("2", "3", turn_s="0.25", train_s=3.0)
    step_s = Simulation(setup, measures, 0).run(60, 10).step_s
    assert step_s < 3.0 + 2 * (3.0 + 0.25) - 1.0


def test_engines_load_the_newest_weights_before_they_sample_again() -> None:
    setup = replace(setup_with(max_staleness=0.0), sleeps=True)
    measures = measures_of(env_s="0", turn_s="0.25", train_s=3.0, publish_s=0.5, other_s=0.2, serve_s=0.7)
    assert Simulation(setup, measures, 0).run(60, 10).step_s == pytest.approx(1.0 + 3.0 + 0.5 + 0.2 + 0.7)


@pytest.mark.parametrize("bound", [3.0, 5.0])
def test_steps_between_two_publishes_train_on_older_groups(bound: float) -> None:
    setup = replace(setup_with(max_staleness=bound), publish_every=(4,))
    outcome = Simulation(setup, measures_of(train_s=0.5, publish_s=2.0), 0).run(90, 10)
    assert max(outcome.lags) == bound
    assert not outcome.dropped
    if bound == 3.0:  # all four batches are admitted after the publish, and lag 0 to 3
        assert dict(outcome.lags) == dict.fromkeys(range(4), 80)
        assert outcome.step_s == pytest.approx((1.0 + 4 * 0.5 + 2.0) / 4, rel=0.02)


def test_littles_law_counts_batches_that_are_not_published() -> None:
    setup = replace(setup_with(max_staleness=50.0), publish_every=(4, 6))
    measures = measures_of(env_s="lognormal:0.25:0.5", train_s=0.25)
    outcome = Simulation(setup, measures, 0).run(800, 100)
    assert setup.publish_lags == [0, 1, 2, 3, 0, 1, 0, 1, 0, 1, 2, 3]
    assert outcome.lag == pytest.approx(expected_lag(outcome, setup), rel=0.05)
    assert closed_forms(setup, replace(measures, publish_s=0.4)).train_s == pytest.approx(
        0.25 + 0.4 / 3
    )  # four of twelve


def test_a_bound_that_was_lowered_makes_each_step_publish() -> None:
    setup = replace(setup_with(max_staleness=0.0), publish_every=(4,))
    assert set(Simulation(setup, measures_of(), 0).run(30, 5).lags) == {0}


@pytest.mark.parametrize(
    ("overrides", "bounds", "periods"),
    [
        ([], [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0], (1, 20, 10)),
        (["model_update_frequency=4", "max_staleness=4"], [3.0, 4.0, 6.0], (4, 20, 10)),
        (["model_update_frequency=9", "max_staleness=9"], [8.0], (9, 20, 10)),
    ],
)
def test_only_bounds_that_validation_accepts_are_tried(
    overrides: list[str], bounds: list[float], periods: tuple[int, ...]
) -> None:
    setup = setup_of(load_run(QUICKSTART, ["save_steps=20", "eval_steps=10", *overrides]))
    assert bounds_of(setup) == bounds
    assert setup.publish_every == periods


def test_a_publish_takes_its_mean_over_the_steps_that_have_one() -> None:
    rows = [
        replace(row, values={name: x for name, x in row.values.items() if name != "time/publish_s" or n % 3 == 0})
        for n, row in enumerate(step_rows())
    ]
    measures = measure([*rows, *rollout_rows()], []).measures
    assert measures.publish_s == pytest.approx(0.02)
    assert measures.other_s == pytest.approx(2.0 - 1.0 - 0.28 - 0.02 / 5)  # of five steps, one of which published


def test_engines_and_learner_in_turns_have_the_same_gpus() -> None:
    config = load_run(QUICKSTART, [SLEEP, "max_staleness=0"])
    setup, sizes = setup_of(config), PartSizes.of(config, Machine(gpus=1))
    assert setup.sleeps
    sizes = replace(sizes, engines_on_gpus=True, learner_on_gpus=True)
    for gpus in (1, 4):
        found = [
            (each.setup.num_replicas, each.learner_processes)
            for each in divisions(Machine(gpus=gpus), sizes, setup, measures_of())
        ]
        assert found == [(number, gpus) for number in range(1, gpus + 1)]
        assert all(
            sizes.gpus(replace(setup, num_replicas=replicas), processes) == gpus for replicas, processes in found
        )


def test_what_turns_hide_is_a_note() -> None:
    synchronous = load_run(QUICKSTART, [SLEEP, "max_staleness=0"])
    stale = synchronous.model_copy(update={"max_staleness": 1.0})
    assert not [*measured_notes(synchronous), *planned_notes(stale)]
    assert "measure a run with max_staleness 0" in measured_notes(stale)[0]
    mapped: dict[str, Any] = {
        "actor_infer": stale.actor_infer.model_copy(update={"device_mapping": (0, 1)}),
        "actor_train": stale.actor_train.model_copy(update={"device_mapping": (0,)}),
    }
    partly = stale.model_copy(update=mapped)
    assert "others do not" in planned_notes(partly)[0]
    assert not setup_of(partly).sleeps
