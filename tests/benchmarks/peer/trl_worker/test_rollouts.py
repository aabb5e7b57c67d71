"""The part of TRL's side that knows no TRL: it must be as good as a best user's, and play exactly the same game."""

# pyright: basic
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.benchmarks.peer.trl_worker.chat import Chat
from offbeat.benchmarks.peer.trl_worker.job import Play
from offbeat.benchmarks.peer.trl_worker.kv_store import Store
from offbeat.benchmarks.peer.trl_worker.rollouts import EpisodeRunner
from offbeat.envs import registry
from offbeat.envs.frozen_lake.env import SYSTEM_PROMPT
from offbeat.services.chat.append_only import load_chat_format

LAKE = {"size": 4, "p": 0.7}
SLOW = {"latency": {"distribution": "lognormal", "mean_s": 0.002, "std_s": 0.004}}


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return Chat(AutoTokenizer.from_pretrained(folder), SYSTEM_PROMPT)


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def rules(**changes: object) -> Play:
    values: dict[str, object] = {
        "env_type": "frozen_lake",
        "env_config": LAKE,
        "system_prompt": SYSTEM_PROMPT,
        "agent_template": "{observation}",
        "max_turns": 5,
        "max_new_tokens": 3,
        "sequence_length": 256,
        "env_threads": 0,
    }
    return Play(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def test_both_sides_see_the_same_tokens(folder: Path, chat: Chat) -> None:
    ours = load_chat_format(folder)
    observation = registry.make("frozen_lake", LAKE).reset(seed=3)[0]
    later = "1 0 Left # Down _ Right O Up _"
    assert chat.first_prompt(observation) == ours.first_prompt(SYSTEM_PROMPT, observation)
    assert chat.next_prompt(later) == ours.next_prompt(later)
    assert chat.stop_ids == set(ours.stop_ids)


def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0, -1].float()


@torch.inference_mode()
def test_cached_tokens_give_the_logits_of_one_forward_pass(model: torch.nn.Module) -> None:
    store = Store(model, 4, 64)
    read: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
    rounds = [
        {0: [5, 6, 7], 2: [8, 9, 10, 11]},  # ragged, apart
        {0: [4], 1: [12, 13], 2: [14, 15, 16]},  # at different places
        {0: [3], 1: [3], 2: [3], 3: [3]},  # all slots, ragged pasts
        {1: [7, 8]},  # one alone
    ]
    for chunks in rounds:
        logits = store.feed(list(chunks), list(chunks.values()))
        for place, (slot, chunk) in enumerate(chunks.items()):
            read[slot] += chunk
            torch.testing.assert_close(logits[place], logits_of(model, read[slot]), rtol=1e-5, atol=1e-6)
    assert store.lengths == [len(read[slot]) for slot in range(4)]


@torch.inference_mode()
def test_a_slot_continues_from_a_copy(model: torch.nn.Module) -> None:
    store = Store(model, 3, 64)
    store.feed([0], [[5, 6, 7, 8]])
    store.copy(0, [1, 2])
    logits = store.feed([0, 1, 2], [[9], [10], [11]])
    for slot, token in enumerate((9, 10, 11)):
        torch.testing.assert_close(logits[slot], logits_of(model, [5, 6, 7, 8, token]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "env_threads": 12,
            "env_type": "offbeat.benchmarks.harness.slow_lake:SlowLake",
            "env_config": {**LAKE, **SLOW},
        },
        {
            "env_threads": 12,
            "env_type": "offbeat.benchmarks.harness.slow_lake:SlowLake",
            "env_config": {**LAKE, **SLOW},
            "together": True,
        },
    ],
    ids=["instant", "who is ready", "all together"],
)
def test_replaying_recorded_answers_gives_the_recorded_reward(
    model: torch.nn.Module, chat: Chat, changes: dict[str, object]
) -> None:
    torch.manual_seed(1)
    episodes = EpisodeRunner(model, chat, rules(**changes), 12).run_episodes([11, 12, 13], group_size=4)
    assert len(episodes) == 12
    for number, episode in enumerate(episodes):
        env = registry.make("frozen_lake", LAKE)
        observation, _ = env.reset(seed=(11, 12, 13)[number // 4])
        assert episode.prompt == chat.first_prompt(observation)
        assert episode.sampled[0] == episode.sampled[-1] == 1
        reward = 0.0
        for answer in answers_of(episode.completion, episode.sampled):
            reward += float(env.step(chat.answer(answer))[1])
        assert reward == pytest.approx(episode.reward)


def answers_of(completion: list[int], sampled: list[int]) -> list[tuple[int, ...]]:
    """Runs of sampled tokens."""
    answers: list[list[int]] = []
    for before, token, mine in zip([0, *sampled], completion, sampled, strict=False):
        if mine and not before:
            answers.append([])
        if mine:
            answers[-1].append(token)
    return [tuple(answer) for answer in answers]


def test_siblings_start_alike_and_go_their_own_ways(model: torch.nn.Module, chat: Chat) -> None:
    torch.manual_seed(2)
    episodes = EpisodeRunner(model, chat, rules(), 8).run_episodes([21], group_size=8)
    assert len({each.prompt for each in episodes}) == 1
    assert len({tuple(each.completion) for each in episodes}) > 1


def test_an_env_error_ends_the_rollout(model: torch.nn.Module, chat: Chat) -> None:
    player = EpisodeRunner(model, chat, rules(env_threads=2), 2)

    def broken(_: str) -> None:
        raise RuntimeError("the ice broke")

    for env in player._envs:
        env.step = broken  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match="the ice broke"):
        player.run_episodes([1, 2])
