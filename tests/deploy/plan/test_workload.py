import numpy as np
import pytest

from offbeat.deploy.plan.distributions import ValueDistribution
from offbeat.deploy.plan.workload import MeasuredWorkload, PlannedEpisode, RetimedWorkload, TurnTimes, Workload


def draw(workload: Workload, rng: np.random.Generator, count: int, members: int) -> list[list[PlannedEpisode]]:
    turns, env_s = (field.tolist() for field in workload.draw_groups(rng, count, members))
    return [
        [PlannedEpisode(*episode) for episode in zip(*group, strict=True)] for group in zip(turns, env_s, strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("0.2", 0.2, 0.0),
        ("normal:5:0.5", 5.0, 0.5),
        ("lognormal:0.2:0.4", 0.2, 0.4),
        ("exponential:3", 3.0, 3.0),
        ("uniform:1:4", 2.5, 3 / 12**0.5),
    ],
)
def test_a_distribution_has_the_mean_and_deviation_that_it_names(text: str, mean: float, std: float):
    values = ValueDistribution.parse(text).draw(np.random.default_rng(0), 400_000)
    assert values.mean() == pytest.approx(mean, rel=0.01)
    assert values.std() == pytest.approx(std, rel=0.05)
    assert values.min() >= 0


def test_counts_are_whole_and_include_both_ends():
    counts = ValueDistribution.parse("uniform:3:6").draw_counts(np.random.default_rng(0), 1000)
    assert set(counts.tolist()) == {3, 4, 5, 6}
    assert ValueDistribution.parse("0.1").draw_counts(np.random.default_rng(0), 2).tolist() == [1, 1]


@pytest.mark.parametrize("text", ["", "gamma:1:2", "normal:1", "lognormal:a:b", "0.1:0.2", "-1", "uniform:4:3", "nan"])
def test_another_form_of_distribution_is_refused(text: str):
    with pytest.raises(ValueError, match="'"):
        ValueDistribution.parse(text)


def test_turn_times_are_linear_between_points_and_beyond():
    times = TurnTimes.parse("1:0.1,11:0.2,21:0.4")
    assert [times.seconds(count) for count in (0.5, 1, 6, 11, 16, 31)] == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.3, 0.6])
    assert times.max_rate == pytest.approx(50)
    assert not times.is_flat
    assert TurnTimes.parse("0.1").is_flat


@pytest.mark.parametrize(
    "text", ["", "a", "1:0.1,1:0.2", "4:0.1,2:0.2", "0:1", "1:-1", "1:2:3,", "1:2:3", "nan", "1:inf", "nan:1"]
)
def test_another_form_of_turn_times_is_refused(text: str):
    with pytest.raises(ValueError, match="must be seconds"):
        TurnTimes.parse(text)


def test_measured_groups_are_drawn_whole_by_weight():
    groups = [[PlannedEpisode(1, 0.1), PlannedEpisode(2, 0.2)], [PlannedEpisode(3, 0.3), PlannedEpisode(4, 0.4)]]
    rng = np.random.default_rng(0)
    workload = MeasuredWorkload(groups, (0.25, 0.75))
    drawn = draw(workload, rng, 2000, 2)
    assert all(sorted(group) in groups for group in drawn)
    assert np.mean([sorted(group) == groups[1] for group in drawn]) == pytest.approx(0.75, abs=0.04)
    (larger,) = draw(workload, rng, 1, 7)
    assert len(larger) == 7
    assert sorted(set(larger)) in groups


def test_further_members_are_drawn_from_any_group_unless_siblings_are_alike():
    groups = [[PlannedEpisode(1, 0.1)] * 2, [PlannedEpisode(2, 0.2)] * 2]
    rng = np.random.default_rng(0)
    for correlation, expected in ((1.0, 1.0), (0.0, 0.5), (0.5, 0.75)):
        workload = MeasuredWorkload(groups, intraclass_correlation=correlation)
        drawn = draw(workload, rng, 2000, 3)
        assert np.mean([group[2] == group[0] for group in drawn]) == pytest.approx(expected, abs=0.04)


def test_one_more_member_than_recorded_ends_groups_of_a_heavy_tail_as_soon_as_it_does():
    """The first 8 of 9, from 200 recorded groups of 8, against 9 independent episodes."""
    rng = np.random.default_rng(0)
    groups = [[PlannedEpisode(1, float(value)) for value in row] for row in rng.lognormal(0.0, 1.8, (200, 8))]
    drawn = MeasuredWorkload(groups, intraclass_correlation=0.0).draw_groups(rng, 20_000, 9)
    times = np.sort(drawn.env_s, axis=1)[:, 7]
    expected = np.sort(rng.lognormal(0.0, 1.8, (20_000, 9)), axis=1)[:, 7]
    slowest = times.reshape(-1, 32).max(1).mean(), expected.reshape(-1, 32).max(1).mean()
    assert slowest[0] == pytest.approx(slowest[1], rel=0.15)


def test_measured_episodes_keep_their_turns_with_other_times_of_the_env():
    measured = MeasuredWorkload([[PlannedEpisode(3, 9.0), PlannedEpisode(1, 7.0)]])
    retimed = RetimedWorkload(measured, ValueDistribution.parse("0.5"))
    (drawn,) = draw(retimed, np.random.default_rng(0), 1, 2)
    assert sorted(drawn) == [PlannedEpisode(1, 0.5), PlannedEpisode(3, 1.5)]
