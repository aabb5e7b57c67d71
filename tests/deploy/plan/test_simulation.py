import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.deploy.plan.closed_forms import closed_forms, expected_lag, mean_refills
from offbeat.deploy.plan.estimate import Effort, estimate
from offbeat.deploy.plan.limits import WorkerLimits
from offbeat.deploy.plan.outcome import Setup, SimulatedRun
from offbeat.deploy.plan.simulation import Simulation
from offbeat.deploy.plan.workload import Measures
from tests.copying import replace
from tests.deploy.plan.settings import measures_of, setup_with

LONG = "lognormal:0.25:0.5"


def simulate(setup: Setup, measures: Measures, *, steps: int = 60, warm_up: int = 10, seed: int = 0) -> SimulatedRun:
    return Simulation(setup, measures, seed).run(steps, warm_up)


def test_a_synchronous_step_is_an_episode_and_its_training():
    """Equal episodes of 1 s, training of 0.5 s, 0.1 s until the next version admits."""
    outcome = simulate(setup_with(max_staleness=0.0), measures_of(announce_s=0.1))
    assert outcome.step_s == pytest.approx(1.0 + 0.5 + 0.1)
    assert outcome.learner_idle == pytest.approx((1.0 + 0.1) / 1.6)
    assert dict(outcome.lags) == {0: 200}


def test_a_slow_learner_sets_the_pace_and_never_waits():
    outcome = simulate(setup_with(max_staleness=1.0), measures_of(train_s=3.0, publish_s=0.2, other_s=0.3))
    assert outcome.step_s == pytest.approx(3.5)
    assert outcome.learner_idle == pytest.approx(0.0, abs=1e-9)
    assert outcome.lag == 1.0


def test_slow_rollouts_take_batch_times_episode_over_slots():
    """Groups of one on full slots: neither groups nor the bound are in the way."""
    setup = setup_with(group_size=1, groups_per_step=16, max_groups_in_flight=64, slots=32, max_staleness=20.0)
    measures = measures_of(env_s=LONG, train_s=0.01)
    closed = closed_forms(setup, measures)
    outcome = simulate(setup, measures, steps=600, warm_up=100)
    assert closed.ideal_step_s == pytest.approx(closed.slots_step_s)
    assert outcome.step_s == pytest.approx(closed.ideal_step_s, rel=0.03)
    assert outcome.slots_empty < 0.01


def test_groups_in_flight_limit_rollouts_by_their_slowest_member():
    setup = setup_with(max_staleness=50.0, max_groups_in_flight=6)
    measures = measures_of(env_s=LONG, train_s=0.01)
    outcome = simulate(setup, measures, steps=800, warm_up=100)
    assert outcome.step_s == pytest.approx(closed_forms(setup, measures).groups_step_s, rel=0.04)


def test_engines_limit_rollouts_by_their_rate():
    """A turn takes 0.1 s for each that runs beside it: ten turns/s of an engine, whatever runs."""
    setup = setup_with(max_staleness=20.0, num_replicas=2)
    measures = measures_of(env_s="0.001", turn_s="1:0.1,10:1", train_s=0.01)
    closed = closed_forms(setup, measures)
    outcome = simulate(setup, measures, steps=200, warm_up=40)
    assert closed.engine_step_s == pytest.approx(16 * 4 / 20)
    assert outcome.step_s == pytest.approx(closed.engine_step_s, rel=0.05)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_env_workers_limit_rollouts_by_their_cpu(num_workers: int):
    """A worker computes 10 ms for each turn, one after the other; episodes that start at once wait for it."""
    setup = replace(setup_with(max_staleness=20.0), num_workers=num_workers)
    measures = measures_of(env_s="0.001", turn_s="0.01", train_s=0.01, worker_s=0.01)
    closed = closed_forms(setup, measures)
    outcome = simulate(setup, measures, steps=200, warm_up=40)
    assert closed.rollout_step_s == closed.worker_step_s == pytest.approx(16 * 4 * 0.01 / num_workers)
    assert outcome.step_s == pytest.approx(closed.worker_step_s, rel=0.05)
    assert outcome.worker_busy > 0.95


