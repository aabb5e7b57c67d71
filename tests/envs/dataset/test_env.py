import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from offbeat.envs import registry
from offbeat.envs.contract import check_contract
from offbeat.envs.dataset.code import FENCED, CodeConfig, read_tests
from offbeat.envs.dataset.env import last_group
from offbeat.envs.dataset.rows import load_rows
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig
from offbeat.services.rollout.tasks import EvalTasks
from tests.envs.sandbox.needs import needs_sandbox


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(60)]
    return write(tmp_path_factory.mktemp("math") / "sums.jsonl", rows)


def make(env_type: str, **settings: Any) -> Any:
    return registry.make(env_type, settings)


def judged(env: Any, answer: str) -> tuple[float, bool, bool]:
    _, reward, terminated, _, info = env.step(answer)
    assert terminated
    return reward, info["success"], info["action_is_valid"]


def test_the_env_over_a_file_meets_the_contract(sums: str):
    report = check_contract("math", {"dataset_name": sums})
    assert report.findings == []
    assert 0 < report.bytes_per_env < 16 * 1024, "a worker holds thousands over one file"


def test_a_file_that_changed_is_read_again(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    for question in ("old", "edited"):
        env = make("qa", dataset_name=write(path, [{"question": question, "answer": "1"}]), split="any")
        assert env.reset(seed=0)[0] == question
    assert make("qa", dataset_name=str(path), split="any")._rows is env._rows


def test_training_draws_rows_by_seed_and_never_a_held_out_one(sums: str):
    env = make("math", dataset_name=sums)
    questions = [env.reset(seed=seed)[0] for seed in range(200)]
    other = make("math", dataset_name=sums)
    assert questions == [other.reset(seed=seed)[0] for seed in range(200)]
    held_out = make("math", dataset_name=sums, split="held_out")
    held_out_questions = {held_out.reset(seed=seed)[0] for seed in range(200)}
    assert len(held_out_questions) + len(set(questions)) <= 60
    assert not held_out_questions & set(questions)


class Tasks:
    train_env_manager = EnvManagerConfig()
    val_env_manager = EnvManagerConfig(group_size=1)

    def __init__(self, env: CustomEnv) -> None:
        self.custom_envs = {"Math": env}


def test_evaluation_covers_the_validation_file_before_repeating(sums: str, tmp_path: Path):
    val = write(tmp_path / "val.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(10)])
    settings = {"dataset_name": sums, "val_dataset_name": val}
    tasks = EvalTasks(Tasks(CustomEnv(env_type="math", env_config=settings)), seed=3)
    env = make("math", **settings, split="held_out")
    questions = [env.reset(seed=tasks.task(number).seed)[0] for number in range(20)]
    assert sorted(questions[:10]) == sorted(f"q{i}" for i in range(10))
    assert questions[10:] == questions[:10]
    assert make("math", **settings).reset(seed=0)[0].startswith("What is")


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("0.5", r"so it is \boxed{\frac{1}{2}}", True),
        (r"\frac{1}{2}", r"\boxed{3} no, \boxed{0.5}", True),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^2}", True),
        ("12", r"\boxed{13}", False),
        ("12", r"\boxed{}", False),
        (r"\boxed{7}", r"$a}$ then \boxed{7} and {so} on", True),
    ],
)
def test_math_compares_expressions_and_the_last_boxed_one_counts(tmp_path: Path, gold: str, answer: str, right: bool):
    path = write(tmp_path / "one.jsonl", [{"problem": "?", "solution": gold}])
    env = make("math", dataset_name=path, question_key="problem", answer_key="solution", split="any")
    env.reset(seed=0)
    assert judged(env, answer) == (float(right), right, True)


def test_a_response_without_an_answer_costs_the_penalty(sums: str):
    env = make("math", dataset_name=sums, format_penalty=-0.2)
    env.reset(seed=0)
    assert judged(env, "it is 12") == (-0.2, False, False)


