"""Episodes that the run's engine samples, and their summary."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.play.parquet import RecordedTokens, read_parquet
from offbeat.deploy.play.token_sampling import make_warpers
from offbeat.services.chat.stops import load_decoder
from tests.deploy.cli.test_interrupts import Terminal
from tests.families import write_family
from tests.processes import has_ended
from tests.waiting import wait_until_sync

NUM_EPISODES = 8


def rollout(folder: Path, *arguments: object) -> Result:
    words = ("rollout", folder / "run.yaml", "--episodes", NUM_EPISODES, *arguments)
    return CliRunner().invoke(app, [str(word) for word in words])


def play(folder: Path, out: Path, *arguments: object) -> list[RecordedTokens]:
    done = rollout(folder, "--agent", folder / "policy", "--out", out, *arguments)
    assert done.exit_code == 0, done.output
    return read_parquet(out)


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[RecordedTokens]:
    return play(folder, folder / "greedy.parquet", "--temperature", 0)


def assert_equal(episodes: list[RecordedTokens], expected: list[RecordedTokens]) -> None:
    assert [(e.tag, e.seed, e.group, e.member) for e in episodes] == [
        (e.tag, e.seed, e.group, e.member) for e in expected
    ]
    assert [e.tokens for e in episodes] == [e.tokens for e in expected]
    assert [e.loss_mask for e in episodes] == [e.loss_mask for e in expected]
    assert [e.messages for e in episodes] == [e.messages for e in expected]
    assert [e.versions for e in episodes] == [e.versions for e in expected]
    for episode, other in zip(episodes, expected, strict=True):
        torch.testing.assert_close(torch.tensor(episode.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=1e-4)


def test_greedy_answers_of_hf_infer_are_those_of_transformers(
    folder: Path, tmp_path: Path, greedy: list[RecordedTokens]
) -> None:
    assert_equal(play(folder, tmp_path / "x.parquet", "--engine", "hf_infer", "--temperature", 0), greedy)


def test_greedy_answers_of_two_engines_are_those_of_one(
    folder: Path, tmp_path: Path, greedy: list[RecordedTokens]
) -> None:
    out = tmp_path / "x.parquet"
    policy = ("--agent", folder / "policy", "--temperature", 0, "--out", out)
    done = rollout(folder, *policy, "--engine", "hf_infer", "--replicas", 2)
    assert "starting hf_infer (cpu), 2 engines\n" in done.output
    assert_equal(read_parquet(out), greedy)


@pytest.mark.nightly
def test_greedy_answers_of_two_engines_of_vllm_are_those_of_one(
    folder: Path, tmp_path: Path, greedy: list[RecordedTokens]
) -> None:
    out = tmp_path / "x.parquet"
    assert_equal(play(folder, out, "--engine", "config", "--replicas", 2, "--temperature", 0), greedy)


@pytest.mark.slow
def test_vllm_answers_as_transformers_prints_json_and_leaves_no_process(
    folder: Path, tmp_path: Path, greedy: list[RecordedTokens]
) -> None:
    """With `config`, the engine of the run's file."""
    out = tmp_path / "x.parquet"
    options = ["--agent", "policy", folder / "policy", "--temperature", 0, "--engine", "config", "--json", "--out", out]
    words = ["rollout", folder / "run.yaml", "--episodes", NUM_EPISODES, *options]
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", *map(str, words)]
    with (tmp_path / "printed").open("w") as printed, (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=printed, stderr=errors)
    children: set[psutil.Process] = set()
    while process.poll() is None:
        children |= set(psutil.Process(process.pid).children(recursive=True))
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    errors = (tmp_path / "errors").read_text()
    assert process.returncode == 0, errors
    summary = json.loads((tmp_path / "printed").read_text())
    assert (summary["engine"], summary["total"]["episodes"], summary["failed"]) == ("vllm", NUM_EPISODES, {})
    assert errors.splitlines()[-1] == f"wrote {out}: offbeat inspect {out}"
    assert "Traceback" not in errors
    assert children, "the engine has a process of its own"
    wait_until_sync(lambda: all(has_ended(child.pid) for child in children))
    assert_equal(read_parquet(out), greedy)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(), ("--replicas", "2")])
def test_an_interrupt_while_vllm_starts_ends_it(folder: Path, tmp_path: Path, replicas: tuple[str, ...]) -> None:
    """vLLM catches the KeyboardInterrupt of its start, and waited ten minutes for an engine that it had closed."""
    options = ("--agent", str(folder / "policy"), "--engine", "vllm", *replicas, "--out", "x.parquet")
    terminal = Terminal(tmp_path, "rollout", str(folder / "run.yaml"), *options)
    terminal.read_until(b"starting vllm (cpu)")
    parent = psutil.Process(terminal.process.pid)
    wait_until_sync(lambda: len(parent.children()) > 1, timeout_s=120)  # two, or one beside multiprocessing's tracker
    children = parent.children(recursive=True)
    assert terminal.interrupt() == 130
    assert b"Traceback" not in terminal.output
    wait_until_sync(lambda: all(has_ended(child.pid) for child in children))


def test_a_model_that_the_engine_does_not_compute_is_refused_by_key(folder: Path, tmp_path: Path) -> None:
    """vLLM's engine would die of it while it starts."""
    policy = shutil.copytree(folder / "policy", tmp_path / "policy")
    write_family(tmp_path / "family", "qwen3_5_text", linear_key_head_dim=64, linear_value_head_dim=64)
    shutil.copy(tmp_path / "family" / "config.json", policy)
    done = rollout(folder, "--agent", policy, "--engine", "vllm", "--out", tmp_path / "x.parquet")
    assert done.exit_code == 2
    assert done.output.splitlines()[-1].startswith("actor_infer.model_args.dtype: vLLM on a CPU computes")


