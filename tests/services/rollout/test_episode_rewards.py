"""Episodes of envs and of agents, scored between the last token and submit."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import Tokenizer

from offbeat.envs.prompts import ROW_IMAGE
from offbeat.services.chat.messages import ChatMessage, ToolCall
from offbeat.services.chat.vision import encode_png
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, StopReason
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.sample import RewardSample
from offbeat.services.rollout.config import AgentRunner, CustomEnv, OnAgentError, OnEnvError
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.episodes.transcript import Transcript
from tests.fakes_rollout import HERE as FAKES
from tests.fakes_rollout import BadEnv, CountingEnv, FakeGeneration
from tests.services.reward.kinds.conftest import Service
from tests.services.rollout.worker_bench import custom, group

HERE = f"{__name__}:"
SEEN: list[RewardSample] = []


def count_answers(sample: RewardSample, per_answer: float = 1.0) -> float:
    SEEN.append(sample)
    answers = [message for message in sample.prompt if message["role"] == "assistant"]
    return per_answer * (len(answers) + 1)


def fail(sample: RewardSample) -> float:
    raise KeyError(sample.response)


COUNT = {"name": "answers", "kind": "function", "path": HERE + "count_answers", "weight": 0.5}
SAYS_LEFT = {"name": "left", "kind": "regex", "pattern": "Left"}


class TellingEnv(CountingEnv):
    """Tells rewards of its task, and at its end how it went."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"reward_row": {"ground_truth": "Left", "weights": np.array([1, 2])}}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        told = {"reward_row": {"steps": info["total"]}} if terminated else {}
        return observation, reward, terminated, truncated, {**info, **told}


