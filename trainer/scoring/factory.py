import os

from offbeat.services.buffer.scores import RedisScoreQueue
from offbeat.services.errors import ForeignRunError
from offbeat.services.redis.connection import connect
from offbeat.services.telemetry import RedisMetrics
from offbeat.trainer.config.scored_roles import scored_roles
from offbeat.trainer.engines.prompt_model import OpenPromptEngine
from offbeat.trainer.run import read_run
from offbeat.trainer.scoring.scorer import Scorer
from offbeat.trainer.training.score_keys import score_keys, selection_digest

REDIS_PATIENCE_S = 10.0


def build_scorer(
    run_id: str, uid: str, role: str, name: str, redis_url: str, open_engine: OpenPromptEngine | None = None
) -> Scorer:
    """Build one replica. uid: of the run's record; name: inherited by its successor; open_engine: for teachers by vLLM.

    Raises:
        ForeignRunError: the run was deleted or created anew.
        ControlError: no such run, or an unreadable configuration.
    """
    redis = connect(redis_url, patience_s=REDIS_PATIENCE_S, run_id=run_id)
    run = read_run(redis, run_id)
    if run.uid != uid:
        raise ForeignRunError("the run was created anew under this name")
    os.environ.update(run.config.environment)
    scored = next(each for each in scored_roles(run.config, run.config.reference) if each.name == role)
    lease_s = run.config.buffer.worker_timeout_s
    queue = RedisScoreQueue(
        redis, run_id, uid, name, score_keys(run)[role], lease_s=lease_s, selection=selection_digest(run.config)
    )
    return Scorer(run, scored, redis, queue, RedisMetrics(redis, run_id, uid), open_engine)
