from functools import lru_cache
from typing import Any

USER, ANSWER, NEXT = "peer0user", "peer1answer", "peer2next"
"""Placeholders while the template is split."""


class Chat:
    """Token pieces of an append-only template; answers end with a special token."""

    def __init__(self, tokenizer: Any, system_prompt: str) -> None:
        self._tokenizer = tokenizer
        self._system = [{"role": "system", "content": system_prompt}]
        short = self._render([*self._system, _user(USER)])
        long = self._render([*self._system, _user(USER), {"role": "assistant", "content": ANSWER}, _user(NEXT)])
        self._head, _, self._tail = long.removeprefix(short + ANSWER).partition(NEXT)
        self.end_id: int = self._ids(self._head)[0]
        self.stop_ids = {self.end_id, tokenizer.eos_token_id}
        self.pad_id: int = self.end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.next_prompt = lru_cache(65_536)(self._next_prompt)
        self.first_prompt = lru_cache(4_096)(self._first_prompt)
        self.answer = lru_cache(65_536)(self._answer)

    def messages(self, observation: str) -> list[dict[str, str]]:
        """Return the prompt in TRL's form."""
        return [*self._system, _user(observation)]

    def _first_prompt(self, observation: str) -> tuple[int, ...]:
        return self._ids(self._render(self.messages(observation)))

    def _next_prompt(self, observation: str) -> tuple[int, ...]:
        """Return the ids between an answer's end-of-turn token (excluded) and the next answer."""
        return self._ids(self._head + observation + self._tail)[1:]

    def _answer(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
