"""Opponents in games of several seats (`opponents` of `env_type: pettingzoo`); they see each position alone."""

import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from offbeat.deploy.play.agents import load_chat
from offbeat.deploy.play.policy import PromptRequest, SamplingParams, TransformersPolicy, policy_folder
from offbeat.services.chat.append_only import ChatFormat


class ChatOpponent:
    """Model behind an OpenAI-compatible URL."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        temperature: float = 1.0,
        max_tokens: int = 64,
        timeout_s: float = 60.0,
        api_key_env: str = "",
    ) -> None:
        """api_key_env: environment variable of a bearer token; raises KeyError without it."""
        headers = {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}
        self._http = httpx.Client(base_url=f"{base_url.rstrip('/')}/", timeout=timeout_s, headers=headers)
        self._body: dict[str, Any] = {"model": model, "temperature": temperature, "max_tokens": max_tokens}

    def __call__(self, system_prompt: str, observation: str, rng: np.random.Generator) -> str:
        """Answer; raises httpx.HTTPError, which fails the episode."""
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": observation}]
        body = {**self._body, "messages": messages, "seed": int(rng.integers(2**31))}
        answer = self._http.post("chat/completions", json=body).raise_for_status().json()
        return answer["choices"][0]["message"]["content"] or ""


class CheckpointOpponent:
    """Policy of a model folder, checkpoint or run, on the CPU; a process loads it once."""

    def __init__(self, path: str, *, temperature: float = 1.0, max_tokens: int = 64) -> None:
        """Raises ConfigError if there is no model."""
        self._folder = policy_folder(Path(path))
        self._params = SamplingParams(temperature, 1.0, 0)
        self._max_tokens = max_tokens

    def __call__(self, system_prompt: str, observation: str, rng: np.random.Generator) -> str:
        policy, chat, lock = _load(self._folder)
        prompt = PromptRequest(chat.first_prompt(system_prompt, observation), self._max_tokens)
        with lock:
            policy.seed(int(rng.integers(2**31)))
            (completion,) = policy.complete([prompt], self._params)
        return chat.answer(completion.token_ids)


@lru_cache(maxsize=4)
def _load(folder: Path) -> tuple[TransformersPolicy, ChatFormat, threading.Lock]:
    chat = load_chat(folder)
    return TransformersPolicy(folder, chat.stop_ids, seed=0), chat, threading.Lock()
