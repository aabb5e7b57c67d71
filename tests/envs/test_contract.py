"""Contract of all envs, and an env that breaks each rule."""

import re
import threading
import time
from pathlib import Path

import pytest

from offbeat.envs import registry
from offbeat.envs.contract import check_contract
from offbeat.envs.contract_process import check_in_processes
from tests.envs.sandbox.needs import needs_sandbox

pytestmark = pytest.mark.slow
FAULTY = Path(__file__).parent
SMALL = 16 * 1024

ENVS = [
    ("frozen_lake", {}),
    ("frozen_lake", {"is_slippery": True, "start_goal": "random", "size": 6, "render_mode": "rgb_array"}),
    ("sokoban", {}),
    ("sokoban", {"num_boxes": 2, "dim_room": [6, 8], "observation_format": "grid_coord", "render_mode": "rgb_array"}),
    ("webshop", {"num_products": 100}),
    ("tools", {"env_type": "frozen_lake", "tools": [{"tool_id": "python_code"}]}),
]


@pytest.fixture(autouse=True)
def _faulty_envs_can_be_imported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FAULTY))


@pytest.mark.parametrize(
    ("env_type", "env_config"),
    [pytest.param(*env, marks=needs_sandbox if env[0] == "tools" else ()) for env in ENVS],
)
def test_every_env_meets_the_contract(env_type: str, env_config: dict[str, object]):
    report = check_contract(env_type, env_config)
    assert report.findings == []
    assert report.num_turns > 20
    assert report.bytes_per_env < SMALL, "a worker holds thousands"


def test_every_built_in_env_is_among_those_checked():
    adapters = {"gymnasium", "textarena", "reasoning_gym", "gem", "verifiers", "openenv", "pettingzoo"}
    elsewhere = {"math", "qa", "code", "prompt", "harbor", "scienceworld"} | adapters  # in folders of tests/envs
    assert {env_type for env_type, _ in ENVS} | elsewhere == set(registry.BUILT_IN)


@pytest.mark.parametrize(
    ("faulty", "rule", "message"),
    [
        ("GlobalDraw", "own generator", "`random`: use self.np_random"),
        ("Unseeded", "determinism", "two episodes of seed 0 differ"),
        ("NotText", "text", "observation is a int, not a str"),
        ("NotFinite", "text", "which is not finite"),
        ("FourValues", "text", "not (observation, reward, terminated, truncated, info)"),
        ("Choosy", "any answer", "step('') raised ValueError"),
        ("LeakySplit", "tasks", "also occur in training"),
        ("NoSuchEnv", "settings", "has no attribute 'NoSuchEnv'"),
    ],
)
def test_a_broken_rule_is_reported_with_the_observation(faulty: str, rule: str, message: str):
    problems = check_contract(f"faulty_envs:{faulty}", {}).problems
    assert [problem.rule for problem in problems] == [rule]
    assert message in problems[0].message


def test_a_sound_env_gets_only_advice():
    report = check_contract("faulty_envs:Sound", {})
    assert [(finding.severity, finding.rule) for finding in report.findings] == [("advice", "gymnasium")]
    constant = check_contract("faulty_envs:Constant", {})
    assert "does reset use its seed" in constant.findings[-1].message
    heavy = check_contract("faulty_envs:Heavy", {})
    assert (heavy.findings[-1].severity, heavy.findings[-1].rule) == ("advice", "memory")
    assert re.search(r"each env takes 3\.0 MiB, of which 3\.0 MiB at .*faulty_envs\.py:\d+", heavy.findings[-1].message)


@pytest.mark.parametrize(
    ("env", "rules"), [("WithoutSuccess", ["success"]), ("SuccessOfTheEnd", []), ("SuccessOfASeat", [])]
)
def test_an_env_that_never_reports_success_gets_advice(env: str, rules: list[str]):
    """It is looked for where episodes end."""
    findings = check_contract(f"faulty_envs:{env}", {}).findings
    assert [finding.rule for finding in findings if "`success`" in finding.message] == rules


def test_memory_allocated_by_other_threads_is_not_counted():
    kept, end = [], threading.Event()

    def allocate() -> None:
        while not end.is_set():
            kept.append(bytearray(1 << 16))
            time.sleep(1e-4)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        report = check_contract("faulty_envs:Slow", {})
    finally:
        end.set()
        thread.join()
    assert len(kept) > 32, "2 MiB"
    assert report.bytes_per_env < SMALL


@pytest.mark.parametrize(
    ("faulty", "rule", "message"),
    [
        ("Hashing", "determinism", "episodes of the same seeds differ between processes"),
        ("Hanging", "timeout", r"step\('.*'\) took longer than 10 s; .*faulty_envs.py"),
        ("LeavingAThread", "timeout", "the end of the process took longer than 10 s"),
        ("LeavingAProcess", "process", "exit code 4"),
        ("Dying", "process", "ended the process: exit code 3"),
    ],
)
def test_problems_visible_only_across_processes_are_found(
    faulty: str, rule: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    start = time.monotonic()
    # A limit that only what hangs exceeds: starting and ending a process takes over a second on a busy machine
    limit_s = 10 if rule == "timeout" else 30
    problems = check_in_processes(f"faulty_envs:{faulty}", {}, limit_s=limit_s).problems
    assert [problem.rule for problem in problems] == [rule]
    assert re.search(message, problems[0].message)
    assert time.monotonic() - start < 55, "what the env left sleeps for 60 s"


def test_what_an_env_prints_is_no_part_of_its_report():
    assert check_in_processes("faulty_envs:Printing", {}).problems == []


def test_a_long_check_says_where_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.envs.contract_process.PROGRESS_INTERVAL_S", 0.1)
    shown: list[str] = []
    check_in_processes("faulty_envs:Hanging", {}, limit_s=5, on_progress=shown.append)
    assert re.fullmatch(r"\d+ s: \d calls, now step\('.*'\)", shown[-1])
