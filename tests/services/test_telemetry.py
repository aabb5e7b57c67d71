import pytest
from redis import Redis

from offbeat.services.telemetry import (
    MetricRecord,
    Partial,
    RedisMetrics,
    mean,
    merge_all,
)


def test_means_of_unequal_parts_merge_into_the_mean_of_all():
    merged = merge_all([{"reward": mean([1.0])}, {"reward": mean([0.0, 0.0, 0.0])}])
    assert merged["reward"].value == 0.25


def test_an_empty_part_changes_nothing():
    assert merge_all([{"reward": mean([])}, {"reward": mean([2.0, 4.0])}])["reward"].value == 3.0
    assert mean([]).value == 0.0


@pytest.mark.parametrize(("kind", "expected"), [("sum", 5.0), ("max", 4.0), ("min", 1.0), ("last", 4.0)])
def test_each_kind_merges_in_its_way(kind: str, expected: float):
    assert Partial(kind, 1.0).merge(Partial(kind, 4.0)).value == expected


def test_kinds_do_not_mix():
    with pytest.raises(ValueError, match="does not merge"):
        Partial("sum", 1.0).merge(Partial("mean", 1.0))


def test_records_are_read_in_order_from_where_one_stopped(redis_url: str):
    with Redis.from_url(redis_url) as redis:
        metrics = RedisMetrics(redis, "run")
        for step in range(3):
            metrics.append(MetricRecord("learner", {"loss": mean([step])}, step=step))
        read = list(metrics.read())
        assert [record.step for _, record in read] == [0, 1, 2]
        assert [record.step for _, record in metrics.read(read[1][0])] == [2]
