"""When a scorer may load its model."""

from pathlib import Path

from redis import Redis

from offbeat.deploy.config.loader import load_run
from offbeat.services.buffer.scores import RedisScoreQueue
from offbeat.services.telemetry import RedisMetrics
from offbeat.trainer.config.scored_roles import scored_roles
from offbeat.trainer.run import START, LearnerRun
from offbeat.trainer.scoring.scorer import Scorer
from offbeat.trainer.training.score_keys import describe_start, start_key
from tests.paths import QUICKSTART

SERVICE = ("add_token_level_kl=true", "init_kl_coef=0.1", "reference.strategy_args.placement=service")


def make_scorer(redis: Redis, run: LearnerRun) -> Scorer:
    (role,) = scored_roles(run.config, run.config.reference)
    queue = RedisScoreQueue(redis, run.run_id, run.uid, "a", "reference@0", lease_s=4)
    return Scorer(run, role, redis, queue, RedisMetrics(redis, run.run_id))


def test_a_warm_start_whose_folder_is_lost_is_waited_for(redis_url: str, tmp_path: Path) -> None:
    """The run goes on from a store: without them, the weights before the warm start would be the reference."""
    with Redis.from_url(redis_url) as redis:
        run = LearnerRun("run", "lineage", tmp_path, load_run(QUICKSTART, [f"output_dir={tmp_path}", *SERVICE]))
        scorer = make_scorer(redis, run)
        assert not scorer._has_start()
        (tmp_path / START).mkdir()
        redis.set(start_key("run"), describe_start(run))
        assert scorer._has_start()
        assert run.first_weights == tmp_path / START
        (tmp_path / START).rmdir()
        assert not scorer._has_start()
        (tmp_path / START).mkdir()
        assert scorer._has_start()


def test_another_lineage_has_a_start_of_its_own(redis_url: str, tmp_path: Path) -> None:
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}", *SERVICE])
    with Redis.from_url(redis_url) as redis:
        redis.set(start_key("run"), describe_start(LearnerRun("run", "before", tmp_path, config)))
        run = LearnerRun("run", "lineage", tmp_path, config)
        assert not make_scorer(redis, run)._has_start()
        redis.set(start_key("run"), describe_start(run))
        assert make_scorer(redis, run)._has_start(), "no warm start was kept, as for adapters of before it"