def test_questions_and_answers_are_compared_as_squad_does(tmp_path: Path):
    rows = [{"question": "Who?", "answer": ["The Beatles", "Beatles band"]}]
    settings = {"dataset_name": write(tmp_path / "qa.jsonl", rows), "split": "any"}
    env = make("qa", **settings)
    env.reset(seed=0)
    assert judged(env, "beatles!") == (1.0, True, True)
    assert judged(env, "a band") == (0.0, False, True)
    fuzzy = make("qa", **settings, metric="f1", answer_pattern="<answer>(.*?)</answer>")
    fuzzy.reset(seed=0)
    assert judged(fuzzy, "hm <answer>the band</answer>") == (pytest.approx(2 / 3), False, True)
    assert judged(fuzzy, "the band")[2] is False


CODE = "```python\ndef double(x):\n    return {}\n```"


@needs_sandbox
def test_programs_are_run_against_their_tests(tmp_path: Path):
    rows = [{"question": "double", "tests": ["assert double(2) == 4", "assert double(0) == 0"]}]
    settings = {"dataset_name": write(tmp_path / "code.jsonl", rows), "split": "any"}
    env = make("code", **settings)
    env.reset(seed=0)
    assert judged(env, "so:\n" + CODE.format("2 * x")) == (1.0, True, True)
    half, _, _, _, info = env.step(CODE.format("4 if x else 1"))
    assert (half, info["pass_rate"]) == ("AssertionError", 0.5)
    assert judged(env, "return 2 * x") == (0.0, False, False)
    partial = make("code", **settings, reward="pass_rate")
    partial.reset(seed=0)
    assert judged(partial, CODE.format("x * x")) == (1.0, True, True)
    assert judged(partial, CODE.format("x + 2")) == (0.5, False, True)


