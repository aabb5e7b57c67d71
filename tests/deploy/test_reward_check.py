import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.reward_check import rank_correlation
from offbeat.services.chat.vision import encode_png
from offbeat.services.reward.sample import RewardSample

FUNCTIONS = "tests.services.reward.functions"
MATH = {"name": "math", "kind": "math_rule", "tags": ["math"]}
DOT = encode_png(np.zeros((8, 8, 3), dtype=np.uint8))
SHOWN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(DOT).decode()}"}}
SEEN: list[RewardSample] = []
FORMAT = {"name": "format", "kind": "regex", "pattern": "boxed", "weight": 0.2}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    config, data = tmp_path / "run.yaml", tmp_path / "answers.jsonl"
    tree = {"rewards": [MATH, FORMAT], "data": {"ground_truth_key": "gold", "tag_included": {"math": ["gsm8k"]}}}
    config.write_text(yaml.safe_dump(tree))
    rows = [
        {"prompt": "1+1?", "response": r"\boxed{2}", "gold": "2", "tag": "gsm8k", "label": 1},
        {"prompt": "1+2?", "response": r"\boxed{4}", "gold": "3", "tag": "gsm8k", "label": 0},
        {"prompt": "1+3?", "response": "4", "gold": "4", "tag": "gsm8k", "label": 1},
        {"prompt": "1+4?", "response": r"\boxed{5}", "tag": "gsm8k", "label": 1},
        {"prompt": "Hi?", "response": "Hi", "tag": "chat"},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config, data


def run(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["reward", "check", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_agreement_failures_and_the_slowest(files: tuple[Path, Path]):
    config, data = files
    report = json.loads(run(config, data, "--json", "--slowest", 2, exit_code=1))
    rewards = {each["name"]: each for each in report["rewards"]}
    assert (rewards["math"]["num_scored"], rewards["math"]["agreement"]) == (3, pytest.approx(2 / 3))
    assert (rewards["math"]["false_positives"], rewards["math"]["false_negatives"]) == (0, 1)
    assert rewards["format"]["num_scored"] == 5
    assert rewards["score"]["num_labelled"] == 3
    assert rewards["score"]["mean"] == pytest.approx((1.2 + 0.2 + 0.0 + 0.0) / 4)
    assert report["failures"] == {"bad_row": 1}
    assert report["failed_rows"][0]["row"] == f"{data}:4"
    assert report["disagreements"] == [f"{data}:3"]
    assert len(report["slowest"]) == 2
    assert report["slowest"][0]["seconds"] >= report["slowest"][1]["seconds"]


def test_a_rewards_time_is_that_of_its_own_rows(tmp_path: Path):
    """Of a row that another reward scores it is no part."""
    config, data = tmp_path / "run.yaml", tmp_path / "answers.jsonl"
    slow = {"name": "slow", "kind": "function", "path": f"{FUNCTIONS}:sleep_as_told", "tags": ["a"]}
    config.write_text(yaml.safe_dump({"rewards": [slow, {**FORMAT, "tags": ["b"]}, {**MATH, "tags": ["c"]}]}))
    rows = [{"response": "0.3", "tag": "a"}, {"response": "boxed", "tag": "b"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = json.loads(run(config, data, "--json"))
    times = {each["name"]: (each["seconds_mean"], each["seconds_max"]) for each in report["rewards"]}
    measured = {each["reward"]: each["seconds"] for each in report["slowest"]}
    assert times["slow"] == (measured["slow"], measured["slow"])
    assert times["format"] == (measured["format"], measured["format"])
    assert times["math"] == (0.0, 0.0)
    assert times["score"][1] == measured["slow"] > measured["format"]


def test_rows_of_a_prompt_or_of_a_group_are_compared(tmp_path: Path):
    config, data = tmp_path / "run.yaml", tmp_path / "answers.jsonl"
    short = {"name": "short", "kind": "function", "scope": "group", "path": f"{FUNCTIONS}:shortness"}
    gap = {"name": "gap", "kind": "function", "scope": "group", "path": f"{FUNCTIONS}:gap_to_best", "weight": 0.5}
    length = {"name": "length", "kind": "function", "path": f"{FUNCTIONS}:length"}
    config.write_text(yaml.safe_dump({"rewards": [short, gap, length]}))
    rows: list[dict[str, Any]] = [
        {"prompt": "1?", "response": "ab", "label": 1},
        {"prompt": "2?", "response": "abcde"},
        {"prompt": "1?", "response": "abcd", "label": 0},
        {"prompt": "3?", "response": "a", "group": "g"},
        {"prompt": "4?", "response": "abc", "group": "g"},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = json.loads(run(config, data, "--json", exit_code=1))
    means = {each["name"]: (each["num_scored"], each["mean"]) for each in report["rewards"]}
    assert means["short"] == (4, pytest.approx((1 / 2 + 1 / 4 + 1 + 1 / 3) / 4))
    assert means["gap"] == (4, -1.0)
    assert means["score"] == (4, pytest.approx((1 / 2 + 1 / 4 + 1 + 1 / 3) / 4 - 0.5 + 10 / 4))
    (failed,) = report["failed_rows"]
    assert (failed["row"], "no other row has its prompt" in failed["failure"]) == (f"{data}:2", True)


def test_a_failed_comparison_fails_the_rows_of_its_group(tmp_path: Path):
    config, data = tmp_path / "run.yaml", tmp_path / "answers.jsonl"
    odd = {"name": "odd", "kind": "function", "scope": "group", "path": f"{FUNCTIONS}:answers_of_group"}
    config.write_text(yaml.safe_dump({"rewards": [odd]}))
    rows = [{"prompt": "1?", "response": "few"}, {"prompt": "1?", "response": "b"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = json.loads(run(config, data, "--json", exit_code=1))
    assert report["failures"] == {"reward_error": 2}


def test_the_table(files: tuple[Path, Path]):
    config, data = files
    output = run(config, data, exit_code=1)
    assert "agreement" in output
    assert "1 row(s) not scored: bad_row" in output
    assert f"{data}:4: bad_row: reward math: the row has no ground_truth" in output
    assert f"different sides of 0.5: {data}:3" in output


def test_the_table_of_a_narrow_terminal_folds_names_alone(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = tmp_path / "long.yaml"
    name = "whether-the-answer-is-in-a-box"
    config.write_text(yaml.safe_dump({"rewards": [{**FORMAT, "name": name}]}))
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(config, files[1]).splitlines()
    titles = ["reward", "rows", "mean", "std", "ms", "max", "ms", "agreement", "false", "+/-", "rank", "corr."]
    assert lines[0].split() == titles
    score = next(row for row in range(len(lines)) if lines[row].startswith("score"))
    assert "".join(line.split()[0] for line in lines[1:score]) == name
    assert lines[score].split()[-3:-1] == ["0.250", "0/3"]


def test_overrides_limits_and_other_columns(files: tuple[Path, Path], tmp_path: Path):
    config, _ = files
    data = tmp_path / "other.jsonl"
    data.write_text('{"answer": "a boxed", "human": 0.9}\n{"answer": "b"}\n')
    arguments = ("--response-key", "answer", "--label-key", "human", "--limit", 1, "--json")
    report = json.loads(run(config, data, "rewards.1.pattern='^a'", *arguments))
    assert report["rewards"][1]["mean"] == 1.0
    assert report["rewards"][1]["num_scored"] == report["rewards"][1]["num_labelled"] == 1


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (None, "rewards: "),
        ([{"name": "a", "kind": "maths"}], "rewards.0.kind: expected 'math_rule', 'multiple_choice'"),
        ([{"name": "a"}], "rewards.0.kind: required, and missing"),
        (
            [{**MATH}, {**FORMAT, "patern": "a"}],
            "rewards.1.patern: unknown key of this kind; did you mean `rewards.1.pattern`?",
        ),
        (
            [{**MATH, "pattern": "a"}],
            "rewards.0.pattern: unknown key of this kind; did you mean `rewards.0.answer_pattern`?",
        ),
        (
            [{"name": "boxes", "kind": "detection", "value": "iou"}],
            "rewards.0.value: unknown key of this kind; its keys are `metric`, `max_boxes`, `name`, `weight`,",
        ),
        ([{**FORMAT, "weight": "a"}], "rewards.0.weight: expected a number, got 'a' (a string)"),
        ([], "rewards: name at least one"),
        ([{"name": "f", "kind": "function", "path": f"{FUNCTIONS}:missing"}], "can't be imported"),
        ([{"name": "m", "kind": "reward_model", "model_args": {"model_name_or_path": "/no/such"}}], "no such folder"),
    ],
)
def test_mistakes_are_named_without_a_traceback(files: tuple[Path, Path], rewards: Any, message: str):
    config, data = files
    config.write_text(yaml.safe_dump({"seed": 1} if rewards is None else {"rewards": rewards}))
    output = run(config, data, exit_code=2)
    assert message in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("included", [{"math": "gsm8k"}, {"math": None}, ["gsm8k"]])
def test_values_of_tags_are_those_that_a_run_takes(files: tuple[Path, Path], included: Any):
    config, data = files
    config.write_text(yaml.safe_dump({"rewards": [MATH], "data": {"tag_included": included}}))
    output = run(config, data, exit_code=2)
    assert output.startswith("data.tag_included")
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(
    "envs",
    [{"custom_envs": {"math": {}}}, {"custom_envs": {"math": {}, "code": {}}, "train_env_manager": {"tags": ["math"]}}],
)
def test_all_rows_are_of_the_only_tag_that_is_played(files: tuple[Path, Path], envs: dict[str, Any]):
    """As `DomainRows` assigns them, unless `tag_included` selects rows."""
    config, data = files
    tree = {"rewards": [{**FORMAT, "tags": ["math"]}], **envs}
    config.write_text(yaml.safe_dump(tree))
    assert json.loads(run(config, data, "--json"))["rewards"][0]["num_scored"] == 5
    config.write_text(yaml.safe_dump({**tree, "data": {"tag_included": {"math": ["gsm8k"]}}}))
    report = json.loads(run(config, data, "--json", exit_code=1))
    assert (report["rewards"][0]["num_scored"], report["failures"]) == (4, {"no_reward": 1})


def test_bad_rows_are_named(files: tuple[Path, Path], tmp_path: Path):
    config, _ = files
    data = tmp_path / "bad.jsonl"
    rows = ['{"response": "a"}', "not json", '{"response": 3}', '{"response": "a", "label": "x"}']
    rows += [
        '{"response": "a", "prompt": 3}',
        '{"response": "a", "messages": ["x"]}',
        '{"response": "a", "label": NaN}',
    ]
    data.write_text("\n".join(rows))
    report = json.loads(run(config, data, "--json", exit_code=1))
    assert report["failures"] == {"bad_row": 6}
    assert report["rewards"][1]["num_scored"] == 1
    no_column = tmp_path / "none.jsonl"
    no_column.write_text('{"text": "a"}\n')
    assert "no column 'response' (--response-key); there is text" in run(config, no_column, exit_code=2)
    assert "no such file" in run(config, tmp_path / "missing.jsonl", exit_code=2)


QUESTION = {"role": "user", "content": "Why?"}


def show_prompt(sample: RewardSample) -> float:
    SEEN.append(sample)
    return 1.0


@pytest.fixture
def seen() -> list[RewardSample]:
    SEEN.clear()
    return SEEN


@pytest.mark.parametrize(
    ("columns", "prompt"),
    [
        ({"prompt": "Why?"}, [QUESTION]),
        ({"prompt": [QUESTION]}, [QUESTION]),
        ({"messages": json.dumps([QUESTION])}, [QUESTION]),
        ({"prompt": "[x]"}, [{"role": "user", "content": "[x]"}]),
        ({"messages": None, "prompt": ""}, [{"role": "user", "content": ""}]),
        (
            {"prompt": "Why?", "images": "dot.png"},
            [{"role": "user", "content": [SHOWN, {"type": "text", "text": "Why?"}]}],
        ),
        ({}, []),
    ],
)
def test_a_sample_is_a_runs(
    tmp_path: Path, seen: list[RewardSample], columns: dict[str, Any], prompt: list[dict[str, Any]]
):
    """With the row's other columns alone beside it."""
    config, data = tmp_path / "run.yaml", tmp_path / "answers.jsonl"
    (tmp_path / "dot.png").write_bytes(DOT)
    config.write_text(
        yaml.safe_dump({"rewards": [{"name": "f", "kind": "function", "path": f"{__name__}:show_prompt"}]})
    )
    data.write_text(json.dumps({**columns, "response": "a", "note": 1}))
    run(config, data)
    assert [(sample.prompt, sample.row) for sample in seen] == [(prompt, {"note": 1})]


def test_the_column_of_images_is_the_configurations(tmp_path: Path, seen: list[RewardSample]):
    config, data = tmp_path / "run.yaml", tmp_path / "answers.jsonl"
    rewards = [{"name": "f", "kind": "function", "path": f"{__name__}:show_prompt"}]
    config.write_text(yaml.safe_dump({"rewards": rewards, "data": {"images_key": "picture"}}))
    (tmp_path / "dot.png").write_bytes(DOT)
    rows = [{"prompt": "Why?", "picture": picture, "response": "a"} for picture in ("dot.png", "none.png")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = run(config, data, exit_code=1)
    assert f"{data}:2: images[0]: {tmp_path / 'none.png'} can't be read" in output
    assert [(sample.prompt[0]["content"][0], sample.row) for sample in seen] == [(SHOWN, {})]


def test_a_tables_mappings_are_scored_as_written(tmp_path: Path):
    """A box without a label has none, though others have one."""
    datasets = pytest.importorskip("datasets")
    config, data = tmp_path / "run.yaml", tmp_path / "answers.parquet"
    boxes = [{"bbox_2d": [0, 0, 1, 1], "label": "cat"}, {"bbox_2d": [0, 0, 2, 2]}]
    config.write_text(yaml.safe_dump({"rewards": [{"name": "boxes", "kind": "detection"}]}))
    datasets.Dataset.from_list([{"ground_truth": boxes, "response": json.dumps(boxes)}]).to_parquet(data)
    assert json.loads(run(config, data, "--json"))["rewards"][0]["mean"] == 1.0


def test_rank_correlation_by_hand():
    """Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: rho = 4.5 / sqrt(4.5 * 5)."""
    one, other = np.array([0.0, 0.5, 0.5, 1.0]), np.array([0.0, 0.6, 0.5, 0.9])
    assert rank_correlation(one, other) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert rank_correlation(one, -other) == pytest.approx(-4.5 / np.sqrt(4.5 * 5))
    assert rank_correlation(np.ones(4), other) is None
