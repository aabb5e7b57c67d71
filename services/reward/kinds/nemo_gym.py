"""NeMo Gym's resources servers: a response of OpenAI's Responses API to `/verify`, a reward back."""

from collections.abc import Mapping
from typing import Any

import msgspec

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.function import read_number
from offbeat.services.reward.kinds.config import NemoGymConfig
from offbeat.services.reward.kinds.http import JsonClient, shorten
from offbeat.services.reward.sample import RewardSample, encode_sample

REQUEST = "responses_create_params"


class NemoGymReward:
    def __init__(self, config: NemoGymConfig) -> None:
        """Raises ValueError if the token's variable is not set."""
        self._url = f"{config.url.rstrip('/')}/verify"
        self._truth_field = config.ground_truth_field
        self._client = JsonClient(config.timeout_s, config.max_concurrent, config.api_key_env)

    async def score(self, sample: RewardSample) -> float:
        reply = await self._client.post(self._url, self._body(sample))
        if not isinstance(reply, dict) or "reward" not in reply:
            raise RewardError(Failure.MALFORMED, f"{self._url}: the reply has no 'reward': {shorten(reply)}")
        if reply.get("mask_sample"):
            reason = reply.get("failure_reason") or reply.get("failure_kind") or "mask_sample"
            raise RewardError(Failure.UNAVAILABLE, f"{self._url}: no valid measurement: {reason}")
        return read_number(reply["reward"], f"{self._url}: reward")

    async def close(self) -> None:
        await self._client.close()

    def _body(self, sample: RewardSample) -> dict[str, Any]:
        """Return the row's columns with request and response, as NeMo Gym's agents send them."""
        plain = msgspec.msgpack.decode(encode_sample(sample))
        row: Mapping[str, Any] = plain["row"]
        truth = {self._truth_field: plain["ground_truth"]} if self._truth_field else {}
        return {
            **row,
            **truth,
            REQUEST: {**(row.get(REQUEST) or {}), "input": plain["prompt"]},
            "response": _response(sample.response),
        }


def _response(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg_0", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": 0.0,
        "model": "policy",
        "status": "completed",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
    }