@pytest.mark.parametrize("train_s", [0.05, 0.25, 0.4])
def test_mean_lag_follows_from_groups_in_play_and_waiting(train_s: float):
    """Where the bound is not in the way; otherwise groups start right after a version, and lag less."""
    setup, measures = setup_with(max_staleness=50.0), measures_of(env_s=LONG, train_s=train_s)
    outcome = simulate(setup, measures, steps=800, warm_up=100)
    assert outcome.lag == pytest.approx(expected_lag(outcome, setup), rel=0.05)


def test_a_tight_bound_leads_to_less_lag_than_littles_law():
    setup = setup_with(max_staleness=1.0)
    outcome = simulate(setup, measures_of(env_s=LONG), steps=200, warm_up=20)
    assert 0 < outcome.lag < expected_lag(outcome, setup)


@settings(max_examples=30, deadline=None)
@given(
    bound=st.sampled_from([0.0, 0.3, 1.0, 1.5, 2.0]),
    order=st.sampled_from(["completion", "admission"]),
    redundancy=st.integers(0, 2),
    policy=st.sampled_from(["drop", "train"]),
    slots=st.integers(3, 80),
    groups=st.integers(4, 20),
    seed=st.integers(0, 99),
)
def test_the_bound_holds_and_runs_repeat(
    bound: float, order: str, redundancy: int, policy: str, slots: int, groups: int, seed: int
):
    setup = setup_with(
        order=order, slots=slots, max_groups_in_flight=groups, max_staleness=bound, redundancy=redundancy,
        stale_policy=policy, max_refills=8,
    )  # fmt: skip
    measures = measures_of(env_s=LONG, turn_s="1:0.01,32:0.05", train_s=0.3, serve_s=0.05, no_signal=(0.1,))
    outcome = simulate(setup, measures, steps=25, warm_up=5, seed=seed)
    assert outcome == simulate(setup, measures, steps=25, warm_up=5, seed=seed)
    assert outcome.lags.total() == 20 * 4
    assert policy == "train" or max(outcome.lags) <= math.ceil(bound)
    assert 0 <= outcome.learner_idle <= 1
    assert -1e-9 <= outcome.slots_empty <= 1
    assert (outcome.cancelled > 0) <= (redundancy > 0 or policy == "drop")
    assert policy == "drop" or not outcome.dropped.keys() & {"stale", "expired"}


@pytest.mark.parametrize("most", [0, 1, 3, 20])
@pytest.mark.parametrize("shares", [(0.0,), (0.3,), (1.0,), (0.1, 0.5, 1.0)])
def test_a_step_replaces_groups_without_signal_up_to_a_number(most: int, shares: tuple[float, ...]):
    """As many as a negative binomial distribution says, cut there."""
    setup, measures = setup_with(order="admission", max_refills=most), measures_of(train_s=0.2, no_signal=shares)
    kept = setup.limits.groups_per_step

    def chance(share: float, refills: int) -> float:
        return math.comb(refills + kept - 1, refills) * share**refills * (1 - share) ** kept

    expected = fmean(most - sum((most - n) * chance(share, n) for n in range(most)) for share in shares)
    outcome = simulate(setup, measures, steps=1000, warm_up=100)
    assert outcome.dropped["no_signal"] / 1000 == pytest.approx(expected, rel=0.1)
    assert expected - 1e-9 <= mean_refills(setup, measures) <= most


def test_the_mean_of_replaced_groups_is_that_of_a_step_without_a_limit():
    measures = measures_of(no_signal=(0.5, 0.75, 1.0))
    assert mean_refills(setup_with(max_refills=1000), measures) == pytest.approx((4 + 12 + 1000) / 3)
    assert mean_refills(setup_with(max_refills=10), measures) == pytest.approx((4 + 10 + 10) / 3)
    assert mean_refills(setup_with(max_refills=10), measures_of()) == 0.0


def test_order_of_admission_drops_no_group_at_a_whole_bound():
    measures = measures_of(env_s=LONG, train_s=0.2)
    by_completion = simulate(setup_with(max_staleness=1.0), measures)
    by_admission = simulate(setup_with(max_staleness=1.0, order="admission"), measures)
    assert by_completion.dropped
    assert not by_admission.dropped


