"""Rows as tasks: domains, shares, order, and validation."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import EpisodeKind
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.prompts import DomainRows, PromptSource, count_validation

TAGS = ("math", "code")


def source(folder: Path, **changes: Any) -> PromptSource:
    rows = [{"prompt": f"p {n}", "tag": ("math", "aime", "code", "other")[n % 4]} for n in range(40)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"dataset_name": path, "val_dataset_name": path, "tag_included": {"math": ("math", "aime")}, **changes}
    return PromptSource(DataConfig(**values), TAGS, TAGS, seed=7, val_group_size=2)


def test_each_epoch_takes_every_row_of_the_domains_once(tmp_path: Path):
    prompts = source(tmp_path)
    epochs = [[prompts.train_task(30 * epoch + n) for n in range(30)] for epoch in range(2)]
    assert sorted(task.seed for task in epochs[0]) == sorted(task.seed for task in epochs[1])
    assert epochs[0] != epochs[1]
    assert [(task.tag, task.seed % 4) for task in epochs[0] if task.tag == "code" or task.seed % 4 > 1] == [
        ("code", 2)
    ] * 10
    assert prompts.train.num_left_out == 10
    assert source(tmp_path).train_task(41) == prompts.train_task(41)


def test_domains_traverse_their_own_rows_by_their_shares(tmp_path: Path):
    prompts = source(tmp_path, domain_interleave_probs={"math": 0.5, "code": 0.5})
    tasks = [prompts.train_task(n) for n in range(40)]
    assert Counter(task.tag for task in tasks) == {"math": 20, "code": 20}
    code = [task.seed for task in tasks if task.tag == "code"]
    assert sorted(code[:10]) == sorted(code[10:]) == list(range(2, 40, 4)), "two epochs of code for one of math"
    assert code[:10] != code[10:]
    assert len({task.seed for task in tasks if task.tag == "math"}) == 20


def test_an_evaluation_takes_each_row_once_for_its_siblings(tmp_path: Path):
    prompts = source(tmp_path)
    sampled = [prompts.eval_task(n, greedy=False) for n in range(60)]
    assert sampled[::2] == sampled[1::2]
    greedy = [prompts.eval_task(n, greedy=True) for n in range(30)]
    assert greedy == sampled[::2]
    assert [task.seed for task in greedy] == [n for n in range(40) if n % 4 != 3]
    config = DataConfig(dataset_name=tmp_path / "rows.jsonl", val_dataset_name=tmp_path / "rows.jsonl")
    assert count_validation(config, TAGS) == 20
    assert count_validation(config.model_copy(update={"val_dataset_name": None}), TAGS) == 0


def test_a_tag_without_rows_is_refused(tmp_path: Path):
    with pytest.raises(
        ValueError, match="none has golf in the column 'tag', where rows have aime, code, other: assign"
    ):
        source(tmp_path, tag_included={"code": ("golf",)})


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("3", "prompt: expected a text"),
        ('"cut \\ud83d"', "prompt: has half of a surrogate pair"),
        (
            json.dumps(json.dumps([{"role": "user", "content": "cut \ud83d"}])),
            r"prompt\[0\]: has half of a surrogate pair",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, prompt: str, problem: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "p"}}\n\n{{"prompt": {prompt}}}\n')
    prompts = PromptSource(DataConfig(dataset_name=path), ("math",), ("math",), seed=7)
    with pytest.raises(EpisodeError, match=rf"bad.jsonl:3: {problem}") as caught:
        prompts.prompt(EpisodeKind.TRAIN, 1)
    assert caught.value.reason == "bad_row"


@pytest.mark.parametrize(("cells", "truths"), [(["1.10", "2.5"], ["1.10", "2.5"]), (["NA", "12"], ["NA", "12"])])
def test_ground_truth_of_a_csv_file_is_as_written(cells: list[str], truths: list[str], tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,ground_truth,weight\n" + "".join(f"p,{cell},0.50\n" for cell in cells))
    rows = DomainRows(path, DataConfig(dataset_name=path), ["rlvr"]).rows
    assert [(rows[i]["ground_truth"], rows[i]["weight"]) for i in range(2)] == [(truth, 0.5) for truth in truths]


def test_a_prompt_that_only_begins_as_json_is_a_text(tmp_path: Path):
    path, text = tmp_path / "rows.jsonl", "[" * 3000
    path.write_text(json.dumps({"prompt": text}))
    prompts = PromptSource(DataConfig(dataset_name=path), ("math",), ("math",), seed=7)
    assert prompts.prompt(EpisodeKind.TRAIN, 0).turns == (text,)
