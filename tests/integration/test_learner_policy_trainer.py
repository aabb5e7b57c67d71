"""A run's weights with critic and reference on DeepSpeed: made, saved, brought back exactly."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.deploy import run_folder, run_setup
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.model_export import export_adapter
from offbeat.envs.frozen_lake.env import WORDS
from offbeat.services.errors import ControlError
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.lora import named_weights
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint import LearnerState
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from offbeat.trainer.training.reproduction import find_plan, reproduce
from tests.fakes import make_group, train_on
from tests.families import write_family
from tests.integration.steering import OFFBEAT
from tests.paths import CONFIGS
from tests.trainer.engines.payload import Payload

QUICKSTART = CONFIGS / "quickstart.yaml"
CRITIC = ("adv_estimator=gae", "reward_normalization.method=identity", "zero_variance=train")
REFERENCE = ("add_token_level_kl=true", "init_kl_coef=0.1", "target_kl=0.01")
RUNNING = ("reward_normalization={method: null, norm_mean_type: running, norm_std_type: running}",)
GROUPS = [make_group(n, rewards=(0.0, 1.0, 0.5)) for n in range(3)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone


def run_of(folder: Path, overrides: Sequence[str], file: Path = QUICKSTART) -> LearnerRun:
    small = ["tiny.num_hidden_layers=1", "warm_start.steps=3", "save_steps=2", "max_steps=6"]
    config = load_run(file, [f"output_dir={folder}", *small, *overrides])
    run_setup.prepare_folder(config)
    return LearnerRun("run", "now", folder, config)


def begun(run: LearnerRun, ranks: Ranks) -> PolicyTrainer:
    trainer = PolicyTrainer(run, ranks)
    assert trainer.begin(lambda *_: None, lambda: False)
    return trainer


def weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.tensors()}


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


LORA = ("actor_train.model_args.lora_target=all-linear", *REFERENCE)
MOVING = (*REFERENCE, "ref_model_sync_steps=2", "use_kl_loss=true", "kl_loss_coef=0.1", "kl_loss_type=full")
BY_SHARE = ("ref_model_sync_steps=1", "ref_model_mixup_alpha=.1", "actor_train.model_args.dtype=bfloat16")
FOUR_BITS = (*LORA, "warm_start=null", "actor_train.model_args.load_in_4bit=true")
NESTED = (*FOUR_BITS, "actor_train.model_args.use_bnb_nested_quant=true", "actor_train.model_args.dtype=bfloat16")
EIGHT_BIT_MOMENTS = ("actor_train.training_args.optim=adamw_8bit",)
BFLOAT16 = ("actor_train.model_args.dtype=bfloat16",)
STAGE_3 = ("actor_train.strategy_args.zero_stage=3",)
VALUE_HEAD = (*CRITIC, "critic.backbone=policy", "critic_warmup=1")
MEGATRON = ("actor_train.strategy_args.strategy_name=megatron_train", "actor_train.model_args.shared_prefix=true")
FSDP2 = ("actor_train.strategy_args.strategy_name=fsdp2_train", "actor_train.model_args.shared_prefix=true")


@pytest.mark.parametrize(
    "overrides",
    [
        RUNNING,
        CRITIC,
        (*CRITIC, *REFERENCE),
        STAGE_3,
        LORA,
        (*LORA, *STAGE_3),
        MOVING,
        (*FSDP2, *CRITIC, *REFERENCE),
        (*VALUE_HEAD, *LORA, *FSDP2),
        VALUE_HEAD,
        (*VALUE_HEAD, *LORA, *STAGE_3),
        (*VALUE_HEAD, *FSDP2),
        (*MEGATRON, *MOVING),
        (*FOUR_BITS, *CRITIC),
        (*NESTED, *EIGHT_BIT_MOMENTS),
        EIGHT_BIT_MOMENTS,
        (*EIGHT_BIT_MOMENTS, *BFLOAT16),
        (*EIGHT_BIT_MOMENTS, *STAGE_3),
    ],
)
def test_a_trainer_brought_back_continues_exactly(tmp_path: Path, ranks: Ranks, overrides: tuple[str, ...]) -> None:
    run = run_of(tmp_path, overrides)
    trainer = begun(run, ranks)
    for step in range(2):
        train_on(trainer, GROUPS, step)
    folder = tmp_path / "saved"
    folder.mkdir()
    trainer.save(folder)
    kl_coef = trainer.kl_coef
    expected = train_on(trainer, GROUPS, 2)
    again = PolicyTrainer(run, ranks)
    again.load(folder, kl_coef)
    found = train_on(again, GROUPS, 2)
    assert_equal(weights(trainer), weights(again))
    assert again.kl_coef == trainer.kl_coef
    assert found == expected


@pytest.mark.parametrize("overrides", [(), ("actor_train.model_args.lora_target=all-linear",)])
def test_a_mixtures_checkpoint_has_the_names_of_published_models(
    tmp_path: Path, ranks: Ranks, overrides: tuple[str, ...]
) -> None:
    """As vLLM's models load it; in memory experts are stacked."""
    published = tmp_path / "published"
    write_tiny_policy(published, TinyPolicyConfig(), WORDS)
    write_family(published, "mixtral", max_position_embeddings=512)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(published)).save_pretrained(published)
    run = run_of(
        tmp_path / "run",
        (f"pretrain={published}", "~tiny", "actor_infer.strategy_args.strategy_name=hf_infer", *overrides),
    )
    trainer = begun(run, ranks)
    train_on(trainer, GROUPS, 0)
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer.save(saved)
    names = [load_file(folder / "model.safetensors").keys() for folder in (published, saved)]
    assert names[0] == names[1]
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert_equal({name: each.detach() for name, each in named_weights(loaded)}, weights(trainer))


