"""Agent that uses a model behind any OpenAI-compatible chat completions endpoint."""

import base64
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from offbeat.deploy.play.agents import END, START
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import Completion, Picture, VersionSpan

KEY = "OPENAI_API_KEY"
PATIENCE_S = 300.0
TOLD = 300
"""Maximum number of characters of an endpoint's error that are shown."""


class AskedAnswers:
    """Asks an endpoint for each answer; its text becomes tokens with zero logprobs."""

    def __init__(self, url: str, model: str, chat: ChatFormat, temperature: float | None) -> None:
        """url: the API's base, `http://localhost:8000/v1`. model: empty takes the first that the endpoint lists.

        chat: of bytes (`chat_of(None)`), whose prompts can be read back.

        Raises:
            ValueError: the endpoint does not answer, or lists no model.
        """
        key = os.environ.get(KEY, "")
        self._chat, self._temperature = chat, temperature
        self._http = httpx.Client(timeout=PATIENCE_S, headers={"Authorization": f"Bearer {key}"} if key else {})
        self._url = url.rstrip("/")
        self.model = model or self._first_model()

    async def __call__(self, prompt: Sequence[int], most: int, pictures: tuple[Picture, ...] = ()) -> Completion:
        body: dict[str, Any] = {"model": self.model, "messages": conversation_of(self._chat, tuple(prompt), pictures)}
        if self._temperature is not None:
            body["temperature"] = self._temperature
        answer = self._ask("POST", "/chat/completions", body)
        try:
            words = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self._url} answers what is no chat completion: {str(answer)[:TOLD]}") from error
        ids = (*self._chat.encode(words), self._chat.end_id)[:most]
        return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),))

    def _first_model(self) -> str:
        listed = self._ask("GET", "/models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self._url} lists no model: name one with --model") from error

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            answer = self._http.request(method, self._url + path, json=body)
            if answer.is_error:
                raise ValueError(
                    f"{self._url}{path} answers {answer.status_code}: {answer.text[:TOLD]}{self._hint(answer)}"
                )
            return answer.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self._url}{path} does not answer: {error}") from error

    def _hint(self, answer: httpx.Response) -> str:
        return f" (the key is read from {KEY})" if answer.status_code in (401, 403) else ""


def conversation_of(
    chat: ChatFormat, prompt: tuple[int, ...], pictures: Sequence[Picture] = ()
) -> list[dict[str, Any]]:
    """Return the messages of a byte-level ChatML prompt, without its generation prompt.

    pictures: the prompt's images; a message with images is a list of parts, as in OpenAI's API.
    """
    shown = {picture.start: picture.png for picture in pictures}
    messages: list[dict[str, Any]] = []
    begun = 0
    for place, token in enumerate(prompt):
        if (text := chat.token_text(token)) == START:
            begun = place + 1
        elif text == END:
            within = [at for at in shown if begun <= at < place]
            role, _, words = chat.answer(prompt[begun : min(within, default=place)]).partition("\n")
            messages.append({"role": role, "content": words})
            if within:
                borders = [*within, place]
                texts = [chat.answer(prompt[at + 1 : end]) for at, end in pairwise(borders)]
                messages[-1]["content"] = _parts(words, [shown[at] for at in within], texts)
    return messages


def _parts(words: str, pngs: Sequence[bytes], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the text, then each image with the text after it; blank texts are left out."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": words}]
    for png, text in zip(pngs, texts, strict=True):
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [part for part in parts if part["type"] != "text" or str(part["text"]).strip()]
