import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.paths import ROOT

pytestmark = pytest.mark.slow

QUICKSTART = "deploy/configs/quickstart.yaml"
HEAVY = ("torch", "ray", "transformers", "vllm", "deepspeed", "matplotlib", "fastapi", "hydra", "pydantic", "redis")


def offbeat(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_help_answers_in_under_a_second():
    """Of computing: how long a busy machine lets it wait says nothing about it."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert offbeat("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(3)) < 1.0


def test_help_imports_nothing_heavy():
    code = f"import sys, offbeat.deploy.cli.app; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module",
    ["deploy.cli.train", "deploy.cluster.ray_run_factory", "deploy.config.validation_main", "services.rollout.actor"],
)
def test_a_process_without_a_model_starts_without_torch(module: str):
    code = f"import sys, offbeat.{module}; print({{'torch', 'transformers', 'vllm'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_training_command_starts_without_ray():
    """A process of its own starts Ray."""
    code = "import sys, offbeat.deploy.cli.train; print({'ray', 'fastapi', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_worker_without_rewards_starts_without_their_clients():
    names = {"httpx", "offbeat.services.reward.factory"}
    code = f"import sys, offbeat.services.rollout.actor; print({names} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_rules_of_the_importer_are_read_for_unknown_keys_alone():
    code = (
        "import sys; from pathlib import Path; from offbeat.deploy.config.loader import load_run; "
        f"load_run(Path({QUICKSTART!r})); print([name for name in sys.modules if 'config.importing' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_configuration_without_agents_is_read_without_the_gateway():
    code = (
        "import sys; from pathlib import Path; from offbeat.deploy.config.loader import load_run; "
        f"load_run(Path({QUICKSTART!r})); print({{'fastapi', 'uvicorn', 'ray', 'torch'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_validate_says_valid():
    done = offbeat("config", "validate", QUICKSTART, "seed=2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "valid\n", "")


@pytest.mark.parametrize("command", [("config", "validate"), ("config", "show"), ("train",)])
def test_a_refused_configuration_lists_every_problem_and_exits_with_2(command: tuple[str, ...]):
    done = offbeat(*command, QUICKSTART, "max_stepz=3", "seed=x")
    assert done.returncode == 2
    assert "max_stepz: unknown key; did you mean `max_steps`?" in done.stderr
    assert "seed: expected an integer, got 'x' (a string)" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_address_without_a_cluster_is_said_in_one_line():
    done = offbeat("config", "validate", QUICKSTART, "--address", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no Ray cluster can be joined at 127.0.0.1:1: " in done.stderr
    assert "Traceback" not in done.stderr


def test_version_is_the_installed_one():
    from offbeat import __version__

    assert offbeat("--version").stdout == f"{__version__}\n"


def test_a_packaged_configuration_is_found_by_name(tmp_path: Path):
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "config", "validate"]
    for name in ("quickstart", "recipes/ppo"):
        done = subprocess.run([*command, name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "valid\n")
    missing = offbeat("config", "validate", "nowhere")
    assert missing.returncode == 2
    assert "no such file: nowhere; packaged: distill, dpo, foreign_agent," in missing.stderr
    assert "quickstart, qwen2.5-0.5b/frozen_lake" in missing.stderr


@pytest.mark.parametrize("options", [("--max_steps", "3"), ("--max-steps=3",)])
def test_a_key_with_dashes_is_answered_with_how_it_is_written(options: tuple[str, ...]):
    done = offbeat("train", QUICKSTART, *options)
    assert done.returncode == 2
    assert "keys are set without dashes: max_steps=3" in done.stderr


def test_an_impossible_combination_starts_nothing(tmp_path: Path):
    done = offbeat("train", QUICKSTART, "rollout_batch_size=60", f"output_dir={tmp_path}/run")
    assert done.returncode == 2
    assert "take 56 or 64" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_missing_file_is_named():
    done = offbeat("config", "validate", "nowhere.yaml")
    assert done.returncode == 2
    assert "no such file: nowhere.yaml" in done.stderr


def test_show_prints_every_key_as_yaml():
    shown = yaml.safe_load(offbeat("config", "show", QUICKSTART, "seed=9").stdout)
    assert shown["seed"] == 9
    assert shown["buffer"]["stale_policy"] == "drop"


def test_a_report_of_a_folder_without_a_run_is_refused_in_words(tmp_path: Path):
    done = offbeat("report", str(tmp_path))
    assert done.returncode == 1
    assert "there is no run in" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_users_own_env_in_the_current_folder_is_found(tmp_path: Path):
    (tmp_path / "my_env.py").write_text(
        "import gymnasium\n"
        "class Echo(gymnasium.Env):\n"
        "    words = ('say', 'it')\n"
        "    def __init__(self, loud: bool = False): self.loud = loud\n"
        "    def reset(self, *, seed=None, options=None): return 'say it', {}\n"
        "    def step(self, action): return 'say it', 1.0, True, False, {}\n"
    )
    (tmp_path / "run.yaml").write_text(
        "custom_envs: {Echo: {env_type: 'my_env:Echo', env_config: {loud: true}}}\ntrain_env_manager: {num_env_groups: 8}\n"
    )
    script = str(ROOT / ".venv/bin/offbeat")
    for override, code in ((), 0), (("custom_envs.Echo.env_config.laud=true",), 2):
        command = [script, "config", "validate", "run.yaml", *override]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr


def test_learner_replay_is_a_hidden_alias_of_learner_reproduce():
    from offbeat.deploy.cli.app import learner_app

    hidden = {command.name: command.hidden for command in learner_app.registered_commands}
    assert hidden == {"attach": False, "replay": True, "reproduce": False}


@pytest.mark.parametrize(("path", "name"), [("--config-path", "--config-name"), ("--config_path", "--config_name")])
def test_hydras_options_name_the_file(path: str, name: str, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "custom_envs: {L: {env_type: frozen_lake}}\ntrain_env_manager: {num_env_groups: 8}\n"
    )
    url = "redis.url=rediss://:p@host:6380/0?ssl_ca_certs=/ca.pem"
    for given in ("run", "run.yaml"):
        done = offbeat("config", "show", path, str(tmp_path), name, given, "seed=7", url)
        assert done.returncode == 0, done.stderr
        shown = yaml.safe_load(done.stdout)
        assert (shown["seed"], shown["redis"]["url"]) == (7, url.partition("=")[2])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "a run's YAML file"),
        (["--config-path", "/tmp"], "--config-name"),
        (["run.yaml", "--config-name", "run"], "give the file once"),
    ],
)
def test_a_file_that_is_named_not_at_all_or_twice_is_refused(arguments: list[str], says: str):
    done = offbeat("config", "validate", *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())
