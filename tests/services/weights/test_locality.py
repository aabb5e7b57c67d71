"""Shared memory reaches one host: a learner elsewhere is refused before it trains."""

import json
import time

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.errors import WeightsError
from offbeat.services.keys import RunKeys
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.locality import MAX_REPORT_AGE_S, check_reach, this_locality
from offbeat.services.weights.replica_reports import ReplicaReport, encode_report
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from tests.copying import replace

RUN = "run"
ELSEWHERE = replace(this_locality(), host="other-host", memory="other-boot:26")


async def test_a_replica_reports_where_it_runs_and_a_learner_beside_it_is_fine(redis_url: str, redis: Redis, tmp_path):
    async with AsyncRedis.from_url(redis_url) as client:
        await RedisWeightSubscriber(client, RUN, WeightsConfig(), tmp_path).report("r", 3)
    check_reach(redis, RUN, WeightsConfig())
    assert json.loads(redis.hget(RunKeys(RUN).served, "r"))["memory"] == this_locality().memory != ""
    with pytest.raises(WeightsError, match=r"replica r samples on .*, this learner runs on other-host: .*transport=fs"):
        check_reach(redis, RUN, WeightsConfig(), ELSEWHERE)


def test_a_filesystem_reaches_other_hosts(redis: Redis):
    redis.hset(RunKeys(RUN).served, "r", encode_report(ReplicaReport(0, time.time(), host="a", memory="a:1")))
    check_reach(redis, RUN, WeightsConfig(transport="fs"))
    with pytest.raises(WeightsError):
        check_reach(redis, RUN, WeightsConfig())


def test_a_replica_that_fell_silent_does_not_count(redis: Redis):
    redis.hset(RunKeys(RUN).served, "r", encode_report(ReplicaReport(0, time.time() - 60, host="a", memory="a:1")))
    check_reach(redis, RUN, WeightsConfig())


@pytest.mark.parametrize("age_s", [1.0, 60.0])
def test_the_clock_of_a_replicas_node_does_not_count(redis: Redis, age_s: float):
    now = time.time()
    for behind_s in (-3600, 3600):
        report = ReplicaReport(0, now - age_s - behind_s, host="a", memory="a:1", received=now - age_s)
        redis.hset(RunKeys(RUN).served, "r", encode_report(report))
        if age_s > MAX_REPORT_AGE_S:
            check_reach(redis, RUN, WeightsConfig())
            continue
        with pytest.raises(WeightsError):
            check_reach(redis, RUN, WeightsConfig())
