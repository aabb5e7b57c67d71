"""Episodes of tasks in Harbor's format."""

import json

import pytest

from offbeat.envs.harbor.config import FENCED
from offbeat.envs.tools.functions import Call, read_results, write_calls
from tests.envs.harbor.task_folder import TaskFolder, needs_shell

pytestmark = needs_shell
STEPS = """
multi_step_reward_strategy = "{strategy}"
[[steps]]
name = "one"
min_reward = {least}
[[steps]]
name = "two"
"""


def play(env, *answers: str):
    env.reset(seed=0)
    try:
        return [env.step(answer) for answer in answers][-1]
    finally:
        env.close()


def test_commands_are_answered_and_the_verifier_has_the_last_word(task_folder: TaskFolder):
    env = task_folder.env()
    assert env.reset(seed=0)[0] == "do it"
    assert env.step("echo 0.25 > answer; pwd")[:4] == ("/app", 0.0, False, False)
    assert env.step("cd /tmp")[0] == "(no output)"
    assert env.step("cat nothing")[0] == "cat: nothing: No such file or directory\n[exit code 1]"
    _, reward, terminated, _, info = env.step("submit")
    assert (reward, terminated, info["success"], info["submitted"], info["verifier_failed"]) == (
        0.25,
        True,
        False,
        True,
        False,
    )
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("ls")


def test_the_verifier_runs_when_answers_or_time_run_out(task_folder: TaskFolder):
    _, reward, terminated, _, info = play(task_folder.env(max_steps=1), "echo 1 > answer")
    assert (reward, terminated, info["submitted"]) == (1.0, True, False)
    slow = TaskFolder(task_folder.path.parent / "slow")
    slow.write("task.toml", "[agent]\ntimeout_sec = 5.0\n")
    _, reward, terminated, _, _ = play(slow.env(max_steps=9), "echo 1 > answer; sleep 60")
    assert (reward, terminated) == (1.0, True)


def test_answers_without_a_command_cost_the_format_penalty(task_folder: TaskFolder):
    settings = {"action_pattern": "```bash\n(.*?)```", "format_penalty": -0.1}
    env = task_folder.env(**settings)
    env.reset(seed=0)
    observation, reward, _, _, info = env.step("let me think")
    assert (observation, reward, info["action_is_valid"]) == ("(no command)", -0.1, False)
    assert env.step("first ```bash\necho a\n``` then ```bash\necho b\n```")[0] == "b", "the last one counts"
    env.close()


def test_blocks_of_other_languages_are_no_command(task_folder: TaskFolder):
    env = task_folder.env(action_pattern=FENCED)
    env.reset(seed=0)
    assert env.step("It has:\n```text\na\n```\nso I run\n```Bash\necho b\n```")[0] == "b"
    assert env.step("It has:\n```text\na\n```\nand\n```python\nprint(1)\n```")[0] == "(no command)"
    env.close()


def test_a_prompt_has_no_unfilled_field(task_folder: TaskFolder):
    for function_calling in ("prompt", "template"):
        assert "{" not in task_folder.env(function_calling=function_calling).system_prompt


def test_functions_in_the_templates_format(task_folder: TaskFolder):
    env = task_folder.env(function_calling="template")
    assert [function["function"]["name"] for function in env.functions] == ["bash", "submit"]
    env.reset(seed=0)
    calls = [Call("bash", {"command": f"echo {text}"}) for text in ("a", "1 > answer")]
    assert read_results(env.step(write_calls("", calls))[0], 2) == ["a", "(no output)"]
    assert env.step(write_calls("done", [Call("submit", {})]))[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("python", {"code": "print(1)"}, "there is no function 'python'; there is bash, submit"),
        ("execute", {"command": "pwd"}, "there is no function 'execute'; there is bash, submit"),
        ("bash", {"cmd": "pwd"}, "bash needs the argument 'command', a text"),
        ("bash", {"command": ["ls", "-la"]}, "bash needs the argument 'command', a text"),
    ],
)
def test_a_call_that_is_none_of_bash_is_answered_and_not_run(
    task_folder: TaskFolder, name: str, arguments: dict[str, object], says: str
):
    env = task_folder.env(function_calling="template", format_penalty=-0.1)
    env.reset(seed=0)
    calls = [Call("bash", {"command": "echo a"}), Call(name, arguments)]
    observation, reward, terminated, _, info = env.step(write_calls("", calls))
    assert read_results(observation, 2) == ["a", says]
    assert (reward, terminated, info["action_is_valid"]) == (-0.1, False, False)
    env.close()


def test_several_rewards_train_one_and_report_the_others(task_folder: TaskFolder):
    task_folder.write(
        "tests/test.sh", "cat /tests/r.json > /logs/verifier/reward.json; echo 9 > /logs/verifier/reward.txt"
    )
    task_folder.write("tests/r.json", json.dumps({"style": 0.5, "correct": 1}))
    _, reward, _, _, info = play(task_folder.env(reward_key="correct"), "submit")
    assert (reward, info["success"], info["reward_style"]) == (1.0, True, 0.5)
    with pytest.raises(ValueError, match=r"no reward 'reward'; it has style, correct"):
        play(task_folder.env(), "submit")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("exit 3", "wrote neither reward.txt nor reward.json (exit code 3"),
        ("echo nan > /logs/verifier/reward.txt", "not a finite number"),
        ("echo x > /logs/verifier/reward.txt", "could not convert string to float"),
        ('echo \'{"a": "b"}\' > /logs/verifier/reward.json', "a is 'b', not a finite number"),
        ("ln -s /app/answer /logs/verifier/reward.txt", "Too many levels of symbolic links"),
        ("sleep 60", "took too long"),
    ],
)
def test_a_failing_verifier_is_a_reward_of_zero(task_folder: TaskFolder, script: str, error: str):
    task_folder.write("tests/test.sh", script)
    observation, reward, terminated, _, info = play(
        task_folder.env(max_verifier_timeout_s=0.5 if script == "sleep 60" else 60.0), "echo 1 > answer", "submit"
    )
    assert (reward, terminated, info["success"], info["verifier_failed"]) == (0.0, True, False, True)
    assert error in observation