@pytest.mark.parametrize("overrides", [(), STAGE_3, FSDP2], ids=["whole", "sharded", "fsdp2"])
def test_a_16_bit_reference_that_follows_by_a_share_is_resumed_exactly(
    tmp_path: Path, ranks: Ranks, overrides: tuple[str, ...]
) -> None:
    run = run_of(tmp_path, (*REFERENCE, *BY_SHARE, *overrides))
    trainer, again = begun(run, ranks), PolicyTrainer(run, ranks)
    train_on(trainer, GROUPS, 0)
    folder = tmp_path / "saved"
    folder.mkdir()
    trainer.save(folder)
    again.load(folder, trainer.kl_coef)
    for each in (trainer, again):
        train_on(each, GROUPS, 1)
        copy = tmp_path / f"saved-{each is again}"
        copy.mkdir()
        each.save(copy)
    saved = [load_file(path / "state" / "reference.safetensors") for path in tmp_path.glob("saved-*")]
    assert_equal(*saved)
    assert_equal(weights(trainer), weights(again))


@pytest.mark.parametrize("overrides", [(), STAGE_3, LORA], ids=["whole", "sharded", "adapters"])
def test_a_value_head_warms_up_alone_and_never_leaves_the_learner(
    tmp_path: Path, ranks: Ranks, overrides: tuple[str, ...]
) -> None:
    run = run_of(tmp_path, (*VALUE_HEAD, *overrides))
    trainer = begun(run, ranks)
    start = weights(trainer)
    said = [train_on(trainer, GROUPS, step) for step in range(2)]
    assert said[0]["critic/values/max"].value == 0.0 != said[1]["critic/values/max"].value
    folder = tmp_path / "saved"
    folder.mkdir()
    trainer.save(folder)
    assert weights(trainer).keys() == start.keys() == load_file(folder / "model.safetensors").keys()
    fresh = begun(run_of(tmp_path / "fresh", (*VALUE_HEAD, *overrides)), ranks)
    train_on(fresh, GROUPS, 0)
    assert_equal(weights(fresh), start)
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights(trainer).items())


def test_the_reference_stays_at_the_first_weights(tmp_path: Path, ranks: Ranks) -> None:
    run = run_of(tmp_path, REFERENCE)
    trainer = begun(run, ranks)
    gauges = [train_on(trainer, GROUPS, step) for step in range(2)]
    assert gauges[0]["actor/kl_coef"].value != 0.1
    assert (tmp_path / "start" / "model.safetensors").is_file()
    start = load_file(tmp_path / "start" / "model.safetensors")
    assert not torch.equal(start["model.norm.weight"], weights(trainer)["model.norm.weight"])


