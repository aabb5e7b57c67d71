import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.play.parquet import read_parquet
from offbeat.services.messages.codec import encode_trajectories
from offbeat.services.messages.types import (
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)
from offbeat.trainer.learner.evaluation_metrics import pass_at_k


def offbeat(*arguments: object, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Path:
    out = folder / "r.parquet"
    done = offbeat(
        "rollout", folder / "run.yaml", "--agent", folder / "policy", "--episodes", 12, "--group-size", 4, "--out", out
    )
    assert done.exit_code == 0, done.output
    assert "mean of 12 episodes" in done.output
    assert "pass@1 " in done.output
    assert "pass@4 " in done.output
    return out


def test_a_person_plays_and_sees_observation_reward_and_why_it_ended():
    done = offbeat("play", "frozen_lake", "--seed", 1, typed="Right\nSideways\nDown\nDown\n")
    assert done.exit_code == 0, done.output
    assert "P _ _ _\nO _ _ O\nO O _ _\n_ O _ G\n0 0 Left # Down O Right _ Up #" in done.output
    assert "action_is_valid 0" in done.output
    assert "terminated  reward -0.1" in done.output
    assert "<|im_start|>" not in done.output


def test_a_person_is_offered_functions_and_calls_one(tmp_path: Path):
    (tmp_path / "c.txt").write_text("red tea is in the first house\nmilk is in the second house\n")
    tools = f"tools=[{{tool_id: search, corpus: {tmp_path / 'c.txt'}, top_k: 1}}]"
    call = '<tool_call> {"name": "search", "arguments": {"query": "milk"}} </tool_call>'
    done = offbeat(
        "play", "tools", "env_type=frozen_lake", "function_calling=template", tools, typed=f"{call}\nRight\n"
    )
    assert done.exit_code == 0, done.output
    assert "<tool_response>\n[1] milk is in the second house\n</tool_response>" in done.output
    assert 'function   {"name": "search", ' in done.output
    assert "tool_use_counter 1  tool_success_counter 1" in done.output


def test_whoever_leaves_early_is_let_go():
    done = offbeat("play", "frozen_lake", "--seed", 1, typed="Right\n")
    assert (done.exit_code, "left before the end" in done.output) == (0, True)


def test_a_random_agent_does_the_same_for_the_same_seed_and_is_drawn(tmp_path: Path):
    play = ("play", "sokoban", "dim_room=[5, 5]", "--agent", "random", "--max-steps", 4, "--seed", 3)
    first = offbeat(*play, "--render", tmp_path / "x.gif")
    assert first.exit_code == 0, first.output
    assert offbeat(*play, "--render", tmp_path / "x.html").output == first.output.replace(".gif", ".html")
    assert (tmp_path / "x.gif").read_bytes()[:4] == b"GIF8"
    assert "data:image/png" in (tmp_path / "x.html").read_text()


def test_a_packaged_configuration_is_found_by_name_unless_an_env_has_it():
    done = offbeat("play", "quickstart", "--agent", "random", "--max-steps", 2)
    assert done.exit_code == 0, done.output
    assert "no tag 'Boxes'; there is FrozenLake" in offbeat("play", "quickstart", "--tag", "Boxes").output
    assert "env_config.dim_room" in offbeat("play", "sokoban", "dim_rooms=3").output


def test_a_policy_shows_the_exact_tokens_of_prompt_and_completion(folder: Path):
    done = offbeat("play", folder / "run.yaml", "--agent", folder / "policy", "--seed", 5)
    assert done.exit_code == 0, done.output
    assert "2:'<|im_start|>' 4:'system' 7:'Push' 8:'X' 9:'to' 10:'O' 11:'.' 3:'<|im_end|>'" in done.output
    assert done.output.count("completion ") == 3
    assert "max_steps  reward" in done.output
    assert (
        offbeat("play", folder / "run.yaml", "--agent", "policy", folder / "policy", "--seed", 5).output == done.output
    )


def test_recorded_logprobs_are_those_of_the_model_for_the_recorded_tokens(folder: Path, recorded: Path):
    model = AutoModelForCausalLM.from_pretrained(folder / "policy").eval()
    for episode in read_parquet(recorded)[:6]:
        tokens = torch.tensor([episode.tokens])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(-1, tokens[0, 1:, None]).squeeze(-1)
        mask = torch.tensor(episode.loss_mask)[1:]
        assert mask.sum() > 0
        torch.testing.assert_close(torch.tensor(episode.logprobs)[1:][mask], expected[mask], atol=1e-4, rtol=1e-4)
        assert not torch.tensor(episode.logprobs)[1:][~mask].any()


def test_a_group_shares_its_task_and_groups_do_not(recorded: Path):
    episodes = read_parquet(recorded)
    assert [(episode.group, episode.member) for episode in episodes] == [(g, m) for g in range(3) for m in range(4)]
    assert len({episode.seed for episode in episodes}) == 3
    assert len({str(episode.messages[:2]) for episode in episodes}) == 3


def test_training_tasks_are_others_than_those_of_evaluation(folder: Path, recorded: Path, tmp_path: Path):
    out = tmp_path / "train.parquet"
    command = ("rollout", folder / "run.yaml", "--agent", "random", "--episodes", 8, "--split", "train", "--out", out)
    done = offbeat(*command)
    assert done.exit_code == 0, done.output
    train = {str(episode.messages[:2]) for episode in read_parquet(out)}
    assert not train & {str(episode.messages[:2]) for episode in read_parquet(recorded)}
    assert all(episode.stop_reason in ("max_steps", "terminated") for episode in read_parquet(out))


@pytest.mark.parametrize(
    ("arguments", "is_greedy"),
    [
        (("actor_infer.generating_args.temperature=0",), False),
        (("+val_env_manager.generating_args.temperature=0",), True),
        (("--temperature", 0), True),
        (("--split", "train", "actor_infer.generating_args.temperature=0"), True),
        (("--split", "train", "+val_env_manager.generating_args.temperature=0"), False),
        (("--split", "train", "--temperature", 0), True),
    ],
)
def test_each_split_is_sampled_as_in_the_run(
    folder: Path, tmp_path: Path, arguments: tuple[object, ...], is_greedy: bool
):
    out = tmp_path / "r.parquet"
    command = ("rollout", folder / "run.yaml", "--agent", folder / "policy", "--episodes", 4, "--group-size", 4)
    done = offbeat(*command, "--out", out, *arguments)
    assert done.exit_code == 0, done.output
    assert (len({tuple(episode.tokens) for episode in read_parquet(out)}) == 1) == is_greedy


@pytest.mark.parametrize(("color", "says"), [("logprob", "red"), ("version", "versions 0"), ("mask", "green")])
def test_inspect_shows_tokens_in_the_colour_that_is_asked_for(recorded: Path, color: str, says: str):
    done = offbeat("inspect", recorded, "--color", color, "--episode", 2)
    assert done.exit_code == 0, done.output
    assert says in done.output
    assert "<|im_start|> user # # # # #" in done.output
    assert "== episode 2: Boxes" in done.output
    assert "episode 1" not in done.output


def test_inspect_shows_a_runs_evaluation_token_by_token(folder: Path, tmp_path: Path):
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "policy").symlink_to(folder / "policy")
    tokens = np.array([2, 4, 7, 3, 9], dtype=np.int32)
    mask = np.array([False, False, False, False, True])
    segment = Segment(tokens, mask, np.where(mask, -0.5, 0).astype(np.float32), (VersionSpan(4, 5, 8),))
    trajectory = Trajectory(
        "after-sampled-8", 0, 0, "Boxes", 3, (segment,), (Turn(0, 4, 5, 1.0),), StopReason.TERMINATED, {"success": 1.0}
    )
    file = tmp_path / "evaluations" / "after-sampled-8.trajectories"
    file.write_bytes(encode_trajectories([trajectory, trajectory]))
    done = offbeat("inspect", tmp_path, "--color", "version", "--limit", 1)
    assert done.exit_code == 0, done.output
    assert "evaluations/after-sampled-8.trajectories" in done.output
    assert "2 episodes; colour: versions 8" in done.output
    assert "<|im_start|> system Push <|im_end|> to" in done.output
    assert "5 tokens, 1 sampled; rewards 1" in done.output
    file.write_bytes(b"broken")
    assert "not a trajectories message" in offbeat("inspect", tmp_path).output


