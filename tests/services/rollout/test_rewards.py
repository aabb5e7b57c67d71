"""Answers to rows, scored between the last token and submit."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from offbeat.envs.dataset import PromptEnv
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, GenerateRequest, StopReason
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.function import MAX_HUNG_THREADS
from offbeat.services.reward.sample import RewardSample
from offbeat.services.rollout.config import CustomEnv, OnEnvError, RolloutConfig
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.worker import WorkerEnd
from tests.fakes_rollout import FakeGeneration
from tests.services.rollout.worker_bench import group
from tests.waiting import PATIENCE_S, wait_until

HERE = f"{__name__}:"
TRUTH = {"name": "truth", "kind": "function", "path": HERE + "is_truth"}
FORMAT = {"name": "word", "kind": "regex", "pattern": "Left|Down", "weight": 0.5}
GATE = threading.Event()
SEEN: list[RewardSample] = []


def is_truth(sample: RewardSample) -> bool:
    SEEN.append(sample)
    return sample.response == sample.ground_truth


async def wait_for_gate(sample: RewardSample) -> float:
    del sample
    while not GATE.is_set():  # noqa: ASYNC110 - an event of asyncio belongs to one test's loop
        await asyncio.sleep(0.005)
    return 1.0


def hang(sample: RewardSample) -> float:
    del sample
    GATE.wait()
    return 1.0


def fail(sample: RewardSample) -> float:
    raise KeyError(sample.response)


@pytest.fixture(autouse=True)
def _clean():
    SEEN.clear()
    GATE.clear()


def settings(folder: Path, *rewards: dict[str, Any], **data: Any) -> dict[str, Any]:
    """Changes of a worker's settings: rows that are answered, with scores."""
    path = folder / "rows.jsonl"
    rows = [{"prompt": "P _ G", "ground_truth": "Left", "note": "n"}, {"prompt": "P", "ground_truth": "Up"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = DataConfig(dataset_name=path, val_dataset_name=path, shuffle=False, **data)
    env = CustomEnv(env_type="prompt", max_steps=1, max_tokens_per_step=4, execution="inline").with_rows(read)
    config = RewardsConfig.model_validate_json(json.dumps({"rewards": rewards}))
    return {"pipeline": "rlvr", "data": read, "custom_envs": {"walk": env}, "rewards": config}


@pytest.fixture
def saying(tokenizer: Tokenizer) -> Callable[[str], FakeGeneration]:
    def make(words: str) -> FakeGeneration:
        ids = [*tokenizer.encode(words, add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>")]
        return FakeGeneration(lambda _: tuple(ids))

    return make


async def test_rewards_are_columns_and_their_score_ends_the_episode(bench, saying, tmp_path: Path):
    async with bench(*group(0), *group(1), generation=saying("Left"), **settings(tmp_path, TRUTH, FORMAT)) as b:
        await b.until_done(8)
        right, wrong = b.buffer.submitted[group(0)[0]], b.buffer.submitted[group(1)[0]]
    assert (right.tag, right.seed, right.reward, wrong.reward) == ("walk", 0, 1.5, 0.5)
    assert {name: value for name, value in right.metrics.items() if name.startswith("reward/")} == {
        "reward/truth": 1.0,
        "reward/word": 1.0,
    }
    assert (wrong.metrics["reward/truth"], "success" in wrong.metrics) == (0.0, False), "a function may score anything"
    assert right.text == ()
    sample = next(each for each in SEEN if each.ground_truth == "Left")
    assert (sample.prompt, sample.tag, sample.row) == ([{"role": "user", "content": "P _ G"}], "walk", {"note": "n"})
    assert sample.num_response_tokens == 2
    named = [record.values for record in b.metrics.records if record.labels.get("tag") == "walk"]
    assert sum(values["reward/truth"].count for values in named if "reward/truth" in values) == 8


async def test_a_response_begins_with_the_thought_that_the_template_opens(
    bench, saying, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A cut thought is no answer."""
    monkeypatch.setattr(chat, "opened_thought", "<think>\n")
    final = {**FORMAT, "text": "final"}
    async with bench(*group(0), generation=saying("Left"), **settings(tmp_path, TRUTH, final)) as b:
        await b.until_done(4)
    assert {sample.response for sample in SEEN} == {"<think>\nLeft"}
    assert b.buffer.submitted[group(0)[0]].metrics["reward/word"] == 0.0


async def test_an_evaluation_answers_the_validation_rows_and_reports_success(bench, saying, tmp_path: Path):
    tasks = [EpisodeTask(EpisodeKind.EVAL, "after", n, n, 0, min_version=0, sampling_name="greedy") for n in range(2)]
    async with bench(*tasks, generation=saying("Down"), **settings(tmp_path, FORMAT, TRUTH)) as b:
        await b.until_done(2)
        played = [b.buffer.submitted[task] for task in tasks]
    assert [(each.seed, each.metrics["success"], each.text) for each in played] == [
        (0, 1.0, ("", "P _ G", "Down")),
        (1, 1.0, ("", "P", "Down")),
    ]


async def test_a_slow_reward_holds_up_no_episode_but_not_without_bound(bench, saying, tmp_path: Path):
    """Four episodes play at a time; as many more as wait for rewards, and then the worker claims fewer."""
    slow = {"name": "slow", "kind": "function", "path": HERE + "wait_for_gate"}
    rollout = RolloutConfig(max_env_num_per_worker=4)
    tasks = [task for number in range(4) for task in group(number)]
    async with bench(*tasks, generation=saying("Left"), rollout=rollout, **settings(tmp_path, slow)) as b:
        await wait_until(lambda: len(b.generation.calls) and sum(map(len, b.generation.calls)) == 8)
        await asyncio.sleep(0.1)
        assert (sum(map(len, b.generation.calls)), len(b.buffer.submitted)) == (8, 0)
        GATE.set()
        await b.until_done(16)
    assert len(b.buffer.submitted) == 16


class InstructingEnv(PromptEnv):
    system_prompt = "Up"


class RaisingEnv(PromptEnv):
    """A tool that can't take the policy's call."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise ValueError(action)


@pytest.mark.parametrize(("first", "success"), [(FORMAT, {"success": 0.0}), (TRUTH, {})])
async def test_an_episode_that_an_error_ended_has_the_rules_reward(
    bench, saying, tmp_path: Path, first: dict[str, Any], success: dict[str, float]
):
    """What made the env fail is no answer to be scored."""
    changes = settings(tmp_path, first)
    rule = {"env_type": f"{__name__}:RaisingEnv", "on_env_error": OnEnvError(reward=-1.0)}
    changes["custom_envs"] = {"walk": changes["custom_envs"]["walk"].model_copy(update=rule)}
    async with bench(*group(0), generation=saying("Left"), **changes) as b:
        await b.until_done(4)
    assert (b.buffer.failed, SEEN) == ([], [])
    for trajectory in b.buffer.submitted.values():
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ERROR, -1.0)
        assert trajectory.metrics.items() >= {**success, "ended_by_error": 1.0}.items()
        assert {"success", "reward/truth", "reward/word"} & {*trajectory.metrics} == {*success}


async def test_a_failed_reward_fails_the_episode_by_reason(bench, saying, tmp_path: Path):
    broken = {"name": "broken", "kind": "function", "path": HERE + "fail"}
    async with bench(*group(0), generation=saying("Left"), **settings(tmp_path, broken)) as b:
        await b.until_done(4)
        report = b.worker._outcomes.report()
    assert b.buffer.submitted == {}
    assert {reason for _, reason in b.buffer.failed} == {"reward_error"}
    assert report["key"] == "rewards"
    assert "reward broken: " in report["error"]
    assert "KeyError: 'Left'" in report["error"]


async def test_a_worker_whose_rewards_hang_asks_to_be_replaced(bench, saying, tmp_path: Path):
    hanging = {"name": "hanging", "kind": "function", "path": HERE + "hang", "timeout_s": 0.1, "max_attempts": 1}
    tasks = [task for number in range(MAX_HUNG_THREADS // 2) for task in group(number)]
    async with bench(*tasks, generation=saying("Left"), **settings(tmp_path, hanging)) as b:
        async with asyncio.timeout(PATIENCE_S):
            assert await b.running is WorkerEnd.WORN_OUT
        GATE.set()
    assert {reason for _, reason in b.buffer.failed} == {"reward_timeout"}
    assert len(b.buffer.failed) < len(tasks)
    assert b.buffer.released == 1
    hung = [record.values["hung_threads"].value for record in b.metrics.records if "hung_threads" in record.values]
    assert max(hung) >= MAX_HUNG_THREADS, "calls that run by then hang as well"


async def test_a_cancelled_episode_leaves_its_reward(bench, saying, tmp_path: Path):
    slow = {"name": "slow", "kind": "function", "path": HERE + "wait_for_gate"}
    async with bench(*group(0), generation=saying("Left"), **settings(tmp_path, slow)) as b:
        await wait_until(lambda: b.generation.calls and b.worker.num_playing == 4)
        b.buffer.to_cancel = list(group(0))
        await wait_until(lambda: b.worker.num_playing == 0)
        GATE.set()
        b.buffer.offer(*group(1))
        await b.until_done(4)
    assert {task.number for task in b.buffer.submitted} == {1}


async def test_a_prompt_that_is_too_long_is_not_answered(bench, saying, tmp_path: Path):
    changes = settings(tmp_path, TRUTH, prompt_length=6)
    async with bench(*group(0), *group(1), generation=saying("Left"), **changes) as b:
        await b.until_done(8)
        long, short = b.buffer.submitted[group(0)[0]], b.buffer.submitted[group(1)[0]]
    assert (long.turns, long.stop_reason, long.reward) == ((), StopReason.MAX_LENGTH, 0.0)
    assert len(short.turns) == 1
    assert {sample.ground_truth for sample in SEEN} == {"Up"}


async def test_the_answer_may_be_a_field_of_a_column(bench, saying, tmp_path: Path):
    """verl's rows have it in `reward_model`."""
    changes = settings(tmp_path, TRUTH, ground_truth_key="reward_model.ground_truth")
    row = {"prompt": "P", "reward_model": {"style": "rule", "ground_truth": "Left"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    async with bench(*group(0), generation=saying("Left"), **changes) as b:
        await b.until_done(4)
    assert {trajectory.reward for trajectory in b.buffer.submitted.values()} == {1.0}
    assert {sample.ground_truth for sample in SEEN} == {"Left"}


@pytest.mark.parametrize(("system", "shown"), [("Walk to G .", "Walk to G .\nLeft Down"), (None, "Up\nLeft Down")])
async def test_a_rows_system_message_leaves_the_tools_instructions(
    bench, saying, tmp_path: Path, chat, system: str | None, shown: str
):
    """It replaces what the wrapped env says of the task."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "G"}\n')
    changes = settings(tmp_path, TRUTH)
    tool = {"tool_id": "search", "corpus": str(corpus), "instruction": "Left Down"}
    walk: CustomEnv = changes["custom_envs"]["walk"]
    config = {"env_type": f"{__name__}:InstructingEnv", "env_config": walk.env_config, "tools": [tool]}
    changes["custom_envs"] = {"walk": walk.model_copy(update={"env_type": "tools", "env_config": config})}
    head = [] if system is None else [{"role": "system", "content": system}]
    row = {"messages": [*head, {"role": "user", "content": "P"}], "ground_truth": "Left"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    async with bench(*group(0, 1), generation=saying("Left"), **changes) as b:
        await b.until_done(1)
        ((request,),) = b.generation.calls
    assert list(request.prompt) == [*chat.first_prompt(shown, "P")]
    assert SEEN[0].prompt[0] == {"role": "system", "content": shown}


async def test_earlier_messages_of_a_row_come_before_the_answer(bench, saying, tmp_path: Path, chat):
    changes = settings(tmp_path, TRUTH, ground_truth_key="gold")
    messages = [
        {"role": role, "content": text}
        for role, text in (("system", "Walk to G ."), ("user", "P"), ("assistant", "Up"), ("user", "P _ G"))
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, "gold": "Left"}) + "\n")
    async with bench(*group(0, 1), generation=saying("Left"), **changes) as b:
        await b.until_done(1)
        ((request,),) = b.generation.calls
    expected = [*chat.first_prompt("Walk to G .", "P"), *chat.encode("Up"), chat.end_id, *chat.next_prompt("P _ G")]
    assert list(request.prompt) == expected
    assert (SEEN[0].prompt, SEEN[0].ground_truth) == (messages, "Left")
    assert isinstance(request, GenerateRequest)
