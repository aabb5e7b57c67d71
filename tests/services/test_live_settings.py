"""One field of `Settings` is all that a further live setting needs."""

import subprocess
import sys

from offbeat.services.live_settings import LIVE_SETTINGS, Change, Settings, settings_now
from tests.paths import QUICKSTART

SEVENTH = """
    top_p: Annotated[
        float, SettingInfo("actor_infer.generating_args.top_p", "learner", "Nucleus of sampling", ge=0.1, le=1)
    ]
"""
CHECKS = f"""
import importlib.util, sys
from pathlib import Path

spec = importlib.util.find_spec("offbeat.services.live_settings")
source = spec.loader.get_source(spec.name)
assert source.count("    def changed") == 1
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
exec(compile(source.replace("    def changed", {SEVENTH!r} + "\\n    def changed"), spec.origin, "exec"), module.__dict__)

import pydantic
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.cluster.live_values import set_values
from offbeat.deploy.config.loader import load_run
from offbeat.services.control.request_bodies import ALIASES
from offbeat.services.control.schemas import SettingsPatch, SettingsView
from offbeat.services.live_settings import Change, decode_settings, encode_settings, settings_at
from offbeat.trainer.config.run import LearnerRunConfig

config = load_run(Path({str(QUICKSTART)!r}), ["actor_infer.generating_args.top_p=0.9", "old_logprobs=recompute"])
assert config.settings.top_p == 0.9
assert LearnerRunConfig.model_validate_json(config.model_dump_json(), extra="ignore").settings.top_p == 0.9
assert decode_settings(encode_settings(config.settings)) == config.settings
assert SettingsView.of(config.settings).top_p == 0.9

values = SettingsPatch.model_validate({{"top_p": 0.5}}).values()
assert values == {{"top_p": 0.5}}
try:
    SettingsPatch.model_validate({{"top_p": 2.0}})
    raise AssertionError("above its bound")
except pydantic.ValidationError:
    pass
assert ALIASES["actor_infer.generating_args.top_p"] == "top_p"
changed = set_values(config.model_dump(), values)
assert changed["actor_infer"]["generating_args"]["top_p"] == 0.5
assert settings_at(config.settings, [Change(values, step=3)], 2).top_p == 0.9
assert settings_at(config.settings, [Change(values, step=3)], 3).top_p == 0.5
help_text = CliRunner().invoke(app, ["runs", "set", "--help"], terminal_width=200).output
assert "top_p" in help_text, help_text
"""


def test_a_seventh_setting_needs_one_field():
    checked = subprocess.run([sys.executable, "-c", CHECKS], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_process_counts_apply_at_once_and_others_once_adopted():
    base = Settings(1, 1, 1e-3, 1.0, 1.0, 24)
    pending = Change({"num_workers": 3, "temperature": 0.5})
    assert settings_now(base, [pending]) == base.changed({"num_workers": 3})
    adopted = Change(pending.values, step=4)
    assert settings_now(base, [adopted]) == base.changed(pending.values)
    assert {name for name, row in LIVE_SETTINGS.items() if row.type is int} == {
        "num_workers",
        "num_replicas",
        "num_env_groups",
    }