def test_inspect_shows_the_evaluations_of_a_run(tmp_path: Path):
    (tmp_path / "evaluations").mkdir()
    row = '{"tag": "T", "seed": 1, "reward": 1.0, "metrics": {"success": 1.0}, "text": ["sys", "see", "do"]}'
    (tmp_path / "evaluations" / "after-sampled-5.jsonl").write_text(row)
    done = offbeat("inspect", tmp_path)
    assert "== episode 0: T, seed 1: reward 1, success ==\nsys\nsee\ndo" in done.output


FLAKY = """
import gymnasium
class Flaky(gymnasium.Env):
    steps = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "a", {}
    def step(self, action):
        Flaky.steps += 1
        if Flaky.steps % 3 == 0:
            raise KeyError("boom")
        return "a", 1.0, Flaky.steps > 20, False, {"success": True}
"""


@pytest.mark.parametrize(("rule", "num_rows"), [("", 6), (", on_env_error: {reward: -1}", 8)])
def test_an_error_of_an_env_costs_one_random_episode(
    rule: str, num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = f"flaky_{num_rows}"
    (tmp_path / f"{name}.py").write_text(FLAKY)
    monkeypatch.syspath_prepend(str(tmp_path))
    run, out = tmp_path / "run.yaml", tmp_path / "out.jsonl"
    run.write_text(
        f"exp_name: own\noutput_dir: {tmp_path / 'runs'}\n"
        f"custom_envs: {{F: {{env_type: '{name}:Flaky', max_steps: 1, max_tokens_per_step: 2{rule}}}}}\n"
        "train_env_manager: {num_env_groups: 4, group_size: 2}\nrollout_batch_size: 8\nmax_steps: 10\n"
    )
    done = offbeat("rollout", run, "--agent", "random", "--episodes", 8, "--out", out)
    assert done.exit_code == 0, done.output
    assert ("2 episodes could not be played: step_error: KeyError: 'boom'" in done.output) == (num_rows < 8)
    rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
    assert len(rewards) == num_rows
    assert rewards.count(-1.0) == (2 if num_rows == 8 else 0)


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_a_rollout_without_an_episode_fails_and_leaves_an_earlier_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_env.py").write_text(FLAKY.replace("Flaky.steps % 3 == 0", "True"))
    monkeypatch.syspath_prepend(str(tmp_path))
    run, out = tmp_path / "run.yaml", tmp_path / name
    run.write_text(
        f"exp_name: own\noutput_dir: {tmp_path / 'runs'}\n"
        "custom_envs: {F: {env_type: 'broken_env:Flaky', max_steps: 1, max_tokens_per_step: 2}}\n"
        "train_env_manager: {num_env_groups: 4, group_size: 2}\nrollout_batch_size: 8\nmax_steps: 10\n"
    )
    out.write_text("earlier")
    done = offbeat("rollout", run, "--agent", "random", "--episodes", 2, "--out", out)
    assert done.exit_code == 1, done.output
    assert "2 episodes could not be played: step_error: KeyError: 'boom'" in done.output
    assert f"no episode was played: {out} was not written" in done.output
    assert out.read_text() == "earlier"


@pytest.mark.parametrize("split", ["held_out", "train"])
def test_messages_with_calls_of_functions_are_no_training_data(tmp_path: Path, split: str):
    """The policy reads and writes them in its template's format, which a row of messages can not say."""
    (tmp_path / "c.txt").write_text("red tea is in the first house\n")
    run = tmp_path / "run.yaml"
    tools = f"tools: [{{tool_id: search, corpus: {tmp_path / 'c.txt'}}}], function_calling: template"
    run.write_text(
        f"exp_name: own\noutput_dir: {tmp_path / 'runs'}\ncustom_envs:\n"
        f"  Asks: {{env_type: tools, env_config: {{env_type: frozen_lake, {tools}}}, max_steps: 2}}\n"
        "  Lake: {env_type: frozen_lake, max_steps: 2}\n"
        "train_env_manager: {num_env_groups: 4, group_size: 2, tags: [Asks]}\nval_env_manager: {tags: [Lake]}\n"
        "rollout_batch_size: 8\nmax_steps: 10\n"
    )
    out, command = tmp_path / "out.jsonl", ("rollout", run, "--agent", "random", "--episodes", 2, "--split", split)
    done = offbeat(*command, "--out", out)
    assert (done.exit_code, out.exists()) == ((2, False) if split == "train" else (0, True)), done.output
    assert ("the functions of Asks" in done.output) == (split == "train")
    done = offbeat(*command, "--out", tmp_path / "out.parquet")
    assert done.exit_code == 0, done.output
    assert ("`messages` of Asks are without its functions" in done.output) == (split == "train")


def test_an_error_of_an_env_ends_play_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "flaky_play.py").write_text(FLAKY)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = offbeat("play", "flaky_play:Flaky", "--agent", "random")
    assert done.exit_code == 2
    assert done.output.rstrip().endswith("step_error: KeyError: 'boom'")