def test_a_run_from_another_runs_checkpoint_keeps_its_reference(tmp_path: Path, ranks: Ranks) -> None:
    first = run_of(tmp_path / "first", REFERENCE)
    trainer, folder = begun(first, ranks), first.checkpoints / "step-000001"
    train_on(trainer, GROUPS, 0)
    folder.mkdir(parents=True)
    trainer.save(folder)
    kl_coef = trainer.kl_coef
    expected = train_on(trainer, GROUPS, 1)
    second = run_of(tmp_path / "second", REFERENCE)
    again, copy = PolicyTrainer(second, ranks), second.checkpoints / "step-000001"
    again.load(folder, kl_coef)
    copy.mkdir(parents=True)
    again.save(copy)
    assert train_on(again, GROUPS, 1) == expected
    third = PolicyTrainer(run_of(tmp_path / "third", REFERENCE), ranks)
    third.load(copy, kl_coef)
    assert train_on(third, GROUPS, 1) == expected


def test_a_reference_that_was_not_kept_is_not_made_up(tmp_path: Path, ranks: Ranks) -> None:
    first = run_of(tmp_path / "first", ())
    folder = first.checkpoints / "step-000000"
    folder.mkdir(parents=True)
    begun(first, ranks).save(folder)
    for name in ("first", "next"):
        late = PolicyTrainer(run_of(tmp_path / name, REFERENCE), ranks)
        with pytest.raises(RuntimeError, match="after its warm start"):
            late.load(folder, 0.0)


def test_reference_and_critic_have_models_of_their_own(tmp_path: Path, ranks: Ranks) -> None:
    """Another run's policy, also beside adapters, whose reference is the policy without them otherwise."""
    start = begun(run_of(tmp_path / "made", ("seed=7", *REFERENCE)), ranks)
    folder = tmp_path / "saved"
    folder.mkdir()
    start.save(folder)
    path, exact = f"reference.model_args.model_name_or_path={folder}", "old_logprobs=recompute"
    for overrides in (REFERENCE, LORA):
        first = {
            name: train_on(begun(run_of(tmp_path / f"{name}-{len(overrides)}", each), ranks), GROUPS, 0)
            for name, each in (("start", (*overrides, exact)), ("own", (*overrides, exact, path)))
        }
        kl = {name: gauges["actor/kl_in_reward"].value for name, gauges in first.items()}
        assert abs(kl["start"]) < 1e-6 < abs(kl["own"])
    heads = {
        key: begun(run_of(tmp_path / f"critic-{key}", (*CRITIC, *each)), ranks)
        for key, each in (("policy", ()), ("reward", (f"reward_pretrain={folder}",)))
    }
    for trainer in heads.values():
        assert trainer._critic is not None
    critics = [dict(each._critic.tensors()) for each in heads.values() if each._critic]
    assert any(not torch.equal(tensor, critics[1][name]) for name, tensor in critics[0].items())
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(critics[1]["embed_tokens.weight"], saved["model.embed_tokens.weight"])


