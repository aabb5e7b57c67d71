"""Concurrent episodes with plain transformers; a batch is the ready episodes.

Keys and values persist across turns; siblings share their prompt's.
"""

# pyright: basic
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.benchmarks.peer.trl_worker.chat import Chat
from offbeat.benchmarks.peer.trl_worker.job import Play
from offbeat.benchmarks.peer.trl_worker.kv_store import Store
from offbeat.envs import registry
from offbeat.envs.prompts import fill_template


@dataclass
class SlotEpisode:
    slot: int
    env: Any
    prompt: tuple[int, ...] = ()
    completion: list[int] = field(default_factory=list)
    """After the first prompt, the env's included."""
    sampled: list[int] = field(default_factory=list)
    """Loss mask of `completion`."""
    unread: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    success: bool = False

    def append_env_tokens(self, ids: Sequence[int]) -> None:
        self.completion += ids
        self.sampled += [0] * len(ids)
        self.unread += ids

    def append_sampled(self, token: int) -> None:
        self.completion.append(token)
        self.sampled.append(1)
        self.answer.append(token)
        self.unread.append(token)


class EpisodeRunner:
    def __init__(self, model: Any, chat: Chat, play: Play, num_slots: int) -> None:
        self._chat = chat
        self._play = play
        self._store = Store(model, num_slots, play.sequence_length)
        self._envs = [registry.make(play.env_type, play.env_config) for _ in range(num_slots)]
        self._pool = ThreadPoolExecutor(play.env_threads) if play.env_threads else None
        self._replies: queue.SimpleQueue[tuple[SlotEpisode, Any]] = queue.SimpleQueue()
        self._live: list[SlotEpisode] = []
        """By slot."""

    def first_message(self, task_seed: int) -> str:
        return self._message(self._envs[0].reset(seed=task_seed)[0], 0)

    def _message(self, observation: str, turns: int) -> str:
        remaining = self._play.max_turns - turns
        return fill_template(self._play.agent_template, observation=observation, step=turns + 1, actions_left=remaining)

    @torch.inference_mode()
    def run_episodes(self, task_seeds: Sequence[int], group_size: int = 1) -> list[SlotEpisode]:
        """Run `group_size` episodes per task; siblings are adjacent."""
        episodes = [SlotEpisode(slot, self._envs[slot]) for slot in range(len(task_seeds) * group_size)]
        self._live = list(episodes)
        self._store.clear()
        logits = self._begin(episodes, task_seeds, group_size)
        self._answer(episodes, logits)
        while self._live:
            ready = self._take_replies()
            if ready:
                self._answer(ready, self._read(ready))
        return episodes

    def _begin(self, episodes: Sequence[SlotEpisode], task_seeds: Sequence[int], group_size: int) -> Tensor:
        leaders = episodes[::group_size]
        for number, episode in enumerate(episodes):
            observation, _ = episode.env.reset(seed=task_seeds[number // group_size])
            episode.prompt = self._chat.first_prompt(self._message(observation, 0))
        logits = self._store.feed([episode.slot for episode in leaders], [episode.prompt for episode in leaders])
        if group_size > 1:
            for leader in leaders:
                self._store.copy(leader.slot, range(leader.slot + 1, leader.slot + group_size))
        return logits.repeat_interleave(group_size, 0)

    def _read(self, ready: Sequence[SlotEpisode]) -> Tensor:
        chunks = [episode.unread for episode in ready]
        logits = self._store.feed([episode.slot for episode in ready], chunks)
        for episode in ready:
            episode.unread = []
        return logits

    def _answer(self, ready: list[SlotEpisode], logits: Tensor) -> None:
        speaking = ready
        for place in range(self._play.max_new_tokens):
            if place:
                logits = self._read(speaking)
            for episode, token in zip(speaking, sample_tokens(logits), strict=True):
                episode.append_sampled(token)
            speaking = [episode for episode in speaking if episode.answer[-1] not in self._chat.stop_ids]
            if not speaking:
                break
        for episode in ready:
            text = self._chat.answer(tuple(episode.answer))
            if self._pool is None:
                self._replies.put((episode, episode.env.step(text)))
            else:
                self._pool.submit(self._step, episode, text)

    def _step(self, episode: SlotEpisode, text: str) -> None:
        try:
            self._replies.put((episode, episode.env.step(text)))
        except Exception as error:
            self._replies.put((episode, error))

    def _take_replies(self) -> list[SlotEpisode]:
        """Wait for an env; return all continuing episodes by slot."""
        least = len(self._live) if self._play.together else 1
        replies = [self._replies.get() for _ in range(least)]
        while not self._replies.empty():
            replies.append(self._replies.get())
        continuing = [episode for episode, reply in replies if self._continue_episode(episode, reply)]
        return sorted(continuing, key=lambda episode: episode.slot)

    def _continue_episode(self, episode: SlotEpisode, reply: Any) -> bool:
        if isinstance(reply, Exception):
            raise reply
        observation, reward, terminated, truncated, info = reply
        episode.turns += 1
        episode.reward += float(reward)
        episode.success = bool(info.get("success", False))
        chunk = self._chat.next_prompt(self._message(observation, episode.turns))
        ended = episode.answer[-1] == self._chat.end_id
        room = self._play.sequence_length - len(episode.prompt) - len(episode.completion) - len(chunk) - 2
        if terminated or truncated or episode.turns >= self._play.max_turns or room < self._play.max_new_tokens:
            self._leave(episode)
            return False
        episode.answer = []
        episode.append_env_tokens(chunk if ended else (self._chat.end_id, *chunk))
        return True

    def _leave(self, episode: SlotEpisode) -> None:
        """Move the last slot into the freed one."""
        last = self._live.pop()
        if last is not episode:
            self._store.copy(last.slot, [episode.slot])
            self._live[episode.slot], last.slot = last, episode.slot
        episode.slot = -1


def sample_tokens(logits: Tensor) -> list[int]:
    """Sample at temperature 1, [n, vocabulary] -> n tokens."""
    return torch.softmax(logits, -1).div_(torch.empty_like(logits).exponential_()).argmax(-1).tolist()