def test_verifiers_and_commands_get_their_variables(task_folder: TaskFolder):
    task_folder.write("task.toml", '[environment.env]\nA = "1"\nB = "${HOME:-two}"\n[verifier.env]\nC = "3"\n')
    task_folder.write("tests/test.sh", 'echo "$A" > /logs/verifier/reward.txt; [ "$B$C$MINE" = two3 ]')
    env = task_folder.env()
    env.reset(seed=0)
    assert env.step("echo $A $B $C; export MINE=1")[0] == "1 two"
    assert env.step("submit")[1] == 1.0


def write_steps(task_folder: TaskFolder, strategy: str, least: float) -> None:
    task_folder.write("task.toml", STEPS.format(strategy=strategy, least=least))
    for name in ("one", "two"):
        task_folder.write(f"steps/{name}/instruction.md", f"<!-- canary -->\n\nstep {name}\n")
        task_folder.write(f"steps/{name}/workdir/given.txt", name)
    task_folder.write("steps/two/tests/test.sh", "cat /tests/shared > /logs/verifier/reward.txt")
    task_folder.write("tests/shared", "0.5")
    task_folder.write("steps/one/workdir/setup.sh", "echo set up > /app/made")


@pytest.mark.parametrize(("strategy", "reward"), [("mean", 0.75), ("final", 0.5)])
def test_steps_are_played_in_order_and_combined(task_folder: TaskFolder, strategy: str, reward: float):
    write_steps(task_folder, strategy, 1.0)
    env = task_folder.env()
    assert env.reset(seed=0)[0] == "step one"
    assert env.step("cat made given.txt; echo 1 > answer")[0] == "set up\none"
    assert env.step("submit")[:3] == ("step two", 0.0, False)
    assert env.step("cat given.txt; ls -A /tests /logs/verifier")[0] == "two/logs/verifier:\n\n/tests:"
    assert env.step("submit")[1:3] == (reward, True)


def test_what_a_policy_left_that_fails_the_next_steps_set_up_is_a_verdict(task_folder: TaskFolder):
    """Its own doing must not be a failure of the infrastructure, which is repeated."""
    write_steps(task_folder, "mean", 1.0)
    task_folder.write("steps/two/workdir/setup.sh", "set -e; test ! -e given.trap; echo set up > made")
    task_folder.write("tests/test.sh", "echo 1 > /logs/verifier/reward.txt")
    observation, reward, terminated, _, info = play(task_folder.env(), "echo 1 > answer; touch given.trap", "submit")
    assert (reward, terminated, info["verifier_failed"], info["success"]) == (0.5, True, True, False)
    assert observation.startswith("two/setup.sh failed")


def test_a_step_below_its_least_reward_ends_the_task(task_folder: TaskFolder):
    write_steps(task_folder, "mean", 0.6)
    assert play(task_folder.env(), "echo 0.4 > answer", "submit")[1:3] == (0.4, True)


def test_steps_that_answers_did_not_reach_count_as_zero(task_folder: TaskFolder):
    write_steps(task_folder, "mean", 0.0)
    assert play(task_folder.env(max_steps=2), "echo 1 > answer", "submit")[1:3] == (0.5, True)


def test_a_dockerfiles_folders_files_and_commands_are_carried_out(task_folder: TaskFolder):
    task_folder.write("environment/data/in.txt", "text")
    task_folder.write("environment/run.sh", "echo ran")
    lines = [
        "FROM python:3.12-slim",
        "# a comment",
        "ARG PLACE=/data",
        "ENV GREETING='hello there' NAME=$PLACE/x",
        "WORKDIR /srv/site",
        "COPY data $PLACE/",
        "COPY --chmod=755 run.sh ./bin/run",
        "ENV PATH=/srv/site/bin:$PATH",
        "RUN mkdir -p made && \\",
        "    echo $NAME > made/name",
        'RUN ["touch", "made/file"]',
        'CMD ["sleep", "infinity"]',
    ]
    task_folder.write("environment/Dockerfile", "\n".join(lines))
    env = task_folder.env()
    env.reset(seed=0)
    seen = env.step("pwd; echo $GREETING; cat /data/in.txt; echo; run; cat made/name; ls made")[0]
    assert seen.split("\n") == ["/srv/site", "hello there", "text", "ran", "/data/x", "file", "name"]
    env.close()


def test_a_build_that_fails_here_names_task_command_and_output(task_folder: TaskFolder):
    task_folder.write("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nRUN cat /missing\n")
    with pytest.raises(
        RuntimeError, match=r"set/example: RUN cat /missing failed here with exit code 1: .*No such file"
    ):
        task_folder.env().reset(seed=0)
