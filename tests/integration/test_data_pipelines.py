"""Data pipelines as processes over a real Redis: every row once per epoch, resumed to the bit."""

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from offbeat.deploy.cli.audit import audit_run
from offbeat.envs.frozen_lake.rows import conversations, write_rows
from offbeat.services.metric_registry import find_metric
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.training.batch_log import BatchLog
from tests.integration.data_run import a_data_run, a_worker, words_of
from tests.integration.learner_run import Run
from tests.waiting import wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUPS = {"sft": 48, "dpo": 24, "kto": 24, "distill": 48}
"""Of six steps."""
ENDS = {
    "sft": (signal.SIGKILL, signal.SIGTERM),
    "dpo": (signal.SIGTERM, signal.SIGKILL),
    "kto": (signal.SIGKILL, signal.SIGTERM),
    "distill": (signal.SIGTERM, signal.SIGKILL),
}
"""How the first learner ends in the first epoch, and the second after a checkpoint."""
RECORDING = ("record_batches=100",)


KTO, DISTILL = (pytest.param(name, marks=pytest.mark.nightly) for name in ("kto", "distill"))
PREFERENCES = ("dpo", KTO)
PIPELINES = ("sft", *PREFERENCES, DISTILL)


@pytest.fixture(scope="module", params=PIPELINES)
def undisturbed(
    request: pytest.FixtureRequest, redis_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """An undisturbed run."""
    pipeline: str = request.param
    folder = tmp_path_factory.mktemp(pipeline)
    with a_data_run(redis_server, folder, f"undisturbed-{pipeline}", pipeline, RECORDING) as run:
        assert run.start().wait(timeout=240) == 0, run.complaint()
        yield run


def pipeline_of(run: Run) -> str:
    """`kto` is a loss of `dpo`."""
    return "kto" if run.config.dpo.loss_type == "kto" else run.config.pipeline


def trained_steps(run: Run) -> list[int]:
    """Steps of the checkpoints that are kept."""
    return sorted(int(path.name[5:]) for path in (run.config.output_dir / "checkpoints").glob("step-*"))


def rows_trained(run: Run) -> list[int]:
    log = BatchLog(run.config.output_dir)
    batches = (
        log.read(step, LearnerRunConfig.model_validate(run.config.model_dump(include=set()))) for step in range(1, 7)
    )
    return [group.trajectories[0].seed for recorded in batches for group in recorded.batch.groups]


def test_every_row_is_trained_once_per_epoch_in_an_order_of_the_seed(undisturbed: Run) -> None:
    rows = rows_trained(undisturbed)
    epochs = [epoch for epoch in (rows[:20], rows[20:40], rows[40:]) if epoch]
    assert len(rows) == GROUPS[pipeline_of(undisturbed)]
    for epoch in epochs:
        assert set(Counter(epoch).values()) <= {1}
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1]


def test_a_data_run_lowers_its_losses_and_says_so(undisturbed: Run) -> None:
    counters, pipeline = undisturbed.counters(), pipeline_of(undisturbed)
    assert (counters.admitted, counters.trained, counters.in_flight) == (GROUPS[pipeline], GROUPS[pipeline], 0)
    records = undisturbed.records()
    assert [name for r in records for name in r.values if find_metric(r.source, name) is None] == []
    steps = [r.values for r in records if r.source == "learner" and r.step is not None]
    assert len(steps) == 6
    assert {"loss", "tokens_trained", "actor/grad_norm"} <= set(steps[-1])
    assert not {"reward", "staleness", "actor/mismatch_kl"} & set(steps[-1])
    if pipeline == "dpo":
        assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"} <= set(steps[-1])
        # The policy is still the reference, which is scored in other micro-batches: float32 sums differ in the last digits
        assert steps[0]["rewards/margins"].value == pytest.approx(0, abs=1e-5)
    if pipeline == "distill":
        assert {"kd_loss", "sft_loss"} <= set(steps[-1])
    if pipeline == "kto":
        assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "kl"} <= set(steps[-1])
        assert steps[0]["kl"].value == pytest.approx(0, abs=1e-5)
    losses = [r.values["loss"].value for r in records if r.source == "eval"]
    assert len(losses) == 4  # before, at 2 and 4, after
    assert losses[-1] < losses[0]
    assert undisturbed.phase() == "finished"


def test_a_data_run_is_proven_by_the_audit(undisturbed: Run, capfd: pytest.CaptureFixture[str]) -> None:
    folder = undisturbed.config.output_dir
    (folder / "config.yaml").write_text(undisturbed.config.model_dump_json())
    assert audit_run(str(folder), console=Console(width=200), redis_url=undisturbed.url) == 0
    assert "PROVEN" in capfd.readouterr().out


