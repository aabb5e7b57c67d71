"""Checks in a process of its own: user code may hang, crash or print, and holds up nothing."""

import os
import textwrap
from pathlib import Path

import psutil
import pytest

from offbeat.deploy.config.errors import ConfigError, RightsError
from offbeat.deploy.config.loader import read_document
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.validation import check_in_process
from offbeat.services.control.rights import Rights
from tests.paths import QUICKSTART

pytestmark = pytest.mark.slow
ENVS = '''
import os, subprocess, sys, time
from subprocess import Popen
import gymnasium
from offbeat.envs.frozen_lake import FrozenLakeEnv
from offbeat.envs.frozen_lake.env import WORDS

class Fine(FrozenLakeEnv):
    """A lake of one's own."""
    def reset(self, **options):
        print("noise on stdout")
        return super().reset(**options)

class HangingReset(FrozenLakeEnv):
    def reset(self, **options):
        subprocess.Popen(["sleep", "1013"])
        time.sleep(1000)

class HangingWords(FrozenLakeEnv):
    @property
    def words(self):
        time.sleep(1000)

class Crashing(FrozenLakeEnv):
    def reset(self, **options):
        os._exit(3)
'''


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_envs.py").write_text(ENVS)
    (tmp_path / "hanging_import.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def with_env(env_type: str, env_config: str = "{}") -> RunConfig:
    return read_document(
        textwrap.dedent(f"""
        custom_envs: {{Own: {{env_type: {env_type!r}, env_config: {env_config}}}}}
        train_env_manager: {{num_env_groups: 8}}
        """)
    )


@pytest.mark.usefixtures("modules")
async def test_an_env_of_ones_own_that_prints_is_accepted():
    await check_in_process(with_env("own_envs:Fine"))


async def test_a_default_that_another_key_limits_is_accepted():
    lake = "custom_envs: {Lake: {env_type: frozen_lake}}"
    await check_in_process(read_document(f"{lake}\nactor_infer: {{generating_args: {{max_new_tokens: 32}}}}"))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("env_type", "message", "timeout_s"),
    [
        ("own_envs:HangingReset", "making and resetting own_envs:HangingReset did not end within 6 s", 6.0),
        ("hanging_import:Env", "import of hanging_import:Env did not end within 6 s", 6.0),
        ("own_envs:Crashing", r"making and resetting own_envs:Crashing failed \(.*exit status 3", 60.0),
    ],
)
async def test_an_env_that_hangs_or_crashes_is_named_with_its_key_and_killed(
    env_type: str, message: str, timeout_s: float
):
    with pytest.raises(ConfigError, match=rf"^custom_envs\.Own\.env_type: {message}"):
        await check_in_process(with_env(env_type), timeout_s=timeout_s)
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]  # of zombies: none
    assert ["sleep", "1013"] not in lines
    ours = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    named = psutil.process_iter(["pid", "cmdline"])
    assert not [each for each in named if each.pid in ours and "validation_main" in str(each.info["cmdline"])]


@pytest.mark.usefixtures("modules")
async def test_a_hanging_declaration_of_words_is_named_where_an_engine_needs_the_tiny_policy():
    """They are read before the first episode, by the check of `hf_infer`."""
    config = with_env("own_envs:HangingWords")
    strategy = config.actor_infer.strategy_args.model_copy(update={"strategy_name": "hf_infer"})
    infer = config.actor_infer.model_copy(update={"strategy_args": strategy})
    with pytest.raises(ConfigError, match=r"^custom_envs: reading the envs' words for the tiny policy did not end"):
        await check_in_process(config.model_copy(update={"actor_infer": infer}), timeout_s=6.0)


@pytest.mark.usefixtures("modules")
async def test_an_agent_of_harbors_trials_is_no_way_to_offbeats_functions():
    agent = "{played_by: agent, agent: {name: 'offbeat.envs.class_path:load_object', kwargs: {path: 'x:y'}}}"
    with pytest.raises(
        RightsError,
        match=r"custom_envs\.Own\.env_config\.agent\.name.*use offbeat\.deploy\.agents\.harbor_shell:ShellAgent",
    ):
        await check_in_process(with_env("harbor", agent), rights=Rights(("offbeat.*",)))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("env_type", "env_config"),
    [
        ("own_envs:Popen", "{args: [touch, PROOF]}"),
        ("own_envs:subprocess", "{}"),
        ("offbeat.envs.class_path:load_object", "{path: 'hanging_import:Env'}"),
        ("offbeat.envs.tools:ToolEnv", "{env_type: math, tools: [{tool_id: mcp, command: [touch, PROOF]}]}"),
    ],
)
async def test_an_allowed_module_is_no_way_to_other_code(env_type: str, env_config: str, tmp_path: Path):
    config = with_env(env_type, env_config.replace("PROOF", str(tmp_path / "proof")))
    with pytest.raises(RightsError, match=r"custom_envs\.Own\.env_type"):
        await check_in_process(config, rights=Rights(("own_envs", "offbeat.*")))
    assert not (tmp_path / "proof").exists()


@pytest.mark.usefixtures("modules")
async def test_what_the_allowed_modules_define_passes():
    await check_in_process(with_env("own_envs:Fine"), rights=Rights(("own_envs",)))
    await check_in_process(read_document(QUICKSTART.read_text()), rights=Rights(("offbeat.envs.*",)))
