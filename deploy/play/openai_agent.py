"""Agent behind an OpenAI-compatible endpoint."""

import base64
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from offbeat.deploy.play.agents import END, START
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import Completion, PromptImage, VersionSpan

API_KEY_VARIABLE = "OPENAI_API_KEY"
REQUEST_TIMEOUT_S = 300.0
MAX_ERROR_CHARS = 300


class OpenAISampler:
    """Answers of an endpoint, with zero logprobs."""

    def __init__(self, url: str, model: str, chat: ChatFormat, temperature: float | None) -> None:
        """url: base, such as `http://localhost:8000/v1`. model: empty for the first.

        Raises ValueError without an answer or model.
        """
        key = os.environ.get(API_KEY_VARIABLE, "")
        self._chat, self._temperature = chat, temperature
        self._http = httpx.Client(timeout=REQUEST_TIMEOUT_S, headers={"Authorization": f"Bearer {key}"} if key else {})
        self._url = url.rstrip("/")
        self.model = model or self._first_model()

    async def __call__(
        self, prompt: Sequence[int], max_tokens: int, images: tuple[PromptImage, ...] = ()
    ) -> Completion:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": parse_conversation(self._chat, tuple(prompt), images),
        }
        if self._temperature is not None:
            body["temperature"] = self._temperature
        answer = self._request("POST", "/chat/completions", body)
        try:
            content = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{self._url} did not return a chat completion: {str(answer)[:MAX_ERROR_CHARS]}"
            ) from error
        ids = (*self._chat.encode(content), self._chat.end_id)[:max_tokens]
        return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),))

    def _first_model(self) -> str:
        listed = self._request("GET", "/models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self._url} lists no model: name one with --model") from error

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            answer = self._http.request(method, self._url + path, json=body)
            if answer.is_error:
                raise ValueError(
                    f"{self._url}{path} answers {answer.status_code}: {answer.text[:MAX_ERROR_CHARS]}{self._hint(answer)}"
                )
            return answer.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self._url}{path} does not answer: {error}") from error

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