def end_learner(run: Run, version: int, end: signal.Signals) -> None:
    """Start a learner; end it at `version`, or one step after its predecessor."""
    version, learner = max(version, run.published() + 1), run.start()
    wait_until_sync(lambda: run.published() >= version, timeout_s=240)
    learner.send_signal(end)
    assert learner.wait(timeout=120) == (0 if end is signal.SIGTERM else -signal.SIGKILL), run.complaint()


def test_a_kill_a_stop_and_another_worker_change_no_weight(redis_server: str, tmp_path: Path, undisturbed: Run) -> None:
    """The worker ends with the first learner; each successor continues within the epoch."""
    pipeline = pipeline_of(undisturbed)
    with a_data_run(redis_server, tmp_path, f"disturbed-{pipeline}", pipeline, works=False) as run:
        for version, end in zip((1, 3), ENDS[pipeline], strict=True):
            with a_worker(run, f"worker-{version}"):
                end_learner(run, version, end)
            if end is signal.SIGTERM:
                assert trained_steps(run)[-1] == run.published(), "a stop saves the newest weights"
        with a_worker(run, "last"):
            assert run.start().wait(timeout=240) == 0, run.complaint()
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (GROUPS[pipeline], GROUPS[pipeline], 0)
        for step in sorted({*trained_steps(run)} & {*trained_steps(undisturbed)}):
            for name, tensor in undisturbed.weights(step).items():
                assert torch.equal(tensor, run.weights(step)[name]), f"{name} after step {step}"


def test_too_long_and_bad_rows_are_replaced_and_counted(redis_server: str, tmp_path: Path) -> None:
    with a_data_run(redis_server, tmp_path, "mixed", "sft", works=False) as run:
        path = tmp_path / "sft.jsonl"
        lines = path.read_text().splitlines()
        long = {"messages": [{"role": "user", "content": "Left " * 600}, {"role": "assistant", "content": "Up"}]}
        bad = {"messages": [{"role": "user", "content": "Left"}]}
        path.write_text("\n".join([json.dumps(long), json.dumps(bad), *lines[2:]]) + "\n")
        with a_worker(run, "late"):
            assert run.start().wait(timeout=240) == 0, run.complaint()
        counters = run.counters()
        assert counters.trained == 48
        assert counters.dropped == {"too_long": 3}
        assert counters.failed == {"bad_row": 3}


@pytest.mark.parametrize("undisturbed", PREFERENCES, indirect=True)
def test_a_precomputed_reference_gives_the_same_weights(redis_server: str, tmp_path: Path, undisturbed: Run) -> None:
    """Its logprobs are kept beside the rows, for the successor of a killed learner and for later runs."""
    pipeline = pipeline_of(undisturbed)
    precomputed = ["dpo.precompute_ref_log_probs=true"]
    with a_data_run(redis_server, tmp_path, f"precomputed-{pipeline}", pipeline, precomputed) as run:
        victim = run.start()
        wait_until_sync(lambda: run.published() >= 3, timeout_s=240)
        files = sorted(tmp_path.rglob("*.scores/reference@*/*.safetensors"))
        assert [path.parent.parent.name for path in files] == [
            f"{pipeline}.jsonl.scores",
            f"{pipeline}_val.jsonl.scores",
        ]
        written = [path.stat().st_mtime_ns for path in files]
        victim.kill()
        victim.wait()
        assert run.start().wait(timeout=240) == 0, run.complaint()
        assert [path.stat().st_mtime_ns for path in files] == written
        for name, tensor in undisturbed.weights(6).items():
            # files are scored row by row, the learner's reference in the policy's micro-batches
            torch.testing.assert_close(run.weights(6)[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def test_megatron_trains_a_mixture_of_experts(redis_server: str, tmp_path: Path) -> None:
    rows, folder = tmp_path / "words.jsonl", tmp_path / "experts"
    write_rows(rows, conversations(20))
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=1), words_of(rows))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | EXPERTS))
    settings = (
        f"pretrain={folder}",
        "max_steps=4",
        "actor_train.strategy_args.strategy_name=megatron_train",
        "actor_train.training_args.learning_rate=1e-2",
    )
    with a_data_run(redis_server, tmp_path, "experts", "sft", settings) as run:
        assert run.start().wait(timeout=240) == 0, run.complaint()
        losses = [record.values["loss"].value for record in run.records() if record.source == "eval"]
        checkpoint = run.config.output_dir / "checkpoints" / "step-000004"
        trained, status = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert losses[-1] < losses[0]
    assert type(trained).__name__ == "Qwen3MoeForCausalLM"
    assert not any(status[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
