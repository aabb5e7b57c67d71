"""Episodes under templates that rewrite history, and step-wise ones: segments as the engine saw them, each token once."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from offbeat.envs.frozen_lake import WORDS
from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.errors import RolloutError
from offbeat.services.messages.types import Completion, Group, RoutingArray, Segment, Trajectory, VersionSpan
from offbeat.services.rollout.episodes.recorder import AppendOnlyRecorder, RerenderedRecorder, TurnMessage
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.data.batch import pack
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.services.rollout.episodes.test_episode import (
    WAY,
    Player,
    conversation_of,
    saying,
)

DROPS_THOUGHTS = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% set words = m.content.split('</think>')[-1] if m.role == 'assistant' and loop.index0 < ns.last else m.content %}"
    "{{ '<|im_start|>' + m.role + '\\n' + words + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3's: thoughts of answers that a user message follows are left out."""


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that knows the words of thoughts, and a template that forgets them."""
    folder = tmp_path_factory.mktemp("thinking")
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=1), (*WORDS, "<think>", "</think>", "hm"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": DROPS_THOUGHTS}))
    return folder


@pytest.fixture(scope="module")
def forgetful(thinking: Path) -> ChatFormat:
    return load_chat_format(thinking)


def sampled(segment: Segment) -> list[int]:
    return segment.tokens[segment.loss_mask].tolist()


async def played(chat: ChatFormat, tokenizer: Tokenizer, *answers: str, **rules: Any) -> tuple[Player, Trajectory]:
    player = Player(chat, saying(tokenizer, *answers))
    return player, await player.play(max_tokens_per_step=8, max_steps=3, **rules)


def test_a_template_that_drops_thoughts_is_found_out_when_it_is_loaded(forgetful: ChatFormat, chat: ChatFormat) -> None:
    assert "not append-only" in forgetful.rewrites
    assert (chat.rewrites, chat.rewriting) == ("", None)
    with pytest.raises(RolloutError, match="not append-only"):
        forgetful.next_prompt("P G")


async def test_turns_with_thoughts_are_segments_as_the_engine_saw_them(forgetful: ChatFormat, thinking: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(thinking).backend_tokenizer
    thoughts = [f"<think> hm hm </think> {answer}" for answer in ("Right", "Down", "Left")]
    player, got = await played(
        forgetful, tokenizer, *thoughts, agent_system_template="Walk .", env_config={"action_pattern": "</think> (.*)"}
    )
    messages, rewards = conversation_of(["Right", "Down", "Left"])
    messages[0]["content"] = "Walk ."
    render = load_tokenizer(thinking).apply_chat_template
    assert len(got.segments) == len(got.turns) == 3
    for number, (turn, segment) in enumerate(zip(got.turns, got.segments, strict=True)):
        history = [dict(message) for message in messages[: 2 + 2 * number]]
        text = render(history, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        assert player.prompts[number] == tuple(prompt) == tuple(segment.tokens[: len(prompt)].tolist())
        assert tokenizer.decode(sampled(segment)) == thoughts[number]
        assert (turn.segment, turn.start, turn.end) == (number, len(prompt), len(segment.tokens))
    assert [turn.reward for turn in got.turns] == rewards[:3]
    assert len({turn.state_hash for turn in got.turns}) > 1
    assert got.metrics["segments"] == 3


async def test_answers_without_thoughts_stay_one_sequence(
    forgetful: ChatFormat, thinking: Path, chat: ChatFormat, tokenizer: Tokenizer
) -> None:
    words: Tokenizer = load_tokenizer(thinking).backend_tokenizer
    _, got = await played(forgetful, words, *WAY)
    _, plain = await played(chat, tokenizer, *WAY)
    assert len(got.segments) == 1
    assert words.decode(got.segments[0].tokens.tolist()) == tokenizer.decode(plain.segments[0].tokens.tolist())
    assert got.turns == plain.turns


async def test_a_step_wise_prompt_contains_the_configured_history(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    template = "{history} _ {observation}"
    player, got = await played(
        chat, tokenizer, *WAY, env_manager_cls="StepEnvManager", history_length=1, agent_template=template
    )
    messages, _ = conversation_of(list(WAY[:3]))
    observations = [message["content"] for message in messages if message["role"] == "user"]
    for turn in range(3):
        history = f"{observations[turn - 1]}\n{WAY[turn - 1]}" if turn else ""
        expected = chat.first_prompt(messages[0]["content"], f"{history} _ {observations[turn]}")
        assert player.prompts[turn] == expected
        assert got.segments[turn].tokens.tolist() == [*expected, *sampled(got.segments[turn])]
    assert [turn.segment for turn in got.turns] == [0, 1, 2]


async def test_step_concat_shows_everything_so_far_as_one_observation(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    player, got = await played(chat, tokenizer, *WAY, env_manager_cls="StepConcatEnvManager")
    messages, _ = conversation_of(list(WAY[:3]))
    observations = [message["content"] for message in messages if message["role"] == "user"]
    observation = f"{observations[0]}\n{WAY[0]}\n{observations[1]}\n{WAY[1]}\n{observations[2]}"
    assert player.prompts[2] == chat.first_prompt(messages[0]["content"], observation)
    assert len(got.segments) == 3


async def test_the_learner_counts_an_episode_of_segments_once(forgetful: ChatFormat, thinking: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(thinking).backend_tokenizer
    _, got = await played(forgetful, tokenizer, "<think> hm </think> Right", "<think> hm </think> Down")
    batch = pack([Group("0-0", "g", 0, got.tag, 0, 0, (got,))])
    assert (batch.num_trajectories, batch.num_sequences) == (1, 3)
    assert batch.num_sampled == got.num_sampled == sum(turn.end - turn.start for turn in got.turns)
    assert batch.last.sum() == 1
    assert float(batch.turn_reward.sum()) == pytest.approx(got.reward)


def rows(count: int, value: int) -> RoutingArray:
    return np.full((count, 1, 1), value, dtype=np.uint8)


@pytest.mark.parametrize("is_rendered_again", [False, True])
def test_tokens_keep_the_experts_of_the_turn_that_first_computed_them(
    is_rendered_again: bool, chat: ChatFormat, forgetful: ChatFormat
) -> None:
    """A later turn returns the experts of all tokens before it, which newer weights may have chosen."""
    assert forgetful.rewriting is not None
    recorder = RerenderedRecorder(forgetful.rewriting, "") if is_rendered_again else AppendOnlyRecorder(chat, "")
    spoken = forgetful if is_rendered_again else chat
    answer = (*spoken.encode("up"), spoken.end_id)
    lengths: list[int] = []
    for value in (1, 2):
        prompt, _ = recorder.ask(TurnMessage("left"))
        lengths.append(len(prompt) + len(answer) - 1)
        spans = (VersionSpan(0, len(answer), value),)
        completion = Completion("r", answer, (-1.0,) * len(answer), spans, routing=rows(lengths[-1], value))
        recorder.add_completion(completion)
        recorder.add_reward(0.0, "")
    (segment,) = recorder.record().segments
    assert segment.routing is not None
    assert len(segment.routing) == len(segment.tokens) - 1
    assert segment.routing[:, 0, 0].tolist() == [1] * lengths[0] + [2] * (lengths[1] - lengths[0])


@pytest.mark.parametrize("is_rendered_again", [False, True])
def test_the_experts_of_an_episode_are_held_once(
    is_rendered_again: bool, chat: ChatFormat, forgetful: ChatFormat
) -> None:
    """A view of a turn's rows would keep those of its whole prompt, and memory would grow with the square of the turns."""
    assert forgetful.rewriting is not None
    recorder = RerenderedRecorder(forgetful.rewriting, "") if is_rendered_again else AppendOnlyRecorder(chat, "")
    spoken = forgetful if is_rendered_again else chat
    answer = (*spoken.encode("up"), spoken.end_id)
    for value in range(20):
        prompt, _ = recorder.ask(TurnMessage("left"))
        spans, length = (VersionSpan(0, len(answer), 1),), len(prompt) + len(answer) - 1
        recorder.add_completion(Completion("r", answer, (-1.0,) * len(answer), spans, routing=rows(length, value)))
        recorder.add_reward(0.0, "")
    held = sum(array.nbytes for array in owned_arrays(recorder) if array.dtype == np.uint8)
    (segment,) = recorder.record().segments
    assert segment.routing is not None
    assert set(segment.routing[:, 0, 0].tolist()) == set(range(20))
    assert held == segment.routing.nbytes == len(segment.tokens) - 1


def owned_arrays(root: object) -> Iterator[np.ndarray]:
    """Yield the arrays that an object keeps in memory, those behind views among them."""
    seen: dict[int, object] = {}
    left = [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen[id(each)] = each
        if isinstance(each, np.ndarray) and each.base is None:
            yield each
        left += [each.base] if isinstance(each, np.ndarray) else gc.get_referents(each)
