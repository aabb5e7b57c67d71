"""Judges: language models behind an OpenAI-compatible API."""

import asyncio
from typing import Any

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.config import LlmJudgeConfig
from offbeat.services.reward.kinds.http import JsonClient
from offbeat.services.reward.kinds.judge_verdicts import Question, build_verdict
from offbeat.services.reward.sample import RewardSample, final_text, images_of


class LlmJudge:
    def __init__(self, config: LlmJudgeConfig) -> None:
        """Raises ValueError without the key's variable."""
        self._config = config
        self._verdict = build_verdict(config)
        self._client = JsonClient(config.timeout_s, 2 * config.max_concurrent, config.api_key_env)

    async def score(self, sample: RewardSample) -> float:
        questions = self._verdict.ask(sample)
        values = await asyncio.gather(*(self._answer(question, sample) for question in questions))
        return sum(values) / len(values)

    async def close(self) -> None:
        await self._client.close()

    async def _answer(self, question: Question, sample: RewardSample) -> float:
        c = self._config
        system = [] if c.system_prompt is None else [{"role": "system", "content": c.system_prompt}]
        body = {
            "model": c.model,
            "messages": [*system, {"role": "user", "content": self._content(question, sample)}],
            "temperature": c.temperature,
            "max_tokens": c.max_tokens,
            **c.extra_body,
        }
        reply = await self._client.post(f"{c.url.rstrip('/')}/chat/completions", body)
        return self._verdict.read(final_text(_text_of(reply)), question, sample)

    def _content(self, question: Question, sample: RewardSample) -> str | list[Any]:
        images = images_of(sample.prompt) if self._config.sees_images else []
        return [*images, {"type": "text", "text": question.prompt}] if images else question.prompt


def _text_of(reply: Any) -> str:
    """Return the answer's text; raises RewardError if missing or cut."""
    try:
        choice = reply["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RewardError(Failure.MALFORMED, f"the judge's reply has no message: {str(reply)[:200]}") from None
    if reason == "length":
        raise RewardError(Failure.MALFORMED, "the judge's answer reached max_tokens: raise it")
    if not isinstance(content, str) or not content.strip():
        raise RewardError(Failure.MALFORMED, "the judge answered nothing")
    return content