def test_an_env_without_its_files_ends_play_and_rollout_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_file, no_key = 'open("/nonexistent/words.txt")', 'raise KeyError("boom")'
    made = FLAKY.replace("    def reset", f"    def __init__(self):\n        {no_file}\n    def reset", 1)
    (tmp_path / "no_words.py").write_text(made)
    numbered = FLAKY.replace("    def reset", f"    def task_id(self, seed):\n        {no_key}\n    def reset", 1)
    (tmp_path / "no_task.py").write_text(numbered)
    monkeypatch.syspath_prepend(str(tmp_path))
    run, out = tmp_path / "run.yaml", tmp_path / "out.jsonl"
    for name, error in (("no_words", "make_error: FileNotFoundError"), ("no_task", "task_id_error: KeyError: 'boom'")):
        run.write_text(
            f"exp_name: own\noutput_dir: {tmp_path / 'runs'}\n"
            f"custom_envs: {{F: {{env_type: '{name}:Flaky', max_steps: 1, max_tokens_per_step: 2}}}}\n"
            "train_env_manager: {num_env_groups: 4, group_size: 2}\nrollout_batch_size: 8\nmax_steps: 10\n"
        )
        commands = [("rollout", run, "--agent", "random", "--episodes", 2, "--out", out)]
        commands += [("play", "no_words:Flaky", "--agent", "random")] if name == "no_words" else []
        for command in commands:
            done = offbeat(*command)
            assert done.exit_code == 2, (done.output, done.exception)
            assert done.output.splitlines()[-1].startswith(error), done.output


