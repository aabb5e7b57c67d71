"""`pipeline: reward_model` as processes over a real Redis: a killed learner, the audit, and the reward that it makes."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from offbeat.deploy.cli.audit import audit_run
from offbeat.deploy.run_folder import newest_checkpoint
from offbeat.services.reward.kinds.model_config import RewardModelArgs, RewardModelConfig
from offbeat.services.reward.kinds.reward_model import ConversationScorer
from offbeat.services.reward.sample import RewardSample
from tests.integration.data_run import a_data_run
from tests.waiting import wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_killed_learners_successor_ends_with_the_same_reward_model(
    redis_server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with a_data_run(redis_server, tmp_path, "undisturbed-rm", "reward_model") as whole:
        assert whole.start().wait(timeout=240) == 0, whole.complaint()
        losses = [record.values["loss"].value for record in whole.records() if record.source == "eval"]
        assert losses[-1] < losses[0]
    with a_data_run(redis_server, tmp_path, "killed-rm", "reward_model") as run:
        victim = run.start()
        wait_until_sync(lambda: run.published() >= 3, timeout_s=240)
        victim.kill()
        victim.wait()
        assert run.start().wait(timeout=240) == 0, run.complaint()
        counters, folder = run.counters(), run.config.output_dir
        assert (counters.admitted, counters.trained, counters.in_flight) == (24, 24, 0)
        (folder / "config.yaml").write_text(run.config.model_dump_json())
        assert audit_run(str(folder), console=Console(width=200), redis_url=run.url) == 0
        assert "PROVEN" in capfd.readouterr().out
    scores: list[float] = []
    for each in (whole, run):
        saved = newest_checkpoint(each.config.output_dir)
        assert saved is not None
        scorer = ConversationScorer(
            RewardModelConfig(name="r", kind="reward_model", model_args=RewardModelArgs(model_name_or_path=saved[1]))
        )
        sample = RewardSample([{"role": "user", "content": "Left"}], "Down", 1, None, "", {})
        scores += scorer.score([scorer.tokenize(sample)])
    assert scores[0] == scores[1] != 0
    assert torch.isfinite(torch.tensor(scores)).all()