@needs_sandbox
@pytest.mark.parametrize(
    ("limits", "error"), [({"timeout_s": 1}, "out of time"), ({"timeout_s": 100, "cpu_s": 1}, "exit code -9")]
)
def test_a_program_that_is_slow_in_every_test_is_wrong_within_max_total_s(
    limits: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One that is right in every test is not cut short."""
    monkeypatch.setattr("offbeat.envs.dataset.program_checker.END_TIMEOUT_S", 60.0)
    rows = [{"question": "double", "tests": ["assert double(2) == 4"] * 10}]
    settings = {"dataset_name": write(tmp_path / "code.jsonl", rows), "split": "any", "reward": "pass_rate"}
    env = make("code", **settings, max_total_s=0.01, sandbox=limits)
    env.reset(seed=0)
    num_started = 0
    run_test = env._run_test

    def count(*test: Any) -> str:
        nonlocal num_started
        num_started += 1
        return run_test(*test)

    env._run_test = count
    observation, reward, *_ = env.step(CODE.format("all(1 for _ in iter(int, 1))"))
    assert (observation, reward, num_started) == (error, 0.0, 1)
    patient = make("code", **settings, max_total_s=0.01, sandbox={**limits, "timeout_s": 60})
    patient.reset(seed=0)
    assert judged(patient, CODE.format("2 * x")) == (1.0, True, True)


@needs_sandbox
def test_programs_may_read_stdin_and_print(tmp_path: Path):
    tests = json.dumps({"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]})
    path = write(tmp_path / "apps.jsonl", [{"question": "add", "tests": tests}])
    env = make("code", dataset_name=path, split="any")
    env.reset(seed=0)
    assert judged(env, "```py\nprint(sum(map(int, input().split())))\n```")[0] == 1.0
    feedback = env.step("```\nprint(3)\n```")[0]
    assert feedback == "printed '3\\n', not '10'"


@needs_sandbox
def test_a_long_output_is_compared_whole(tmp_path: Path):
    output = "\n".join(map(str, range(4000)))
    path = write(tmp_path / "apps.jsonl", [{"question": "count", "tests": {"inputs": ["4000"], "outputs": [output]}}])
    env = make("code", dataset_name=path, split="any")
    env.reset(seed=0)
    assert judged(env, "```py\nfor n in range(int(input())):\n    print(n)\n```") == (1.0, True, True)
    assert judged(env, "```py\nfor n in range(int(input())):\n    print(max(n, 1))\n```") == (0.0, False, True)


@needs_sandbox
@pytest.mark.parametrize("name", ["double", "Solution.double"])
def test_programs_may_be_tested_by_calls_of_a_function(tmp_path: Path, name: str):
    tests = json.dumps({"fn_name": name, "inputs": [[2], [[1]]], "outputs": [4, [1, 1]]})
    env = make("code", dataset_name=write(tmp_path / "apps.jsonl", [{"question": "?", "tests": tests}]), split="any")
    env.reset(seed=0)
    method = "```python\nclass Solution:\n    def double(self, x):\n        return {}\n```"
    program = CODE if name == "double" else method
    assert judged(env, program.format("2 * x")) == (1.0, True, True)
    assert judged(env, program.format("x * x if x == 2 else x")) == (0.0, False, True)


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "program"),
    [
        ({"inputs": [["1 2", "3"]], "outputs": [["1 2", "3"]]}, "```py\nprint(input())\nprint(input())\n```"),
        ({"fn_name": "double", "inputs": [[2], [3]], "outputs": [[4], [6]]}, CODE.format("2 * x")),
    ],
)
def test_values_in_lists_as_apps_has_them(tmp_path: Path, tests: dict[str, Any], program: str):
    env = make("code", dataset_name=write(tmp_path / "apps.jsonl", [{"question": "?", "tests": tests}]), split="any")
    env.reset(seed=0)
    assert judged(env, program) == (1.0, True, True)


def test_a_function_of_calls_has_a_name():
    with pytest.raises(ValueError, match="'f; print' is no function's name"):
        read_tests({"fn_name": "f; print", "inputs": [[1]], "outputs": [1]})


def test_parquet_csv_and_saved_folders_are_read(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"question": ["a", "b"], "answer": ["1", "2"]})
    table.to_parquet(tmp_path / "t.parquet")
    table.to_csv(tmp_path / "t.csv", index=False)
    table.save_to_disk(tmp_path / "saved")
    for name in ("t.parquet", "t.csv", "saved"):
        assert make("qa", dataset_name=str(tmp_path / name), split="any").reset(seed=1)[0] in ("a", "b")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"holds the splits train: name one"):
        make("qa", dataset_name=str(tmp_path / "splits"))


@pytest.mark.parametrize(
    ("answers", "answer"),
    [
        (["2023-01-05", "2021-02-07"], "2021-02-07"),
        ([["2023-01-05"], ["2021-02-07"]], "2021-02-07"),
        (["2023-01-05T10:00:00Z", "2021-02-07T10:00:00Z"], "2021-02-07T10:00:00Z"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_dates_of_json_files_stay_texts(answers: list[Any], answer: str, suffix: str, tmp_path: Path):
    rows = [{"question": str(i), "answer": each, "more": {"year": 2000 + i}} for i, each in enumerate(answers)]
    path = tmp_path / f"dates{suffix}"
    path.write_text(json.dumps(rows, indent=1) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    env = make("qa", dataset_name=str(path), split="any")
    rewards = {env.reset(seed=seed)[0]: judged(env, answer)[0] for seed in range(20)}
    assert rewards == {"0": 0.0, "1": 1.0}
    assert env.row["more"]["year"] >= 2000


@pytest.mark.parametrize(
    ("cells", "answer", "others"),
    [
        (["02108", "2109"], "02108", ["2108"]),
        (["NA", "NA"], "NA", ["None", ""]),
        (["None", "None"], "None", ["", "NA"]),
        (["NA", "12"], "NA", ["None"]),
        (["1.10", "1.2"], "1.10", ["1.1"]),
        (["5.0", "2.5"], "5", []),
        (["true", "false"], "true", []),
    ],
)
def test_cells_of_csv_files_are_compared_as_written(cells: list[str], answer: str, others: list[str], tmp_path: Path):
    path = tmp_path / "cells.csv"
    path.write_text("question,answer,n\n" + "".join(f"{i},{cell},{i}\n" for i, cell in enumerate(cells)))
    env = make("qa", dataset_name=str(path), split="any")
    while env.reset()[0] != "0":
        pass
    assert env.row["n"] == 0
    assert judged(env, answer)[0] == 1.0
    assert [judged(env, other)[0] for other in others] == [0.0] * len(others)


def test_bools_of_csv_files_may_have_empty_cells(tmp_path: Path):
    path = tmp_path / "flags.csv"
    path.write_text("question,answer,verified,checked\na,1,True,false\nb,2,,NA\nc,3,False,true\n")
    rows = load_rows(path, "question", "answer", "any")
    assert [(rows[i]["verified"], rows[i]["checked"]) for i in range(3)] == [(True, False), (None, None), (False, True)]


@pytest.mark.parametrize("key", ["question", "answer"])
def test_a_row_without_question_or_answer_is_named(key: str, tmp_path: Path):
    rows = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"} | {key: None}]
    with pytest.raises(ValueError, match=rf"rows.jsonl row 2: '{key}' is missing"):
        make("math", dataset_name=write(tmp_path / "rows.jsonl", rows), split="any")


def test_unreadable_data_is_reported_with_a_correction(sums: str, tmp_path: Path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{nope")
    (tmp_path / "notes.md").write_text("x")
    for settings, message in (
        ({"dataset_name": "/nowhere.jsonl"}, "no such file: /nowhere.jsonl"),
        ({"dataset_name": sums, "question_key": "problem"}, "no column 'problem'; it has question, answer"),
        ({"dataset_name": str(tmp_path / "notes.md")}, "is none of .jsonl"),
        ({"dataset_name": str(broken)}, "can't be read"),
        ({"dataset_name": sums, "prompt": "hello"}, "has no {question}: the policy"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make("math", **settings)


def test_a_row_is_drawn_from_all_of_them(sums: str):
    env = make("math", dataset_name=sums, split="any")
    counts = np.bincount([int(env.task_id(seed).rpartition(":")[2]) for seed in range(1200)], minlength=60)
    assert counts.min() > 4


def test_a_match_without_the_group_is_no_answer():
    pattern = r"<answer>(.*?)</answer>|I give up"
    assert last_group(pattern, "well, I give up") is None
    assert last_group(pattern, "<answer>4</answer>, or I give up") == "4"


@pytest.mark.parametrize(
    "answer",
    [
        "Input:\n```text\n1 2\n```\nSolution:\n```python\nprint(1)\n```",
        "```python\nprint(1)\n```\nprints\n```text\n1\n```",
        "```cpp title=a.cpp\nint main() {}\n```\n```py\nprint(1)\n```",
        "```json\nnever closed\n\n```python\nprint(1)\n```",
        "Run ```pip``` first:\n```python\nprint(1)\n```",
        "```\nprint(0)\n```\n```Python3 \nprint(1)\n```",
        "```python\r\nprint(1)\r\n```",
    ],
)
def test_blocks_of_other_languages_are_no_program(answer: str):
    assert last_group(FENCED, answer) == "print(1)"


def test_an_answer_with_blocks_of_other_languages_alone_has_no_program():
    assert last_group(FENCED, "```text\n1\n```\nand\n```bash\nls\n```") is None


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ([], "the task has no tests"),
        ({"inputs": [], "outputs": []}, "the task has no tests"),
        (["assert f(1) == 2", "def check(f):\n    assert f(1) == 2"], "asserts and calls nothing"),
        ("", "the task has no tests"),
        (["", "# edge cases"], "the task has no tests"),
        ({"fn_name": "f", "inputs": [{"x": 1}], "outputs": [2]}, "the arguments of f are named: give a list"),
    ],
)
def test_a_task_without_usable_tests_is_reported(tests: object, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_tests(tests)


def test_empty_lines_beside_tests_are_no_tests():
    assert [test for test, *_ in read_tests(["assert f(1) == 2", "", " \n# edge cases"])] == ["assert f(1) == 2"]


def test_a_program_runs_at_least_one_test():
    with pytest.raises(ValidationError, match="max_tests"):
        CodeConfig.model_validate({"dataset_name": "tasks.jsonl", "max_tests": 0})
