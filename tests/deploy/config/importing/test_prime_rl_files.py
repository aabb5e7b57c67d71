"""Values of prime-rl's files that are wrong, or secrets."""

from pathlib import Path

import pytest

from offbeat.deploy.cli.config_import import import_files
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.prime_rl import import_prime_rl

SOURCE = """
[[orchestrator.train.source]]
ratio = 1.0
env = { taskset = { id = "math" } }
[[orchestrator.train.source]]
ratio = 2.0
env = { taskset = { id = "code" } }
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[deployment]\nnum_train_gpus = 'x'\n{SOURCE}", r"^deployment\.num_train_gpus: must be a whole number, not 'x'"),
        (f"[trainer.scheduler]\ntype = 'linear'\nmin_lr = 'b'\n{SOURCE}",
         r"^trainer\.scheduler\.min_lr: must be a number, not 'b'"),
        (f"[orchestrator]\nmax_off_policy_steps = 'm'\n{SOURCE}",
         r"^orchestrator\.max_off_policy_steps: must be a whole number, not 'm'"),
        (SOURCE.replace("2.0", "'q'"), r"^orchestrator\.train\.source\.1\.ratio: must be a number, not 'q'"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_named(text: str, message: str, tmp_path: Path):
    path = tmp_path / "rl.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        import_prime_rl([path])


def test_a_variable_of_one_process_is_left_out_unprinted(tmp_path: Path):
    """Processes have the same variables here."""
    path, out, lines = tmp_path / "rl.toml", tmp_path / "run.yaml", list[str]()
    path.write_text(
        f"[trainer.env_vars]\nHF_TOKEN = 'hf_first'\n[orchestrator.env_vars]\nHF_TOKEN = 'hf_second'\n{SOURCE}"
    )
    import_files("prime-rl", [path], out, force=False, trial=False, echo=lines.append)
    report = "\n".join(lines)
    assert "hf_" not in report
    assert "hf_second" not in out.read_text()
    assert "orchestrator.env_vars.HF_TOKEN (system_envs.HF_TOKEN: another key sets another value" in report
    assert "values of env_vars are copied into the file" in report


def test_a_batch_of_tokens_is_not_prime_rls_default(tmp_path: Path):
    path = tmp_path / "rl.toml"
    path.write_text(f"[orchestrator]\ntoken_batch_size = 100000\n{SOURCE}")
    imported = import_prime_rl([path])
    outcomes = {
        ".".join(each.key): each.outcome for each in imported.keys if each.outcome.target == ("rollout_batch_size",)
    }
    assert list(outcomes) == ["orchestrator.token_batch_size"]
    outcome = outcomes["orchestrator.token_batch_size"]
    assert (outcome.status, outcome.value) == ("value", imported.tree["rollout_batch_size"])
    assert "set your own" in outcome.note