def test_redundancy_cancels_the_slowest_and_shortens_steps():
    measures = measures_of(env_s="lognormal:0.25:1.5", train_s=0.05)
    plain = simulate(setup_with(max_staleness=0.0, slots=160), measures, steps=200)
    redundant = simulate(setup_with(max_staleness=0.0, slots=160, redundancy=2), measures, steps=200)
    assert redundant.step_s < 0.8 * plain.step_s
    assert redundant.cancelled > plain.cancelled == 0


def test_cancelled_episodes_are_counted_per_trained_trajectory_whatever_the_warm_up():
    setup = setup_with(max_staleness=0.0, slots=160, redundancy=2)
    for effort in (Effort(steps=40, warm_up=0), Effort(steps=40, warm_up=20)):
        assert estimate(setup, measures_of(env_s="lognormal:0.25:1.5"), effort).cancelled == pytest.approx(0.5, rel=0.1)


def test_a_saturated_redis_and_worker_are_seen():
    setup, busy = setup_with(max_staleness=20.0), measures_of(env_s="0.01", train_s=0.01, buffer_s=0.05, worker_s=0.002)
    outcome = simulate(setup, busy, steps=60)
    assert outcome.step_s == pytest.approx(16 * 0.05, rel=0.05)
    assert outcome.buffer_busy > 0.95
    assert outcome.worker_busy == pytest.approx(16 * 4 * 0.002 / outcome.step_s, rel=0.05)


def test_a_setting_in_which_nothing_can_start_is_an_error():
    with pytest.raises(ValueError, match="no group can ever start"):
        simulate(setup_with(slots=0), measures_of())


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("within", [WorkerLimits(threads=8), WorkerLimits(steps=(("A", 8), ("B", 8)))])
def test_threads_and_limits_of_envs_limit_rollouts(num_workers: int, within: WorkerLimits):
    """Steps of 0.5 s in 8 threads of a worker, or 16 of the run; 64 slots."""
    setup = replace(setup_with(max_staleness=20.0), num_workers=num_workers, within=within)
    measures = measures_of(env_s="0.5", turn_s="0.01", train_s=0.01)
    closed = closed_forms(setup, measures)
    at_once = 8 * num_workers if within.threads else 16
    assert closed.rollout_step_s == closed.env_step_s == pytest.approx(16 * 4 * 0.5 / at_once)
    assert simulate(setup, measures, steps=200, warm_up=40).step_s == pytest.approx(closed.env_step_s, rel=0.03)


def test_a_call_of_an_env_holds_its_thread_and_no_other_time_does():
    """Of 0.5 s outside of engines, 0.1 s in one thread: 10 turns a second."""
    setup = replace(setup_with(max_staleness=20.0), within=WorkerLimits(threads=1))
    measures = measures_of(env_s="0.5", turn_s="0.01", train_s=0.01, env_call_s=0.1)
    assert simulate(setup, measures, steps=200, warm_up=40).step_s == pytest.approx(16 * 4 * 0.1, rel=0.03)


@pytest.mark.parametrize("turn_s", ["0", "1:0.01,64:0.02"])
def test_agents_limit_rollouts_while_their_slots_are_held(turn_s: str):
    setup = replace(setup_with(max_staleness=20.0), num_workers=2, within=WorkerLimits(agents=(("A", 4),)))
    outcome = simulate(setup, measures_of(turn_s=turn_s, train_s=0.01), steps=200, warm_up=40)
    episode_s = 1.0 if turn_s == "0" else outcome.episode_s
    assert outcome.episode_s == pytest.approx(1.0, rel=0.1)
    assert outcome.step_s == pytest.approx(16 * episode_s / 8, rel=0.03)
    assert outcome.slots_empty < 0.01


def test_agents_of_cancelled_episodes_are_freed():
    setup = setup_with(max_staleness=20.0, redundancy=1, slots=80)
    limited = replace(setup, within=WorkerLimits(agents=(("A", 5),)))
    measures = measures_of(env_s=LONG, train_s=0.01)
    outcome = simulate(limited, measures, steps=200, warm_up=40)
    assert outcome.cancelled > 0
    assert outcome.step_s < 16 * 5 / 4 * 1.3 / 5


def test_limits_beyond_the_slots_change_nothing():
    setup, measures = setup_with(), measures_of(env_s=LONG)
    within = WorkerLimits(threads=64, steps=(("A", 64),), agents=(("A", 70),))
    assert simulate(setup, measures) == simulate(replace(setup, within=within), measures)