class OddRowEnv(CountingEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return super().reset(seed=seed, options=options)[0], {"reward_row": {"file": object()}}


@pytest.fixture(autouse=True)
def _clean():
    SEEN.clear()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


def scored(env: CustomEnv, *rewards: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Changes of a worker's settings."""
    config = RewardsConfig.model_validate_json(json.dumps({"rewards": rewards}))
    return {"custom_envs": {"Count": env}, "rewards": config, **changes}


@pytest.fixture
def left(tokenizer: Tokenizer) -> FakeGeneration:
    return FakeGeneration(lambda _: (tokenizer.token_to_id("Left"), tokenizer.token_to_id("<|im_end|>")))


async def test_an_episodes_score_is_added_to_the_envs_reward_on_the_last_turn(bench, left):
    async with bench(*group(0), generation=left, **scored(custom("CountingEnv"), COUNT, SAYS_LEFT)) as b:
        await b.until_done(4)
    for played in b.buffer.submitted.values():
        assert [turn.reward for turn in played.turns] == [0.5, 0.5, 0.5 + 0.5 * 3 + 1.0]
        assert {name: value for name, value in played.metrics.items() if name.startswith("reward/")} == {
            "reward/answers": 3.0,
            "reward/left": 1.0,
        }
        assert (played.metrics["success"], played.text) == (1.0, ())
    sample = SEEN[0]
    first, second, third = (message["content"] for message in sample.prompt if message["role"] == "user")
    assert sample.prompt == [
        {"role": "system", "content": "Walk P to G ."},
        {"role": "user", "content": first},
        {"role": "assistant", "content": "Left"},
        {"role": "user", "content": second},
        {"role": "assistant", "content": "Left"},
        {"role": "user", "content": third},
    ]
    assert first.startswith("P ")
    assert (sample.response, sample.num_response_tokens, sample.tag) == ("Left", 2, "Count")
    assert (sample.ground_truth, sample.row) == (None, {})
    records = [record.values for record in b.metrics.records if record.labels.get("tag") == "Count"]
    assert sum(values["reward/answers"].count for values in records if "reward/answers" in values) == 4
    assert any("reward_s" in values for values in records)


@pytest.mark.parametrize("execution", ["inline", "process"])
async def test_an_env_tells_rewards_of_its_task(bench, left, execution: Literal["inline", "process"]):
    env = CustomEnv(env_type=HERE + "TellingEnv", max_steps=5, max_tokens_per_step=4, execution=execution)
    async with bench(*group(0, 1), generation=left, **scored(env, COUNT)) as b:
        await b.until_done(1)
    assert not b.buffer.failed
    (sample,) = SEEN
    assert (sample.ground_truth, dict(sample.row)) == ("Left", {"weights": [1, 2], "steps": 3})


async def test_a_row_that_is_not_plain_is_an_error_of_the_env(bench, left):
    env = CustomEnv(env_type=HERE + "OddRowEnv", max_steps=5, max_tokens_per_step=4, execution="inline")
    async with bench(*group(0, 1), generation=left, **scored(env, COUNT)) as b:
        await b.until_done(1)
        report = b.worker._outcomes.report()
    assert [reason for _, reason in b.buffer.failed] == ["reset_error"]
    assert "info['reward_row'] has a object" in report["error"]


async def test_a_question_is_judged_by_its_answer(bench, left, tmp_path: Path):
    rows = [{"question": "P", "answer": "Left", "level": 3}, {"question": "G", "answer": "Up", "level": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {"dataset_name": str(tmp_path / "rows.jsonl"), "split": "any"}
    env = CustomEnv(env_type="qa", env_config=config, max_steps=1, max_tokens_per_step=4, execution="inline")
    async with bench(*(task for n in range(8) for task in group(n, 1)), generation=left, **scored(env, COUNT)) as b:
        await b.until_done(8)
    told = {(sample.prompt[-1]["content"], sample.ground_truth, sample.row["level"]) for sample in SEEN}
    assert told == {("P", "Left", 3), ("G", "Up", 1)}


async def test_rewards_of_other_tags_leave_an_episode_alone(bench, left):
    changes = scored(custom("CountingEnv"), {**COUNT, "tags": ["Other"]})
    async with bench(*group(0), generation=left, **changes) as b:
        await b.until_done(4)
    assert {played.reward for played in b.buffer.submitted.values()} == {1.5}
    assert SEEN == []


async def test_a_step_wise_episode_is_read_without_the_history_in_its_prompts(bench, left):
    rules = {"env_manager_cls": "StepEnvManager", "agent_template": "{history} P {observation}", "history_length": 2}
    async with bench(*group(0, 1), generation=left, **scored(custom("CountingEnv", **rules), COUNT)) as b:
        await b.until_done(1)
    (played,) = b.buffer.submitted.values()
    assert (len(played.segments), played.turns[-1].reward) == (3, 2.0)
    (sample,) = SEEN
    shown = [message["content"] for message in sample.prompt if message["role"] == "user"]
    assert [text.startswith(("P ", "_ ")) for text in shown] == [True] * 3
    assert [message["role"] for message in sample.prompt] == ["system", *("user", "assistant") * 2, "user"]


class SilentEnv(CountingEnv):
    """Reports no success."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {key: info[key] for key in info if key != "success"}


class BreakingEnv(BadEnv):
    """Fails before it reports success."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {}


class SolvedEnv(CountingEnv):
    """Reports success at its end alone."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        own = {"success": True} if terminated else {}
        return observation, reward, terminated, truncated, {"total": info["total"], **own}


class ImpatientEnv(SilentEnv):
    """Cuts its episodes."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, False, terminated, info


SAYS_RIGHT = {"name": "right", "kind": "regex", "pattern": "Right"}


@pytest.mark.parametrize(
    ("env", "max_steps", "first", "success"),
    [
        ("SilentEnv", 3, SAYS_LEFT, 1.0),
        ("SilentEnv", 3, SAYS_RIGHT, 0.0),
        ("SilentEnv", 3, COUNT, None),
        ("SilentEnv", 2, SAYS_LEFT, None),
        ("ImpatientEnv", 5, SAYS_LEFT, None),
        ("SolvedEnv", 3, SAYS_RIGHT, 1.0),
        ("SolvedEnv", 2, SAYS_LEFT, None),
        ("CountingEnv", 2, SAYS_LEFT, 0.0),
    ],
)
async def test_success_is_the_envs_or_of_a_first_reward_if_the_episode_was_not_cut(
    bench, left, env: str, max_steps: int, first: dict[str, Any], success: float | None
):
    """An env may report success at its end alone: whether a cut episode of it has one is not the first reward's to say."""
    kind = (FAKES if env == "CountingEnv" else HERE) + env
    rules = CustomEnv(env_type=kind, max_steps=max_steps, max_tokens_per_step=4, execution="inline")
    async with bench(*group(0, 1), generation=left, **scored(rules, first)) as b:
        await b.until_done(1)
    (played,) = b.buffer.submitted.values()
    assert played.metrics.get("success") == success


@pytest.mark.parametrize(("agent_name", "success"), [("plays", 1.0), ("asks", 1.0), ("rates_itself", None)], ids=str)
async def test_an_agent_that_leaves_its_env_before_the_end_has_no_success(
    bench, left, agent_name: str, success: float | None
):
    """One that takes no step ends its episode by itself."""
    env = CustomEnv(env_type=HERE + "SilentEnv", max_steps=5, max_tokens_per_step=4, execution="inline")
    async with bench(*group(0, 1), generation=left, **scored(agent(agent_name, env), SAYS_LEFT)) as b:
        await b.until_done(1)
    (played,) = b.buffer.submitted.values()
    assert (played.metrics.get("success"), played.metrics["reward/left"]) == (success, 1.0)


async def test_an_episode_that_an_error_ended_before_its_env_reported_success_has_none(bench, left):
    rules: dict[str, Any] = {"env_config": {"how": "raise"}, "on_env_error": OnEnvError(reward=-1.0)}
    env = CustomEnv(env_type=HERE + "BreakingEnv", max_steps=5, max_tokens_per_step=4, execution="inline", **rules)
    async with bench(*group(0, 1), generation=left, **scored(env, SAYS_LEFT)) as b:
        await b.until_done(1)
    (played,) = b.buffer.submitted.values()
    assert (played.stop_reason, "success" in played.metrics) == (StopReason.ERROR, False)


async def test_an_episode_that_an_envs_error_ended_is_not_scored(bench, left):
    rules = {"env_config": {"how": "raise"}, "on_env_error": OnEnvError(reward=-1.0)}
    async with bench(*group(0, 1), generation=left, **scored(custom("BadEnv", **rules), SAYS_LEFT)) as b:
        await b.until_done(1)
    (played,) = b.buffer.submitted.values()
    assert (played.stop_reason, [turn.reward for turn in played.turns]) == (StopReason.ERROR, [0.5, -1.0])
    assert (played.metrics["success"], "reward/left" in played.metrics) == (0.0, False)


async def test_a_failed_reward_fails_an_envs_episode_by_reason(bench, left):
    broken = {"name": "broken", "kind": "function", "path": HERE + "fail"}
    async with bench(*group(0), generation=left, **scored(custom("CountingEnv"), broken)) as b:
        await b.until_done(4)
    assert b.buffer.submitted == {}
    assert {reason for _, reason in b.buffer.failed} == {"reward_error"}


async def test_a_judge_reads_the_whole_episode_and_is_asked_again(bench, left, service: Service):
    replies = [{"choices": [{"message": {"content": "Hm."}}]}, {"choices": [{"message": {"content": "Score: 7"}}]}]
    service.reply = lambda: (200, json.dumps(replies.pop(0) if len(replies) > 1 else replies[0]).encode())
    judge = {"name": "judge", "kind": "llm_judge", "url": service.url.removesuffix("/score"), "model": "judge"}
    judge |= {"template": "Judge the walk.\n{prompt}\n{response}", "weight": 2.0}
    task = EpisodeTask(EpisodeKind.EVAL, "after", 0, 0, 0, min_version=0, sampling_name="greedy")
    async with bench(*group(0, 1), task, generation=left, **scored(custom("CountingEnv"), judge)) as b:
        await b.until_done(2)
    for played in b.buffer.submitted.values():
        assert (played.metrics["reward/judge"], played.turns[-1].reward) == (0.7, 0.5 + 1.4)
    assert sum(r.values["reward_failed/judge/reward_malformed"].value for r in b.metrics.records
               if "reward_failed/judge/reward_malformed" in r.values) == 1.0  # fmt: skip
    prompt = service.requests[0]["messages"][-1]["content"]
    assert prompt.startswith("Judge the walk.")
    assert [prompt.count(f"[{role}]\n") for role in ("system", "user", "assistant")] == [1, 3, 2]


def agent(name: str, env: CustomEnv | None = None, **changes: Any) -> CustomEnv:
    runner = AgentRunner(path=f"tests.played_agents:{name}")
    return (env or custom("CountingEnv")).model_copy(update={"agent_runner": runner, **changes})


async def test_an_agents_episode_is_scored_as_the_policys_own(bench, left):
    async with bench(*group(0, 1), generation=left, **scored(agent("plays"), COUNT)) as b:
        await b.until_done(1)
    (by_agent,) = b.buffer.submitted.values()
    async with bench(*group(0, 1), generation=left, **scored(custom("CountingEnv"), COUNT)) as b:
        await b.until_done(1)
    (alone,) = b.buffer.submitted.values()
    assert by_agent.turns == alone.turns
    assert SEEN[0] == SEEN[1]
    assert by_agent.metrics["reward/answers"] == 3.0


async def test_a_score_is_added_to_the_reward_that_an_agent_returns(bench, left):
    async with bench(*group(0, 1), generation=left, **scored(agent("rates_itself"), COUNT)) as b:
        await b.until_done(1)
    (played,) = b.buffer.submitted.values()
    assert played.reward == 7.5 + 0.5


async def test_an_agents_error_is_not_scored(bench, left):
    env = agent("raises", on_agent_error=OnAgentError(reward=-1.0))
    async with bench(*group(0, 1), generation=left, **scored(env, COUNT)) as b:
        await b.until_done(1)
    (played,) = b.buffer.submitted.values()
    assert (played.stop_reason, played.reward, SEEN) == (StopReason.ERROR, -1.0, [])


def rows_of(folder: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = DataConfig(dataset_name=path, val_dataset_name=path, shuffle=False)
    env = CustomEnv(env_type="prompt", max_steps=1, max_tokens_per_step=4, execution="inline").with_rows(read)
    return {"pipeline": "rlvr", "data": read, "env": env}


async def test_an_agent_answers_the_rows_of_a_dataset(bench, left, tmp_path: Path):
    messages = [{"role": role, "content": text} for role, text in (("system", "Walk"), ("user", "P"), ("assistant", "Up"),
                                                                  ("user", "P _ G"))]  # fmt: skip
    changes = rows_of(tmp_path, {"messages": messages, "ground_truth": "Left", "note": "n"})
    env = agent("answers_messages", changes.pop("env"))
    async with bench(*group(0, 1), generation=left, **scored(env, SAYS_LEFT, COUNT, **changes)) as b:
        await b.until_done(1)
    assert not b.buffer.failed
    (played,) = b.buffer.submitted.values()
    assert (played.reward, played.metrics["success"]) == (1.0 + 0.5 * 2, 1.0)
    (sample,) = SEEN
    assert (list(sample.prompt), sample.response) == (messages, "Left")
    assert (sample.ground_truth, sample.row) == ("Left", {"note": "n"})


def test_an_agents_calls_and_results_are_texts_of_the_conversation():
    call = ToolCall("look", '{"at":"G"}')
    png = encode_png(np.zeros((4, 4, 3), dtype=np.uint8))
    told = Transcript()
    told.read(
        (
            ChatMessage("user", f"see {ROW_IMAGE}", images=(png,)),
            ChatMessage("assistant", "I look", (call, call)),
            ChatMessage("tool", "one", tool_call_id="1"),
            ChatMessage("tool", "two", tool_call_id="2"),
            ChatMessage("assistant", "", (call,)),
        ),
        is_chat=True,
    )
    written = '<tool_call>\n{"name": "look", "arguments": {"at": "G"}}\n</tool_call>'
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    assert told.prompt == [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": url}}],
        },
        {"role": "assistant", "content": f"I look\n{written}\n{written}"},
        {"role": "user", "content": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"},
    ]
    assert told.response == written


def test_images_of_an_agents_results_are_in_their_places():
    left, right = (encode_png(np.full((4, 4, 3), value, dtype=np.uint8)) for value in (0, 1))
    results = (
        ChatMessage("tool", f"a{ROW_IMAGE}", images=(left,)),
        ChatMessage("tool", f"no {ROW_IMAGE}character"),
        ChatMessage("tool", f"{ROW_IMAGE}b", images=(right,)),
    )
    told = Transcript()
    told.read((*results, ChatMessage("assistant", "Left")), is_chat=True)
    ((role, parts),) = [message.values() for message in told.prompt]
    urls = [{"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"} for png in (left, right)]
    assert role == "user"
    assert parts == [
        {"type": "text", "text": "<tool_response>\na"},
        {"type": "image_url", "image_url": urls[0]},
        {
            "type": "text",
            "text": "\n</tool_response>\n<tool_response>\nno character\n</tool_response>\n<tool_response>\n",
        },
        {"type": "image_url", "image_url": urls[1]},
        {"type": "text", "text": "b\n</tool_response>"},
    ]
