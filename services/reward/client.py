"""Client of a reward's Ray Serve application."""

from typing import Any, Generic, cast

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.function import SampleT, ValueT
from offbeat.services.reward.reply import read_reply
from offbeat.services.reward.sample import encode_sample

DEPLOYMENT = "reward"


def app_name(run_id: str, reward: str) -> str:
    return f"reward-{run_id}:{reward}"  # run ids have no colon


class ServedReward(Generic[SampleT, ValueT]):
    """`RewardFunction` of any replica; cancelling an attempt cancels it there."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._handle: DeploymentHandle[Any] | None = None

    async def score(self, sample: SampleT) -> ValueT:
        blob = encode_sample(sample)
        try:
            if self._handle is None:
                self._handle = serve.get_deployment_handle(DEPLOYMENT, self._app).options(method_name="score")
            call = self._handle.remote(blob)
            ended = False
            try:
                reply = await call
                ended = True
            finally:
                if not ended:
                    call.cancel()
        except (RayError, RayServeException, KeyError) as error:  # KeyError: the application is not deployed yet
            raise RewardError(Failure.UNAVAILABLE, f"no replica of {self._app} answered: {error}") from error
        return cast(ValueT, read_reply(reply))

    async def close(self) -> None: ...
