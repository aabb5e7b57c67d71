"""Rewards on Ray Serve: scores, failures by reason, a killed replica, back-pressure."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import psutil
import pytest
import pytest_asyncio
import ray
from ray import serve

from offbeat.services.reward.app import build
from offbeat.services.reward.client import app_name
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.factory import make_scorer
from offbeat.services.reward.function import MAX_HUNG_THREADS
from offbeat.services.reward.scorer import RewardScorer
from tests.services.reward.reward_models import write_reward_model
from tests.services.reward.samples import group_of, sample

pytestmark = [pytest.mark.alone, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

RUN = f"rewards-{os.getpid()}"
FUNCTIONS = "tests.services.reward.functions"
SLOW = {"num_replicas": 1, "cpus_per_replica": 0.1, "max_concurrent": 2, "tags": ["slow"]}
HANGING = {"max_concurrent": MAX_HUNG_THREADS, "tags": ["hanging"], "timeout_s": 0.5, "max_attempts": 1}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardsConfig]:
    """A model of two replicas, a function with two places, one with many and a short timeout, and one of groups."""
    folder, output_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    write_reward_model(folder)
    model = {
        "name": "model",
        "kind": "reward_model",
        "model_args": {"model_name_or_path": str(folder)},
        "tags": ["model"],
    }
    rewards = [
        {**model, "num_replicas": 2, "cpus_per_replica": 0.1, "cache_size": 0},
        {**SLOW, "name": "slow", "kind": "function", "path": f"{FUNCTIONS}:sleep_as_told", "timeout_s": 2.0},
        {**SLOW, **HANGING, "name": "hanging", "kind": "function", "path": f"{FUNCTIONS}:sleep_as_told"},
        {
            **SLOW,
            "name": "compared",
            "kind": "function",
            "scope": "group",
            "path": f"{FUNCTIONS}:told",
            "tags": ["group"],
        },
        {"name": "local", "kind": "regex", "pattern": "a"},
    ]
    config = RewardsConfig.model_validate({"rewards": rewards}, strict=False)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir="/tmp/offbeat-rw")
    try:
        for reward in config.rewards[:4]:
            app = build(reward, output_dir=output_dir, environment={})
            serve.run(app, name=app_name(RUN, reward.name), route_prefix=None)
        yield config
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def scorer(config: RewardsConfig) -> AsyncIterator[RewardScorer]:
    scorer = make_scorer(config, run_id=RUN)
    yield scorer
    await scorer.close()


async def test_a_served_model_scores_as_one_in_this_process(config: RewardsConfig, scorer: RewardScorer):
    samples = [sample("a" * length, tag="model") for length in range(20)]
    served = await asyncio.gather(*(scorer.score(each) for each in samples))
    here = make_scorer(config, local=True)
    for values, each in zip(served, samples, strict=True):
        assert values == pytest.approx(await here.score(each), abs=1e-5)
    await here.close()
    assert len({values["model"] for values in served}) > 10


async def test_a_served_function_compares_a_group(scorer: RewardScorer):
    group = group_of("ab", "abcd", "a", seed=3, tag="group")
    assert [each["compared"] for each in await scorer.score_group(group)] == [2.0, 1.0, 4.0]
    with pytest.raises(RewardError, match="expected a list of 2 numbers, one for each member, got 1") as raised:
        await scorer.score_group(group_of("few", "b", tag="group"))
    assert raised.value.failure is Failure.ERROR


async def test_failures_cross_the_service_with_their_reason(scorer: RewardScorer):
    with pytest.raises(RewardError, match="raised ValueError: could not convert") as raised:
        await scorer.score(sample("no number", tag="slow"))
    assert raised.value.failure is Failure.ERROR
    with pytest.raises(RewardError) as raised:
        await scorer.score(sample("30", tag="slow"))
    assert raised.value.failure is Failure.TIMEOUT


async def test_calls_beyond_the_places_wait_without_timing_out(scorer: RewardScorer, config: RewardsConfig):
    """Each takes half its timeout: were waiting counted, later ones would fail; a second worker shares the replica."""
    other = make_scorer(config, run_id=RUN)
    samples = [sample("1", tag="slow", truth=number) for number in range(4)]
    values = await asyncio.gather(*(s.score(each) for s in (scorer, other) for each in samples))
    assert [value["slow"] for value in values] == [1.0] * 8
    await other.close()


async def test_a_killed_replica_loses_no_score(scorer: RewardScorer):
    expected = [await scorer.score(sample(f"a{number}", tag="model")) for number in range(30)]
    victims = [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"ServeReplica:{app_name(RUN, 'model')}" in " ".join(process.info["cmdline"] or ())
    ]
    assert victims
    calls = [asyncio.create_task(scorer.score(sample(f"a{number}", tag="model"))) for number in range(30)]
    await asyncio.sleep(0)
    victims[0].send_signal(signal.SIGKILL)
    values = await asyncio.gather(*calls)
    for value, before in zip(values, expected, strict=True):
        assert value == pytest.approx(before, abs=1e-5)


async def test_a_replica_whose_calls_hang_is_replaced(scorer: RewardScorer):
    """Its threads would hang for a minute."""
    calls = (scorer.score(sample("60", tag="hanging", truth=number)) for number in range(MAX_HUNG_THREADS))
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert {error.failure for error in failures if isinstance(error, RewardError)} == {Failure.TIMEOUT}
    async with asyncio.timeout(200):  # a replica starts slowly on a loaded machine
        while True:
            with suppress(RewardError):
                assert await scorer.score_one("hanging", sample("0", tag="hanging")) == 1.0
                return


async def test_an_application_that_is_not_there_is_unavailable(config: RewardsConfig):
    rewards = [reward.model_copy(update={"max_retry_s": 0.0}) for reward in config.rewards]
    scorer = make_scorer(config.model_copy(update={"rewards": tuple(rewards)}), run_id="no-such-run")
    with pytest.raises(RewardError) as raised:
        await scorer.score(sample("1", tag="slow"))
    assert raised.value.failure is Failure.UNAVAILABLE
    await scorer.close()
