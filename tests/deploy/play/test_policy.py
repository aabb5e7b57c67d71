"""The policy of a run's folder."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.play.policy import BatchingSampler, PromptRequest, SamplingParams, TransformersPolicy, policy_folder
from offbeat.deploy.play.token_sampling import make_warpers
from offbeat.services.chat.stops import load_decoder
from offbeat.services.messages.types import FinishReason
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.multimodal import TRAINED_ON_TEXT
from offbeat.trainer.training.checkpoint import LearnerState
from tests.families import write_multimodal


def save(run: Path, step: int, serial: int) -> Path:
    path = run / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "learner.json").write_text(json.dumps(asdict(LearnerState(step, "now", serial=serial))))
    return path


def test_a_runs_policy_is_its_last_written_checkpoint(tmp_path: Path) -> None:
    """Step 10 is of the lineage before the run went back to step 5."""
    save(tmp_path, 10, serial=3)
    newest = save(tmp_path, 8, serial=4)
    (tmp_path / "checkpoints" / ".writing-000001-0-step-000012").mkdir()
    assert policy_folder(tmp_path) == newest


def test_steps_of_seven_digits_follow_those_of_six(tmp_path: Path) -> None:
    save(tmp_path, 999_999, serial=0)
    later = save(tmp_path, 1_000_000, serial=0)
    assert policy_folder(tmp_path) == later


def test_an_adapter_alone_is_refused(tmp_path: Path) -> None:
    """As `offbeat export --adapter` writes it; a checkpoint has merged weights."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is an adapter without its base: name the run or checkpoint"):
        policy_folder(tmp_path)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_folders_own_sampling_is_not_the_policys(folder: Path, tmp_path: Path, temperature: float) -> None:
    """As in the engine: Qwen2.5's generation_config.json has a repetition penalty."""
    policy = Path(shutil.copytree(folder / "policy", tmp_path / "policy"))

    def complete() -> object:
        return TransformersPolicy(policy, [0], seed=1).complete(
            [PromptRequest((3, 4, 5), 8)], SamplingParams(temperature, 1.0, -1)
        )

    expected = complete()
    (policy / "generation_config.json").write_text(json.dumps({"repetition_penalty": 5.0, "min_p": 0.5}))
    assert complete() == expected


async def test_an_answer_ends_with_a_stop_string_of_the_run_or_of_the_call(folder: Path) -> None:
    policy, params = TransformersPolicy(folder / "policy", [9999], seed=1), SamplingParams(1.0, 1.0, -1)  # no end token
    decode = load_decoder(folder / "policy")
    word = decode([5, 5])[-2:]
    for of_run, of_call in (((word,), ()), ((), (word,)), (("never",), (word,))):
        sample = BatchingSampler(policy, params, max_new_tokens=200, stop_strings=of_run, folder=folder / "policy")
        completion = await sample((3, 4), 200, stop_strings=of_call)
        assert word in decode(completion.token_ids)
        assert word not in decode(completion.token_ids[:-1])
        assert completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("params", [SamplingParams(0.0, 1.0, -1), SamplingParams(0.7, 0.9, 5)])
def test_of_a_sampled_token_one_logprob_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """A distribution of each token of 32 answers of 512 is 9 GiB for a vocabulary of 150,000 words."""
    policy, answers = TransformersPolicy(folder / "policy", [0], seed=1), []
    generate = policy._model.generate
    monkeypatch.setattr(policy._model, "generate", lambda **options: answers.append(generate(**options)) or answers[-1])
    prompts = ((3, 4, 5), (6, 7))
    completions = policy.complete([PromptRequest(prompt, 8) for prompt in prompts], params)
    assert isinstance(answers[0], torch.Tensor)
    warpers = make_warpers(*params)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.inference_mode():
            logits = policy._model(ids).logits[0, len(prompt) - 1 : -1]
            logprobs = warpers(ids, logits).log_softmax(-1)  # type: ignore[arg-type]
        expected = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", TRAINED_ON_TEXT)
def test_multimodal_folders_are_played_on_text(family: str, tmp_path: Path) -> None:
    write_multimodal(tmp_path, family)
    load_policy(tmp_path, ModelArgs(), seed=0).model.save_pretrained(tmp_path)
    policy = TransformersPolicy(tmp_path, [2], seed=0)
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=0)
    requests = [PromptRequest((5, 6, 7, 8, 9), 4), PromptRequest((5, 6), 4)]
    alone = [policy.complete([request], params)[0].token_ids for request in requests]
    assert [each.token_ids for each in policy.complete(requests, params)] == alone