def test_mistakes_are_reported_in_a_line_and_end_with_2(folder: Path, recorded: Path, tmp_path: Path):
    (tmp_path / "x.parquet").write_text("no")
    for arguments, says in (
        (("play", "frozenlake"), "did you mean frozen_lake?"),
        (("play", "sokoban", "num_boxs=1"), "did you mean env_config.num_boxes?"),
        (("play", "sokoban", "--agent", tmp_path), "is neither a model folder"),
        (("play", "sokoban", "--agent", "policy"), "--agent policy needs a path"),
        (("rollout", folder / "run.yaml", "--agent", "policy", tmp_path), "is neither a model folder"),
        (("play", "sokoban", "--render", "x.png"), "write .gif or .html"),
        (("play", "sokoban", "--render", "nowhere/x.gif"), "there is no folder nowhere"),
        (("play", folder / "run.yaml", "--tag", "Box"), "no tag 'Box'; there is Boxes"),
        (("play", "frozen_lake", "--agent", "random", "--tag", "Box"), "--tag: frozen_lake is an env"),
        (("play", "frozen_lake", "--agent", "random", "--temperature", "0.5"), "no effect with --agent random"),
        (("play", "frozen_lake", "--temperature", "0.5"), "no effect with --agent human"),
        (("rollout", folder / "run.yaml", "--agent", "random", "--temperature", 0), "no effect with --agent random"),
        (("play", "nowhere.yaml"), "no such file: nowhere.yaml"),
        (("rollout", folder / "run.yaml"), "holds no checkpoints: train first"),
        (("rollout", folder / "run.yaml", "--episodes", 5, "--group-size", 2), "no whole number of groups"),
        (("inspect", tmp_path / "x.parquet"), "is not a parquet file"),
        (("inspect", tmp_path), "holds no evaluations"),
        (("inspect", recorded, "--episode", 12), "holds episodes 0 to 11, not 12"),
    ):
        done = offbeat(*arguments)
        assert (done.exit_code, says in done.output) == (2, True), done.output
        assert "Traceback" not in done.output


def test_a_file_that_can_not_be_written_is_refused_before_the_first_episode(folder: Path, tmp_path: Path):
    (tmp_path / "x.parquet").mkdir()
    (tmp_path / "x.gif").mkdir()
    for arguments in (
        ("rollout", folder / "run.yaml", "--agent", "random", "--out", tmp_path / "x.parquet"),
        ("rollout", folder / "run.yaml", "--agent", "random", "--out", "/proc/x.jsonl"),
        ("rollout", folder / "run.yaml", "--agent", "random", "--out", tmp_path / f"{'x' * 300}.jsonl"),
        ("rollout", folder / "run.yaml", "--agent", "random", "--out", tmp_path / ("x" * 300) / "x.jsonl"),
        ("play", "sokoban", "--agent", "random", "--render", tmp_path / "x.gif"),
    ):
        done = offbeat(*arguments)
        assert done.exit_code == 2
        assert done.output.startswith((f"--out {arguments[-1]}: ", f"--render {arguments[-1]}: "))
        assert done.output.count("\n") == 1


def test_pass_at_k_is_the_chance_that_one_of_k_drawn_succeeds():
    assert pass_at_k([[True, False, False, False]], 1) == pytest.approx(1 / 4)
    assert pass_at_k([[True, False, False, False]], 2) == pytest.approx(1 / 2)
    assert pass_at_k([[True, False, False, False], [False] * 4], 4) == pytest.approx(1 / 2)
    assert pass_at_k([[True] * 3], 2) == 1
    with pytest.raises(ValueError, match="groups of at least 3"):
        pass_at_k([[True, False]], 3)
