"""Prompts of rows, and made arithmetic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.envs import registry
from offbeat.envs.contract import check_contract
from offbeat.envs.dataset.arithmetic import DOMAINS, box, careless_answers, problems, write_problems
from offbeat.envs.dataset.files import open_rows
from offbeat.envs.dataset.prompt import PromptConfig, PromptEnv, PromptError, RowPrompt, read_prompt
from offbeat.envs.prompts import ROW_IMAGE

USER, ANSWER, SYSTEM = ({"role": role, "content": role} for role in ("user", "assistant", "system"))
SHOWN = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2"}, RowPrompt(None, ("2 + 2",))),
        ({"messages": [SYSTEM, USER]}, RowPrompt("system", ("user",))),
        ({"messages": json.dumps([USER, ANSWER, USER]), "prompt": "no"}, RowPrompt(None, ("user", "assistant", "user"))),
        ({"messages": None, "prompt": [USER]}, RowPrompt(None, ("user",))),
        ({"prompt": "[1, 2] has how many numbers?"}, RowPrompt(None, ("[1, 2] has how many numbers?",))),
        ({"prompt": "[1, 2]"}, RowPrompt(None, ("[1, 2]",))),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
         RowPrompt(None, ("ab",))),
        ({"messages": SHOWN, "images": ["x.png"]}, RowPrompt(None, (f"a{ROW_IMAGE}b",))),
        ({"prompt": "a", "images": [b"x", b"y"]}, RowPrompt(None, (f"{ROW_IMAGE}{ROW_IMAGE}a",))),
        ({"messages": [SYSTEM, USER, ANSWER, USER], "images": "x.png"},
         RowPrompt("system", (f"{ROW_IMAGE}user", "assistant", "user"))),
    ],
)  # fmt: skip
def test_a_prompt_is_a_text_or_messages(row: dict[str, Any], expected: RowPrompt):
    assert read_prompt(row, "messages", "prompt") == expected


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "prompt: expected a text or a list of messages, got nothing"),
        ({"messages": [USER, ANSWER]}, "messages: the last message must be the user's"),
        ({"messages": [SYSTEM]}, "the last message must be the user's"),
        ({"messages": [USER, USER]}, "user and assistant must alternate, got user, user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            r"messages\[0\]: expected an object with role",
        ),
        ({"messages": SHOWN}, "images: 0 images for 1 image parts of messages"),
        ({"messages": SHOWN, "images": ["a", "b"]}, "images: 2 images for 1 image parts of messages"),
        ({"prompt": "p", "images": 3}, "images: expected an image or a list of them, got int"),
        (
            {"messages": [{**SHOWN[0], "role": "system"}, USER], "images": ["a"]},
            "images are the user's, not of the role system",
        ),
        ({"prompt": f"p{ROW_IMAGE}"}, "prompt: has U.FDD0, which is no character"),
    ],
)
def test_a_row_without_a_prompt_is_refused(row: dict[str, Any], problem: str):
    with pytest.raises(PromptError, match=problem):
        read_prompt(row, "messages", "prompt")


def test_a_prompt_is_a_conversation_with_its_images_as_data_urls():
    prompt = RowPrompt("s", (f"{ROW_IMAGE}a", "b", f"c{ROW_IMAGE}"), (b"1", b"2"))
    one, two = (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in ("MQ==", "Mg==")
    )
    assert prompt.messages() == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [one, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, two]},
    ]


def test_the_seed_is_the_row_and_evaluation_has_its_own(tmp_path: Path):
    write_problems(tmp_path / "train.jsonl", held_out=False)
    write_problems(tmp_path / "val.jsonl", held_out=True)
    settings = {"dataset_name": str(tmp_path / "train.jsonl"), "val_dataset_name": str(tmp_path / "val.jsonl")}
    rows = open_rows(tmp_path / "val.jsonl")
    env = registry.make("prompt", registry.held_out_config("prompt", settings))
    assert [env.reset(seed=row)[0] for row in (3, len(rows) + 3)] == [rows[3]["prompt"]] * 2
    assert env.step("whatever") == ("", 0.0, True, False, {})
    assert {finding.severity for finding in check_contract("prompt", settings).findings} == {"advice"}


def test_problems_are_right_and_held_out_ones_are_not_trained():
    splits = [{row["prompt"]: row for row in problems(held_out=held_out)} for held_out in (False, True)]
    train, held_out = splits
    assert not train.keys() & held_out.keys()
    assert 6 < len(train) / len(held_out) < 10
    for prompt, row in (train | held_out).items():
        assert eval(prompt.removesuffix(" =")) == int(row["ground_truth"]) >= 0
        step, _, answer = row["response"].partition(" = ")
        assert eval(step) == int(row["ground_truth"])
        assert answer == box(int(row["ground_truth"])) != row["careless"]
    assert {row["tag"] for row in held_out.values()} == {*DOMAINS}


def test_one_demonstration_in_four_works_in_steps(tmp_path: Path):
    write_problems(tmp_path / "rows.jsonl", held_out=False)
    env, rng = PromptEnv(PromptConfig(dataset_name=tmp_path / "rows.jsonl")), np.random.default_rng(0)
    answers = [(careless_answers(env, rng)[-1]["content"], env.row) for _ in range(1000)]
    assert all(answer in (row["response"], row["careless"]) for answer, row in answers)
    assert 0.2 < np.mean([answer == row["response"] for answer, row in answers]) < 0.3
    head, *_ = careless_answers(env, rng, system_prompt="Add .")
    assert head == {"role": "system", "content": "Add ."}