def test_a_reference_in_shards_says_what_a_whole_one_says(tmp_path: Path, ranks: Ranks) -> None:
    sharded = ("reference.strategy_args.strategy_name=deepspeed_infer", "use_kl_loss=true", "kl_loss_coef=0.1")
    found: list[list[float]] = []
    for name, overrides in (("whole", sharded[1:]), ("shards", sharded)):
        trainer = begun(run_of(tmp_path / name, (*REFERENCE, *overrides)), ranks)
        gauges = [train_on(trainer, GROUPS, step) for step in range(2)]
        found.append(
            [each[key].value for each in gauges for key in ("actor/kl_loss", "actor/grad_norm", "actor/kl_coef")]
        )
    assert found[0][3] > 1e-6
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("engine", [STAGE_3, FSDP2], ids=["zero-3", "fsdp2"])
def test_adapters_are_trained_on_the_warm_start_which_stays_the_reference(
    tmp_path: Path, ranks: Ranks, engine: tuple[str, ...]
) -> None:
    run = run_of(tmp_path, (*LORA, *engine, "use_kl_loss=true", "kl_loss_coef=0.1"))
    trainer = begun(run, ranks)
    start = load_file(tmp_path / "start" / "model.safetensors")
    assert_equal(weights(trainer), start)
    gauges = [train_on(trainer, GROUPS, step) for step in range(2)]
    assert gauges[0]["actor/kl_loss"].value == pytest.approx(0.0, abs=1e-9)
    assert gauges[1]["actor/kl_loss"].value > 1e-6
    found = weights(trainer)
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, start[name])}
    assert changed == {name for name in found if "_proj.weight" in name}
    apart = {name: tensor.clone() for name, tensor in trainer._policy.tensors("parts")}
    assert_equal({name: apart[name] for name in start}, start)
    for name in changed:
        path = f"base_model.model.{name}".removesuffix(".weight")
        product = apart[f"{path}.lora_B.weight"] @ apart[f"{path}.lora_A.weight"]
        torch.testing.assert_close(found[name], start[name] + 2.0 * product, rtol=0, atol=1e-6)
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    trainer.save(checkpoint)
    export_adapter(tmp_path, tmp_path / "adapter", print)  # which compares it with the merged weights
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_equal(saved, {name: tensor for name, tensor in apart.items() if ".lora_" in name})


