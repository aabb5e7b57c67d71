"""Warm start: demonstrations equal what a rollout would have recorded, and the policy learns them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.envs.frozen_lake import WORDS
from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.errors import ControlError
from offbeat.services.rollout.config import CustomEnv
from offbeat.trainer.config.actor_train import ModelArgs, TrainingArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.config.warm_start import WarmStartConfig
from offbeat.trainer.engines.base import Hyperparameters, LossFunction, StepOutcome
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.warm_start.demonstrations import (
    ChatMessageDict,
    load_demos,
    make_conversation_sampler,
    make_text_demonstrator,
    pack_demonstrations,
    tokenize,
)
from offbeat.trainer.warm_start.factory import make_demonstrator
from offbeat.trainer.warm_start.train import warm_start
from tests.trainer.plain_engine import PlainEngine

ENV = CustomEnv(env_type="frozen_lake", max_steps=4, env_config={"size": 4, "p": 0.7})
WARM = WarmStartConfig(
    demos="offbeat.envs.frozen_lake.demos:careful_wandering", tag="lake", steps=6, episodes_per_step=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_tiny_policy(path, TinyPolicyConfig(num_hidden_layers=1), WORDS)
    return path


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    return load_chat_format(folder)


def engine(folder: Path) -> PlainEngine:
    return PlainEngine(load_policy(folder, ModelArgs(), seed=1))


def run(
    engine: PlainEngine, chat: ChatFormat, *, seed: int = 1, max_tokens: int = 512, config: WarmStartConfig = WARM
) -> float:
    demonstrate = make_demonstrator(config, ENV, chat, max_tokens=max_tokens)
    loss = warm_start(engine, config, demonstrate, seed=seed, limits=TrainingArgs(), progress=lambda *_: None)
    assert loss is not None
    return loss


def conversations(env: CustomEnv, count: int = 1) -> list[list[ChatMessageDict]]:
    sample, rng = make_conversation_sampler(load_demos(WARM), env), np.random.default_rng(0)
    return [messages for _ in range(count) for messages in sample(rng)]


def test_demonstrations_are_tokenized_as_the_chat_template_renders_them(folder: Path, chat: ChatFormat) -> None:
    from transformers import AutoTokenizer

    (messages,) = conversations(ENV)
    demo = tokenize(chat, messages)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(messages, return_dict=False)
    assert demo.tokens.tolist() == rendered[: len(demo.tokens)]
    assert tokenizer.decode(rendered[len(demo.tokens) :]).strip() == ""
    first = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
    assert demo.learned.tolist() == list(range(len(first), len(demo.tokens)))


def test_the_loss_covers_everything_after_the_first_prompt(chat: ChatFormat) -> None:
    episodes = conversations(ENV, 3)
    demos = [tokenize(chat, messages) for messages in episodes]
    x = pack_demonstrations(demos)
    start = 0
    expected: list[int] = []
    for demo, (system, first, *_) in zip(demos, episodes, strict=True):
        prompt = chat.first_prompt(system["content"], first["content"])
        expected += range(start + len(prompt), start + len(demo.tokens))
        start += len(demo.tokens)
    assert x.positions.tolist() == expected


def test_demonstrations_use_the_tags_turn_limit_and_templates() -> None:
    env = ENV.model_copy(
        update={"max_steps": 2, "agent_system_template": "Avoid O", "agent_template": "G {observation}"}
    )
    (messages,) = conversations(env)
    assert messages[0] == {"role": "system", "content": "Avoid O"}
    assert messages[1]["content"].startswith("G ")
    assert sum(message["role"] == "assistant" for message in messages) <= 2


def test_step_wise_demonstrations_render_turns_as_a_rollout_does() -> None:
    (episode,) = conversations(ENV)
    observations, answers = [m["content"] for m in episode[1::2]], [m["content"] for m in episode[2::2]]
    stepwise = ENV.model_copy(
        update={
            "env_manager_cls": "StepEnvManager",
            "history_length": 1,
            "agent_template": "{history}|{step}|{actions_left}|{observation}",
        }
    )
    steps = conversations(stepwise)
    assert len(steps) == len(observations) > 1
    for i, (head, user, answer) in enumerate(steps):
        history = f"{observations[i - 1]}\n{answers[i - 1]}" if i else ""
        assert head == episode[0]
        assert user == {"role": "user", "content": f"{history}|{i + 1}|{4 - i}|{observations[i]}"}
        assert answer == {"role": "assistant", "content": answers[i]}


def test_concat_demonstrations_render_the_history_as_one_observation() -> None:
    (episode,) = conversations(ENV)
    concat = ENV.model_copy(update={"env_manager_cls": "StepConcatEnvManager"})
    steps = conversations(concat)
    assert [messages[1]["content"] for messages in steps] == [
        "\n".join(m["content"] for m in episode[1 : 2 + 2 * i]) for i in range(len(steps))
    ]


def test_the_policy_learns_the_demonstrations(folder: Path, chat: ChatFormat) -> None:
    learner = engine(folder)
    longer = WARM.model_copy(update={"steps": 60})
    assert run(learner, chat, config=WARM.model_copy(update={"steps": 1}), seed=2) > 2.0
    assert run(learner, chat, config=longer) < 1.2
    assert learner.resets == 2


def test_the_loss_is_per_token_whatever_the_number_of_processes(folder: Path, chat: ChatFormat) -> None:
    class FirstOfTwo(PlainEngine):
        """Rank 0 of two: computes every other micro-batch."""

        data_size = 2

        def train(
            self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
        ) -> StepOutcome:
            return super().train(batch[::2], loss, hyperparameters)

    (messages,) = conversations(ENV)
    demo = tokenize(chat, messages)
    config = WARM.model_copy(update={"steps": 1})
    alone, half = (
        warm_start(
            kind(load_policy(folder, ModelArgs(), seed=1)),
            config,
            lambda _: [demo, demo],
            seed=1,
            limits=TrainingArgs(),
            progress=lambda *_: None,
        )
        for kind in (PlainEngine, FirstOfTwo)
    )
    assert half == pytest.approx(alone)


def test_the_seed_alone_determines_the_weights(folder: Path, chat: ChatFormat) -> None:
    engines = [engine(folder), engine(folder), engine(folder)]
    for learner, seed in zip(engines, (1, 1, 2), strict=True):
        run(learner, chat, seed=seed)
    one, same, other = (learner.module.state_dict()["model.model.norm.weight"] for learner in engines)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_long_demonstrations_are_truncated(folder: Path, chat: ChatFormat) -> None:
    learner = engine(folder)
    run(learner, chat, max_tokens=60)
    assert max(int(x.packing.max_len) for batch in learner.seen for x in batch) == 60
    with pytest.raises(ValueError, match="first prompt alone"):
        run(learner, chat, max_tokens=10)


@pytest.mark.parametrize("data_size", [1, 2])
def test_passes_are_bounded_as_in_training(folder: Path, chat: ChatFormat, data_size: int) -> None:
    class Copies(PlainEngine):
        pass

    Copies.data_size = data_size
    (messages,) = conversations(ENV)
    demo = tokenize(chat, messages)
    length = len(demo.tokens)
    learners = [Copies(load_policy(folder, ModelArgs(), seed=1)) for _ in range(2)]
    losses = [
        warm_start(
            learner,
            WARM.model_copy(update={"steps": 1}),
            lambda _: [demo] * 5,
            seed=1,
            limits=TrainingArgs(max_tokens_per_microbatch=budget),
            progress=lambda *_: None,
        )
        for learner, budget in zip(learners, (2 * length + 1, 100 * length), strict=True)
    ]
    assert max(len(x.tokens) for x in learners[0].seen[0]) == 2 * length
    assert [len(learner.seen[0]) for learner in learners] == [{1: 5, 2: 6}[data_size], data_size]
    assert losses[0] == pytest.approx(losses[1])
    states = [learner.module.state_dict()["model.model.norm.weight"] for learner in learners]
    torch.testing.assert_close(*states)


def test_a_gradient_that_stays_infinite_ends_the_warm_start(folder: Path, chat: ChatFormat) -> None:
    class Overflowing(PlainEngine):
        """Applies every third step."""

        def train(
            self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
        ) -> StepOutcome:
            outcome = super().train(batch, loss, hyperparameters)
            return outcome if len(self.rates) % 3 == 0 else StepOutcome(False, math.inf)

    (messages,) = conversations(ENV)
    demo = tokenize(chat, messages)

    def train(max_skipped_steps: int) -> Overflowing:
        learner = Overflowing(load_policy(folder, ModelArgs(), seed=1))
        limits = TrainingArgs(max_skipped_steps=max_skipped_steps)
        warm_start(learner, WARM, lambda _: [demo], seed=1, limits=limits, progress=lambda *_: None)
        return learner

    assert len(train(3).rates) == WARM.steps
    with pytest.raises(
        ControlError, match=r"2 consecutive steps, up to step 2 \(loss .*\): lower warm_start.learning_rate"
    ):
        train(2)


def test_warm_start_stops_between_steps(folder: Path, chat: ChatFormat) -> None:
    learner = engine(folder)
    result = warm_start(
        learner,
        WARM,
        make_demonstrator(WARM, ENV, chat, max_tokens=512),
        seed=1,
        limits=TrainingArgs(),
        progress=lambda *_: None,
        should_stop=lambda: len(learner.rates) == 2,
    )
    assert result is None
    assert len(learner.rates) == 2


@pytest.mark.parametrize("roles", [["system", "user"], ["user", "user", "assistant"], ["assistant", "user"]])
def test_roles_that_do_not_alternate_are_rejected(chat: ChatFormat, roles: list[str]) -> None:
    with pytest.raises(ValueError, match="must alternate"):
        tokenize(chat, [{"role": role, "content": "G"} for role in roles])


def test_missing_demos_function_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no attribute 'nothing'"):
        load_demos(WARM.model_copy(update={"demos": "offbeat.envs.frozen_lake.demos:nothing"}))


def test_an_error_in_the_demos_function_is_named_with_its_place(chat: ChatFormat) -> None:
    def broken(*arguments: object) -> list[ChatMessageDict]:
        return [{"role": "user", "content": str(1 // len(arguments[2:]))}]

    sample = make_text_demonstrator(broken, ENV, chat, max_tokens=64)
    with pytest.raises(ValueError, match=r"warm_start.demos raised ZeroDivisionError: .* \(test_train.py, line \d+\)"):
        sample(np.random.default_rng(0))


def test_a_demonstration_without_messages_is_rejected(chat: ChatFormat) -> None:
    sample = make_text_demonstrator(lambda *_: [], ENV, chat, max_tokens=64)
    with pytest.raises(ValueError, match="returned no messages"):
        sample(np.random.default_rng(0))