def test_an_argument_that_the_engine_has_not_is_refused_by_key(folder: Path, tmp_path: Path) -> None:
    unknown = "+actor_infer.strategy_args.strategy_config.max_num_batched_token=512"
    out = ("--out", tmp_path / "x.parquet")
    done = rollout(folder, "--agent", folder / "policy", "--engine", "vllm", *out, unknown)
    assert done.exit_code == 2
    assert "max_num_batched_token: vLLM has no such engine argument; did you mean" in done.output.splitlines()[-1]
    assert rollout(folder, "--agent", folder / "policy", "--engine", "hf_infer", *out, unknown).exit_code == 0


@pytest.mark.slow
def test_an_engine_that_dies_while_it_starts_is_said_in_a_line(folder: Path, tmp_path: Path) -> None:
    """Of heads that are too small for vLLM on a CPU."""
    policy = shutil.copytree(folder / "policy", tmp_path / "policy")
    architecture = json.loads((policy / "config.json").read_text())
    heads = {name: 4 * architecture[name] for name in ("num_attention_heads", "num_key_value_heads")}
    (policy / "config.json").write_text(json.dumps(architecture | heads))
    words = ("rollout", folder / "run.yaml", "--agent", policy, "--engine", "vllm", "--out", tmp_path / "x.parquet")
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("--engine vllm: it did not start: the engine failed")


def test_recorded_logprobs_are_of_the_distribution_that_is_sampled(folder: Path, tmp_path: Path) -> None:
    cut = ("+val_env_manager.generating_args.top_p=0.9", "+val_env_manager.generating_args.top_k=6")
    episodes = play(folder, tmp_path / "x.parquet", "--engine", "hf_infer", "--temperature", 0.7, *cut)
    model, warpers = AutoModelForCausalLM.from_pretrained(folder / "policy").eval(), make_warpers(0.7, 0.9, 6)
    for episode in episodes:
        tokens = torch.tensor([episode.tokens])
        with torch.inference_mode():
            logprobs = warpers(tokens, model(tokens).logits[0]).log_softmax(-1)  # type: ignore[arg-type]
        expected = logprobs[:-1].gather(-1, tokens[0, 1:, None]).squeeze(-1)
        mask = torch.tensor(episode.loss_mask)[1:]
        torch.testing.assert_close(torch.tensor(episode.logprobs)[1:][mask], expected[mask], atol=1e-4, rtol=1e-4)


def test_an_engines_answer_ends_with_a_stop_string(folder: Path, tmp_path: Path, greedy: list[RecordedTokens]) -> None:
    decode = load_decoder(folder / "policy")
    first = greedy[0].loss_mask.index(True)
    word = decode(greedy[0].tokens[first : first + 1])
    stop = f"+val_env_manager.generating_args.stop_strings=['{word}']"
    stopped = play(folder, tmp_path / "x.parquet", "--engine", "hf_infer", "--temperature", 0, stop)
    assert stopped[0].loss_mask[first : first + 2] == [True, False]
    assert greedy[0].loss_mask[first : first + 2] == [True, True]


def test_a_checkpoints_version_is_recorded(folder: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(folder / "policy", tmp_path / "step-000012"))
    out = tmp_path / "x.parquet"
    done = rollout(folder, "--agent", "policy", checkpoint, "--engine", "hf_infer", "--out", out)
    assert done.exit_code == 0, done.output
    assert {version for episode in read_parquet(out) for version in episode.versions} <= {-1, 12}
    assert 12 in read_parquet(out)[0].versions


def test_a_summary_is_printed_by_tag_and_as_json(folder: Path, tmp_path: Path) -> None:
    options = ("--agent", "random", "--group-size", 4, "--out", tmp_path / "x.parquet")
    done = rollout(folder, *options)
    assert "Boxes: 8 episodes, reward " in done.output
    done = rollout(folder, *options, "--json")
    summary = json.loads(done.stdout)
    assert (summary["policy"], summary["engine"], list(summary["tags"])) == ("random", None, ["Boxes"])
    total = summary["total"]
    assert list(total) == [
        *("episodes", "reward", "success", "success_interval", "turns", "truncated", "pass@1", "pass@2", "pass@4")
    ]
    assert f"wrote {tmp_path / 'x.parquet'}" in done.stderr


def test_an_engine_that_can_not_start_is_a_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, out = ("--agent", folder / "policy"), ("--out", tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", None)
    for arguments, says in (
        (
            (*policy, "--engine", "vllm"),
            "--engine vllm: import of vllm.v1.engine.async_llm halted; None in sys.modules",
        ),
        ((*policy, "--engine", "vllm"), "pip install 'offbeat[cpu]', or 'offbeat[gpu]' for CUDA"),
        ((*policy, "--engine", "hf_infer", "actor_infer.kv_cache_gib=1e-6"), "hold no sequence of 512 tokens"),
        (
            (*policy, "--engine", "hf_infer", "--replicas", 2, "actor_infer.kv_cache_gib=1e-6"),
            " of 2: actor_infer.kv_cache_gib: ",
        ),
        ((*policy, "--replicas", 2), "--replicas needs an engine: add --engine config"),
        (("--agent", "random", "--engine", "hf_infer"), "--engine has no effect with --agent random"),
        (
            ("--agent", "openai", "http://localhost:1/v1", "--engine", "vllm"),
            "--engine has no effect with --agent openai",
        ),
    ):
        done = rollout(folder, *arguments, *out)
        assert (done.exit_code, says in done.output) == (2, True), done.output
        assert "Traceback" not in done.output
    assert not (tmp_path / "x.parquet").exists()
