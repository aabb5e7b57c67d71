"""Agent behind an OpenAI-compatible endpoint."""

import base64
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from offbeat.deploy.play.agents import END, START
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError, RetryableError
from offbeat.services.messages.types import Completion, FinishReason, PromptImage, VersionSpan
from offbeat.services.retry import retry_until_answered

API_KEY_VARIABLE = "OPENAI_API_KEY"
REQUEST_TIMEOUT_S = 300.0
PATIENCE_S = 120.0
"""With a busy or unavailable endpoint, for one answer."""
BUSY_STATUS = (408, 409, 429)
MAX_ERROR_CHARS = 300


class OpenAISampler:
    """Answers of an endpoint, with zero logprobs."""

    def __init__(
        self, url: str, model: str, chat: ChatFormat, *, stop: Sequence[str] = (), **sampling: float | None
    ) -> None:
        """url: base, such as `http://localhost:8000/v1`. model: empty for the first. stop: stop strings, which
        are part of an answer if the endpoint names the one that ended it, as vLLM does. sampling: further arguments of a
        request; None is the endpoint's default.

        Raises ValueError without an answer or model.
        """
        key = os.environ.get(API_KEY_VARIABLE, "")
        self._chat = chat
        self._sampling: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        if stop:
            self._sampling["stop"] = list(stop)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, headers=self._headers)
        self._url = url.rstrip("/")
        self.model = model or self._first_model()

    async def __call__(
        self, prompt: Sequence[int], max_tokens: int, images: tuple[PromptImage, ...] = ()
    ) -> Completion:
        """Raises EpisodeError without an answer; retries a busy endpoint."""
        messages = parse_conversation(self._chat, tuple(prompt), images)
        body: dict[str, Any] = {"model": self.model, "messages": messages, **self._sampling}
        try:
            answer = await retry_until_answered(lambda: self._ask(body), PATIENCE_S)
        except (ValueError, RetryableError) as error:
            raise EpisodeError("answer_error", str(error)) from error
        try:
            choice = answer["choices"][0]
            content = choice["message"]["content"] or ""
            if choice.get("stop_reason") in self._sampling.get("stop", ()):
                content += choice["stop_reason"]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EpisodeError(
                "answer_error", f"{self._url} did not return a chat completion: {str(answer)[:MAX_ERROR_CHARS]}"
            ) from error
        is_cut = choice.get("finish_reason") == "length"
        ids = (*self._chat.encode(content), *(() if is_cut else (self._chat.end_id,)))[:max_tokens]
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),), reason)

    async def close(self) -> None:
        await self._http.aclose()

    def _first_model(self) -> str:
        path = "/models"
        try:
            listed = self._read(path, httpx.get(self._url + path, headers=self._headers, timeout=REQUEST_TIMEOUT_S))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self._url}{path} does not answer: {error}") from error
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self._url} lists no model: name one with --model") from error

    async def _ask(self, body: dict[str, Any]) -> Any:
        path = "/chat/completions"
        try:
            answer = await self._http.post(self._url + path, json=body)
        except httpx.HTTPError as error:
            raise RetryableError(f"{self._url}{path} does not answer: {error or type(error).__name__}") from error
        if answer.status_code in BUSY_STATUS or answer.is_server_error:
            raise RetryableError(self._describe(path, answer))
        return self._read(path, answer)

    def _read(self, path: str, answer: httpx.Response) -> Any:
        if answer.is_error:
            raise ValueError(self._describe(path, answer))
        return answer.json()

    def _describe(self, path: str, answer: httpx.Response) -> str:
        return f"{self._url}{path} answers {answer.status_code}: {answer.text[:MAX_ERROR_CHARS]}{self._hint(answer)}"

    def _hint(self, answer: httpx.Response) -> str:
        return f" (the key is read from {API_KEY_VARIABLE})" if answer.status_code in (401, 403) else ""


def parse_conversation(
    chat: ChatFormat, prompt: tuple[int, ...], images: Sequence[PromptImage] = ()
) -> list[dict[str, Any]]:
    """Parse a byte-level ChatML prompt into OpenAI's messages."""
    pngs = {image.start: image.png for image in images}
    messages: list[dict[str, Any]] = []
    start = 0
    for position, token in enumerate(prompt):
        if (text := chat.token_text(token)) == START:
            start = position + 1
        elif text == END:
            image_positions = [at for at in pngs if start <= at < position]
            role, _, content = chat.answer(prompt[start : min(image_positions, default=position)]).partition("\n")
            messages.append({"role": role, "content": content})
            if image_positions:
                borders = [*image_positions, position]
                texts = [chat.answer(prompt[at + 1 : end]) for at, end in pairwise(borders)]
                messages[-1]["content"] = _build_parts(content, [pngs[at] for at in image_positions], texts)
    return messages


def _build_parts(content: str, pngs: Sequence[bytes], texts: Sequence[str]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": content}]
    for png, text in zip(pngs, texts, strict=True):
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [part for part in parts if part["type"] != "text" or str(part["text"]).strip()]