@pytest.mark.parametrize("of_second", [(), ("warm_start=null",)], ids=["warm-start", "none"])
@pytest.mark.parametrize("engine", [(), FSDP2], ids=["zero-0", "fsdp2"])
def test_adapters_from_another_runs_checkpoint_keep_their_base(
    tmp_path: Path, ranks: Ranks, engine: tuple[str, ...], of_second: tuple[str, ...]
) -> None:
    first, second = (
        run_of(tmp_path / name, (*LORA, *engine, *of)) for name, of in (("first", ()), ("second", of_second))
    )
    trainer, again = begun(first, ranks), PolicyTrainer(second, ranks)
    train_on(trainer, GROUPS, 0)
    checkpoints = [run.checkpoints / "step-000001" for run in (first, second)]
    for each in checkpoints:
        each.mkdir(parents=True)
    trainer.save(checkpoints[0])
    again.load(checkpoints[0], trainer.kl_coef)
    train_on(again, GROUPS, 1)
    again.save(checkpoints[1])
    assert_equal(*(load_file(run.output_dir / "start" / "model.safetensors") for run in (first, second)))
    adapter = json.loads((checkpoints[1] / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(second.output_dir / "start")
    export_adapter(checkpoints[1], tmp_path / "adapter", print)


def test_a_policy_of_ones_own_is_taken_as_it_is(tmp_path: Path, ranks: Ranks) -> None:
    made = begun(run_of(tmp_path / "made", ()), ranks)
    folder = tmp_path / "own"
    folder.mkdir()
    made.save(folder)
    run = run_of(tmp_path / "next", (f"pretrain={folder}", "warm_start=null"))
    assert_equal(weights(begun(run, ranks)), weights(made))


def test_a_warm_start_on_images_trains_the_tower_and_is_the_seeds_alone(tmp_path: Path, ranks: Ranks) -> None:
    file = CONFIGS / "frozen_lake_vision.yaml"
    steps = ("warm_start.steps=2", "warm_start.episodes_per_step=2")
    one, again, cold = (
        weights(begun(run_of(tmp_path / name, overrides, file), ranks))
        for name, overrides in (("one", steps), ("again", steps), ("cold", ("warm_start=null",)))
    )
    assert_equal(one, again)
    towers = [name for name in one if ".visual." in name]
    assert len(towers) > 10
    still = [name for name in towers if torch.equal(one[name], cold[name])]
    assert not still


def test_the_warm_start_and_the_seed_fix_the_first_weights(tmp_path: Path, ranks: Ranks) -> None:
    one, same, other = (
        weights(begun(run_of(tmp_path / str(i), (f"seed={seed}",)), ranks)) for i, seed in enumerate((1, 1, 2))
    )
    assert_equal(one, same)
    assert not torch.equal(one["model.norm.weight"], other["model.norm.weight"])


def test_resuming_and_reproducing_give_the_weights_of_an_intact_run(tmp_path: Path, ranks: Ranks) -> None:
    """Steps 1 to 6 on recorded groups: at one go, with a death after step 3, and by `offbeat learner reproduce` from
    step 2."""
    run = run_of(tmp_path, ("zero_variance=train", "entropy_loss_coef=0.01"))
    log = BatchLog(tmp_path, max_kept=6)
    checkpoints = CheckpointStore(run.checkpoints, keep=9, epoch=1)

    def save(trainer: PolicyTrainer, step: int) -> None:
        log.flush()
        checkpoints.save(LearnerState(step, "now", kl_coef=trainer.kl_coef), trainer.save).result()

    groups = {
        step: [make_group(2 * step + n, rewards=(0.0, 1.0, 0.5), version=step - 1) for n in (0, 1)]
        for step in range(1, 7)
    }
    undisturbed = begun(run, ranks)
    for step in range(1, 7):
        batch = StepBatch.build(step - 1, groups[step], run.config)
        log.record(batch, run.config.settings.learning_rate)
        undisturbed.train(batch)
        if step in (2, 6):
            save(undisturbed, step)
    resumed = PolicyTrainer(run, ranks)
    resumed.load(run.checkpoints / "step-000002", undisturbed.kl_coef)
    for step in range(3, 7):
        batch = log.read(step, run.config).batch
        assert [group.number for group in batch.groups] == [group.number for group in groups[step]]
        resumed.train(batch)
    assert_equal(weights(undisturbed), weights(resumed))

    replayed = reproduce(run, find_plan(run, None), ranks, sample_step=None, show=lambda _: None)
    assert (replayed.start, replayed.steps) == (2, (3, 4, 5, 6))
    assert [(each.step, each.equal) for each in replayed.compared] == [(6, True)]


def test_a_poisoned_checkpoint_is_refused_by_reproduce_and_not_run(tmp_path: Path, ranks: Ranks) -> None:
    """Its digests are right, as whoever hands a folder on can make them."""
    run = run_of(tmp_path, ("zero_variance=train",))
    trainer, log = begun(run, ranks), BatchLog(tmp_path, max_kept=6)

    def save_poisoned(folder: Path) -> None:
        trainer.save(folder)
        (file,) = folder.glob("state/policy/state/*.pt")
        torch.save(torch.load(file, weights_only=False) | {"extra": Payload(tmp_path / "ran")}, file)

    state = LearnerState(0, "now", kl_coef=trainer.kl_coef)
    CheckpointStore(run.checkpoints, keep=9, epoch=1).save(state, save_poisoned).result()
    log.record(StepBatch.build(0, [make_group(0, rewards=(0.0, 1.0), version=0)], run.config), 1e-3)
    log.flush()
    run_folder.write_config(tmp_path, run.config.model_dump_json())
    command = [OFFBEAT, "learner", "reproduce", tmp_path, "--step", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "mp_rank_00_model_states.pt is no state of this engine and was not read: it names posix.mkdir" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_one_step_is_shown_with_versions_ratios_and_advantages(tmp_path: Path, ranks: Ranks) -> None:
    run = run_of(tmp_path, ("zero_variance=train",))
    trainer, log = begun(run, ranks), BatchLog(tmp_path, max_kept=6)
    state = LearnerState(0, "now", kl_coef=trainer.kl_coef)
    CheckpointStore(run.checkpoints, keep=9, epoch=1).save(state, trainer.save).result()
    batch = StepBatch.build(0, [make_group(0, rewards=(0.0, 1.0), version=0)], run.config)
    log.record(batch, 1e-3)
    trainer.train(batch)
    log.flush()
    replayed = reproduce(run, find_plan(run, 1), ranks, sample_step=1, show=lambda _: None)
    assert replayed.compared == ()
    low, high = replayed.samples
    assert (low.reward, high.reward, low.versions, low.staleness, low.tokens) == (0.0, 1.0, (0, 0), 0, 4)
    assert low.advantage_mean == -high.advantage_mean == -0.5
    assert 0 < low.ratio_mean <= low.ratio_max
    with pytest.raises(ControlError, match="no way to step 2 from a checkpoint before it: recorded are steps 1 to 1"):
        find_plan(run, 2)
