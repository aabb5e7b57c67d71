import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.config.loader import read_run
from tests.paths import ROOT

FILES = ROOT / "tests/deploy/config/importing/roll"
FROZEN_LAKE = str(FILES / "agentic/agent_val_frozen_lake.yaml")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["config", "import", *arguments])
    return result.exit_code, result.output


def test_a_file_is_written_with_a_report_of_its_keys(tmp_path: Path):
    out = tmp_path / "new" / "out.yaml"
    code, text = run("roll", FROZEN_LAKE, "-o", str(out), "--trial")
    assert code == 0, text
    assert "  max_grad_norm -> actor_train.training_args.max_grad_norm\n" in text
    assert text.endswith("\nvalid\n")
    assert read_run(out).pretrain == "tiny"


def test_what_is_to_be_filled_in_is_listed(tmp_path: Path):
    code, text = run("roll", FROZEN_LAKE, "-o", str(tmp_path / "out.yaml"))
    assert code == 0, text
    listed = text.partition("to fill in before it validates:")[2]
    assert "pretrain: Qwen/Qwen2.5-0.5B-Instruct is a model of the hub" in listed
    assert "actor_train.device" in listed  # a machine without GPUs


def test_several_files_need_a_folder(tmp_path: Path):
    second = str(FILES / "config/traj_envs.yaml")
    code, text = run("roll", FROZEN_LAKE, second, "-o", str(tmp_path / "out"), "--trial")
    assert code == 0, text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "agent_val_frozen_lake.yaml",
        "traj_envs.yaml",
    ]


def test_files_of_one_name_are_refused_before_anything_is_written(tmp_path: Path):
    """As examples of ROLL and TRL have in different folders."""
    sources = [tmp_path / folder / "variant.yaml" for folder in ("a", "b")]
    for source in sources:
        source.parent.mkdir()
        shutil.copy(FROZEN_LAKE, source)
    out = tmp_path / "out"
    code, text = run("roll", *map(str, sources), "-o", str(out), "--trial", "--force")
    assert code == 2
    assert "would both be written to" in " ".join(text.split())
    assert not out.exists()


def test_the_user_names_the_command_of_a_file_that_does_not(tmp_path: Path):
    """As TRL's own example of `trl dpo`, whose file has a model and a dataset alone."""
    (tmp_path / "config.yaml").write_text("model_name_or_path: org/model\ndataset_name: anthropic/hh-rlhf\n")
    source, out = str(tmp_path / "config.yaml"), str(tmp_path / "out.yaml")
    code, text = run("trl", source, "-o", out)
    assert code == 0, text
    assert "read as a file of `trl sft`, as neither its keys nor its name indicate another command; " in text
    code, text = run("trl", source, "-o", out, "--force", "--command", "dpo")
    assert code == 0, text
    assert "pipeline: dpo" in Path(out).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["roll", "absent.yaml", "-o", "out.yaml"], "no such file: absent.yaml"),
        (["roll", FROZEN_LAKE, "-o", "there.yaml"], "there.yaml exists already"),
        (["roll", FROZEN_LAKE, "-o", "there.yaml/out.yaml"], "there.yaml/out.yaml can't be written"),
        (["roll", FROZEN_LAKE, "-o", "out.json"], "out.json: configurations are *.yaml files"),
        (["roll", "bad.yaml", "-o", "out.yaml"], "bad.yaml"),
        (["roll", FROZEN_LAKE, "-o", "out.yaml", "--command", "dpo"], "--command names TRL's command"),
    ],
)
def test_a_mistake_is_refused(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("seed: 1\n")
    Path("bad.yaml").write_text("seed: [1\n")
    code, text = run(*arguments)
    assert code == 2
    assert message in text
    assert "Traceback" not in text
    assert Path("there.yaml").read_text() == "seed: 1\n"


def test_force_overwrites(tmp_path: Path):
    out = tmp_path / "out.yaml"
    shutil.copy(FROZEN_LAKE, out)
    assert run("roll", FROZEN_LAKE, "-o", str(out), "--trial", "--force")[0] == 0
    assert out.read_text().startswith("# Imported by `offbeat config import roll agent_val_frozen_lake.yaml`.")
