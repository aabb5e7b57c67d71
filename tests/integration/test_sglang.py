"""SGLang's server as the engine on a CPU: `make test-sglang`."""

import sys
from collections.abc import AsyncIterator
from glob import glob
from pathlib import Path

import pytest
import pytest_asyncio

from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig
from offbeat.services.generation.sglang.engine import SglangEngine
from offbeat.services.generation.sglang.server import SHARED_FILES
from tests.integration.mesh import Start, finished, start
from tests.integration.policy_weights import write_policy
from tests.integration.sglang_server import check_logprobs_across_an_update
from tests.integration.test_recorded_logprobs import WHOLE, compare

__all__ = ["start"]

PYTHON = Path(sys.prefix) / "sglang" / "bin" / "python"
STRATEGY = "actor_infer.strategy_args"
TOLERANCE = 1e-5
"""float32, with other kernels than transformers'."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs SGLang: make test-sglang"),
]


def shared_files() -> set[str]:
    return set(glob(f"{SHARED_FILES}*"))


@pytest.fixture(params=["keep", "recompute"])
def config(request: pytest.FixtureRequest) -> GenerationConfig:
    strategy = EngineStrategy(strategy_name="sglang", python=str(PYTHON))
    dtype = EngineModelArgs(dtype="float32")
    return GenerationConfig(model_args=dtype, strategy_args=strategy, on_weight_update=request.param)


@pytest_asyncio.fixture
async def engine(config: GenerationConfig, tmp_path: Path) -> AsyncIterator[SglangEngine]:
    before = shared_files()
    engine = await SglangEngine.start(config, write_policy(tmp_path), sequence_length=512, seed=1)
    yield engine
    engine.close()
    assert shared_files() == before


async def test_tokens_have_the_learners_logprobs_across_an_update(
    config: GenerationConfig, engine: SglangEngine, tmp_path: Path
) -> None:
    recomputes = config.on_weight_update == "recompute"
    await check_logprobs_across_an_update(engine, tmp_path, TOLERANCE, recomputes=recomputes)


def test_a_run_whose_server_is_killed_loses_no_group(start: Start) -> None:
    """Each recorded logprob is that of its version's weights."""
    engine = (f"{STRATEGY}.strategy_name=sglang", f"+{STRATEGY}.python={PYTHON}")
    overrides = (*WHOLE, "max_steps=6", *engine)
    train = start(*overrides)
    train.wait_for_step(2, timeout_s=600)
    train.kill("sglang.launch_server")
    finished(train, steps=6)
    assert compare(train.output_dir, overrides, steps=6).tokens > 1000
