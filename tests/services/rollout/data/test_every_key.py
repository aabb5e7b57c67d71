"""No key of `data` is silent: each changes a row's tokens or labels, or which row is taken."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.messages.types import EpisodeKind
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.services.rollout.data.test_images import IMAGE, picture

ROWS = 6
SAY, ANSWER = ({"role": role, "content": content} for role, content in (("user", "go"), ("assistant", "Left")))
OTHER = {"role": "assistant", "content": "Up"}
LOOK = {"role": "user", "content": [IMAGE, {"type": "text", "text": "go"}]}
TOOL = {"type": "function", "function": {"name": "step", "parameters": {"type": "object", "properties": {}}}}
PAIR = {"prompt": "go", "chosen": "Left", "rejected": "Up"}
UNPAIRED = {"prompt": "go", "completion": "Left", "label": True}
CONVERSATION = {"messages": [SAY, ANSWER, SAY, OTHER]}
Case = tuple[str, dict[str, Any], dict[str, Any]]
"""Pipeline, a row, and what is changed in the configuration."""


def renamed(pipeline: str, row: dict[str, Any], key: str, other: Any) -> Case:
    """Return a row with another value in a second column, which the key names."""
    return pipeline, {**row, "second": other}, {key: "second"}


OF_ROWS: dict[str, Case] = {
    "messages_key": renamed("sft", CONVERSATION, "messages_key", [SAY, OTHER]),
    "prompt_key": renamed("sft", {"prompt": "go", "response": "Up"}, "prompt_key", "Left"),
    "query_key": renamed("sft", {"prompt": "go", "response": "Up"}, "query_key", "Left"),
    "system_key": renamed("sft", {"prompt": "go", "response": "Up"}, "system_key", "Left"),
    "response_key": renamed("sft", {"prompt": "go", "response": "Up"}, "response_key", "Left"),
    "chosen_key": renamed("dpo", PAIR, "chosen_key", "go"),
    "rejected_key": renamed("dpo", PAIR, "rejected_key", "go"),
    "margin_key": renamed("reward_model", {**PAIR, "margin": 0.5}, "margin_key", 1.5),
    "completion_key": renamed("dpo", UNPAIRED, "completion_key", "Up"),
    "label_key": renamed("dpo", UNPAIRED, "label_key", False),
    "images_key": renamed("sft", {"messages": [LOOK, ANSWER], "images": ["a.png"]}, "images_key", ["b.png"]),
    "tools_key": renamed("sft", CONVERSATION, "tools_key", [TOOL]),
    "tag_key": renamed("distill", {**CONVERSATION, "tag": "math"}, "tag_key", "code"),
    "train_on": ("sft", CONVERSATION, {"train_on": "last"}),
    "train_on completion": ("sft", CONVERSATION, {"train_on": "completion"}),
    "too_long": ("sft", {"messages": [SAY, {**ANSWER, "content": 90 * "Left "}]}, {"too_long": "truncate"}),
}
OF_PROMPTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages_key": ({}, {"messages_key": "talk"}),
    "prompt_key": ({}, {"prompt_key": "question"}),
    "images_key": ({}, {"images_key": "pictures"}),
    "tag_key": ({}, {"tag_key": "domain"}),
    "tag_included": ({}, {"tag_included": {"math": ("code",), "code": ("math",)}}),
    "domain_interleave_probs": ({}, {"domain_interleave_probs": {"math": 0.8, "code": 0.2}}),
    "shuffle": ({}, {"shuffle": False}),
    "dataset_name": ({}, {"dataset_name": "fewer.jsonl"}),
    "val_dataset_name": ({}, {"val_dataset_name": "fewer.jsonl"}),
}
ELSEWHERE = {
    "ground_truth_key": "tests/services/rollout/test_rewards.py",
    "prompt_length": "tests/services/rollout/test_rewards.py",
    "num_train_epochs": "tests/deploy/config/checks/test_data.py",
}
"""Other keys, and what shows them."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tiny_policy(
        folder, TinyPolicyConfig(num_hidden_layers=1, vision=TinyVisionConfig(depth=1)), ["Left", "Up", "go"]
    )
    path = folder / "tokenizer_config.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"chat_template": "{% if tools %}go{% endif %}" + tree["chat_template"]}))
    return folder


def members(folder: Path, policy: Path, case: Case, config: dict[str, Any]) -> list[object]:
    """Tokens, learned ones, labels and metrics of a row and of the next one's mismatch."""
    pipeline, row, _ = case
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for number, name in enumerate(("a.png", "b.png")):
        (folder / name).write_bytes(picture(number, side=32 * (1 + number)))
    data = DataConfig(dataset_name=folder / "rows.jsonl", **config)
    group = DataSource(data, pipeline, policy, seed=0, max_tokens=64).row(0)
    return [
        (
            each.segments[0].tokens.tolist(),
            each.segments[0].loss_mask.tolist(),
            each.reward,
            each.tag,
            dict(each.metrics),
        )
        for each in group
    ]


@pytest.mark.parametrize("key", OF_ROWS)
def test_a_key_changes_what_a_row_trains(key: str, tmp_path: Path, policy: Path) -> None:
    case = OF_ROWS[key]
    assert members(tmp_path, policy, case, {}) != members(tmp_path, policy, case, case[2])


def taken(folder: Path, config: dict[str, Any]) -> list[object]:
    """Tag and prompt of the first groups and of evaluations."""
    rows = [
        {
            "prompt": f"p{n}",
            "question": f"q{n}",
            "talk": [{"role": "user", "content": f"t{n}"}],
            "images": [],
            "pictures": ["a.png"],
            "tag": ("math", "code")[n % 2],
            "domain": ("math", "code")[n % 3 > 0],
        }
        for n in range(ROWS)
    ]
    for name, own in (("rows.jsonl", rows), ("fewer.jsonl", rows[:2])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in own))
    values = {"dataset_name": "rows.jsonl", "val_dataset_name": "rows.jsonl", **config}
    files = {key: folder / values.pop(key) for key in ("dataset_name", "val_dataset_name")}
    source = PromptSource(DataConfig(**files, **values), ("math", "code"), ("math", "code"), seed=7)
    tasks = [(EpisodeKind.TRAIN, source.train_task(n)) for n in range(2 * ROWS)]
    tasks += [(EpisodeKind.EVAL, source.eval_task(n, greedy=True)) for n in range(ROWS)]
    return [(kind, task.tag, source.prompt(kind, task.seed)) for kind, task in tasks]


@pytest.mark.parametrize("key", OF_PROMPTS)
def test_a_key_changes_which_prompts_are_taken(key: str, tmp_path: Path) -> None:
    base, change = OF_PROMPTS[key]
    plain = taken(tmp_path, base)
    assert taken(tmp_path, base) == plain
    assert taken(tmp_path, base | change) != plain


def test_every_key_of_data_has_an_effect_that_is_shown() -> None:
    assert set(DataConfig.model_fields) == {key.split()[0] for key in OF_ROWS} | set(OF_PROMPTS) | set(ELSEWHERE)
