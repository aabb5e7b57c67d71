"""Judges: language models behind an OpenAI-compatible API, or in replicas of the mesh."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, cast

import numpy as np

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.function import SampleT, ValueT
from offbeat.services.reward.kinds.http import JsonClient
from offbeat.services.reward.kinds.judge_verdicts import Question, Verdict
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig
from offbeat.services.reward.sample import final_text, images_of


class JudgeClient(Protocol):
    async def start(self) -> object: ...

    async def check(self) -> None:
        """Raise if it can't answer any more."""
        ...

    async def complete(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a whole answer; raises RewardError."""
        ...

    async def close(self) -> None: ...


class LlmJudge(Generic[SampleT, ValueT]):
    def __init__(self, config: LlmJudgeConfig, verdict: Verdict[SampleT, ValueT]) -> None:
        """Raises ValueError without the key's variable, or a usable model."""
        self._config = config
        self._verdict = verdict
        self._client = _open_client(config)

    async def start(self) -> None:
        """Load the model, if it has one."""
        await self._client.start()

    async def check(self) -> None:
        await self._client.check()

    async def score(self, sample: SampleT) -> ValueT:
        questions = self._verdict.ask(sample)
        values = await asyncio.gather(*(self._answer(question, sample) for question in questions))
        return cast(ValueT, np.mean(values, axis=0).tolist())

    async def close(self) -> None:
        await self._client.close()

    async def _answer(self, question: Question, sample: SampleT) -> ValueT:
        c = self._config
        system = [] if c.system_prompt is None else [{"role": "system", "content": c.system_prompt}]
        images = images_of(sample.prompt) if c.sees_images else []
        content: Any = [*images, {"type": "text", "text": question.prompt}] if images else question.prompt
        answer = await self._client.complete([*system, {"role": "user", "content": content}])
        if not answer.strip():
            raise RewardError(Failure.MALFORMED, "the judge answered nothing")
        return self._verdict.read(final_text(answer), question, sample)


class RemoteJudge:
    """`JudgeClient` of an OpenAI-compatible API."""

    def __init__(self, config: LlmJudgeConfig, url: str) -> None:
        """Raises ValueError without the key's variable."""
        self._config = config
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._client = JsonClient(config.timeout_s, 2 * config.max_concurrent, config.api_key_env)

    async def start(self) -> None: ...

    async def check(self) -> None: ...

    async def complete(self, messages: Sequence[Mapping[str, Any]]) -> str:
        c = self._config
        body = {
            "model": c.model,
            "messages": messages,
            "temperature": c.generating_args.temperature,
            "max_tokens": c.generating_args.max_new_tokens,
            **c.extra_body,
        }
        return _text_of(await self._client.post(self._url, body))

    async def close(self) -> None:
        await self._client.close()


def _open_client(config: LlmJudgeConfig) -> JudgeClient:
    if config.model_folder is None:
        assert config.url is not None, "the configuration has one of both"
        return RemoteJudge(config, config.url)
    # vLLM's dependencies take seconds, which env workers without a judge's model spare
    from offbeat.services.reward.kinds.judge_model import JudgeModel  # noqa: PLC0415

    return JudgeModel(config, config.model_folder)


def _text_of(reply: Any) -> str:
    """Return the answer's text; raises RewardError if missing or cut."""
    try:
        choice = reply["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RewardError(Failure.MALFORMED, f"the judge's reply has no message: {str(reply)[:200]}") from None
    if reason == "length":
        raise RewardError(Failure.MALFORMED, "the judge's answer reached max_new_tokens: raise it")
    if not isinstance(content, str):
        raise RewardError(Failure.MALFORMED, "the judge answered nothing")
    return content
