"""What 4-bit weights under adapters, and moments of 8 bits, can't be combined with."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from offbeat.deploy.config.checks.initial_adapter import check_adapter
from offbeat.deploy.config.checks.memory import GIB, count_weights, learner_gib
from offbeat.deploy.config.checks.model import find_checkpoint
from offbeat.deploy.config.checks.run import check_settings
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.adapter_settings import QUANTIZATION_CONFIG
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.quantization import write_quantization
from offbeat.trainer.training.checkpoint import LEARNER, MANIFEST
from tests.deploy.config.checks.test_initial_adapter import write_adapter
from tests.families import write_family
from tests.paths import CONFIGS

MODEL = "actor_train.model_args"
FOUR_BITS = (f"{MODEL}.load_in_4bit=true", "warm_start=null")
OPTIM = "actor_train.training_args.optim"
KL_OF_SERVICE = ("use_kl_loss=true", "reference.strategy_args={placement: service, num_replicas: 1}")


def lora(*overrides: str) -> RunConfig:
    return validate_tree(compose_tree(CONFIGS / "recipes" / "lora.yaml", list(overrides)))


def problems(overrides: Sequence[str]) -> dict[str, str]:
    return {issue.path: issue.message for issue in check_settings(lora(*overrides), cores=8)}


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("actor_train.strategy_args.zero_stage=2", "actor_train.num_processes=2"),
        (f"{MODEL}.dtype=bfloat16", f"{MODEL}.use_bnb_nested_quant=true", f"{OPTIM}=adamw_8bit"),
        ("actor_infer.strategy_args.strategy_config.max_lora_rank=16",),
        (f"{MODEL}.use_rslora=true", f"{MODEL}.shared_prefix=true", f"{MODEL}.disable_gradient_checkpointing=false"),
    ],
)
def test_what_was_run_is_accepted(more: tuple[str, ...]) -> None:
    assert problems((*FOUR_BITS, *more)) == {}


@pytest.mark.parametrize(
    ("more", "path", "says"),
    [
        (("actor_train.strategy_args.strategy_name=fsdp2_train",), "actor_train.strategy_args.strategy_name", "shards"),
        (("actor_train.strategy_args.zero_stage=3",), "actor_train.strategy_args.zero_stage", "take 2"),
        (("tiny.vision={}",), f"{MODEL}.load_in_4bit", "image input"),
        (KL_OF_SERVICE, "reference.strategy_args.placement", "take learner"),
    ],
)
def test_what_4_bit_weights_are_not_combined_with(more: tuple[str, ...], path: str, says: str) -> None:
    assert says in problems((*FOUR_BITS, *more))[path]


def test_a_warm_start_trains_all_weights() -> None:
    assert problems([FOUR_BITS[0]])["warm_start"].startswith("it trains all weights")


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "ulysses_size"])
def test_models_divided_over_processes_have_no_4_bit_weights(name: str) -> None:
    split = ("actor_train.strategy_args.strategy_name=fsdp2_train", f"actor_train.strategy_args.{name}=2")
    assert "actor_train.strategy_args.strategy_name" in problems((*FOUR_BITS, *split, "actor_train.num_processes=2"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"load_in_4bit": True}, "has no effect without lora_target"),
        ({"lora_target": "all-linear", "bnb_4bit_quant_type": "fp4"}, "has no effect without load_in_4bit"),
        ({"lora_target": "all-linear", "use_bnb_nested_quant": True}, "has no effect without load_in_4bit"),
    ],
)
def test_keys_without_effect_are_refused(args: dict[str, object], says: str) -> None:
    """A whole model is not trained in 4 bits."""
    with pytest.raises(ValidationError, match=says):
        ModelArgs.model_validate(args)


@pytest.mark.parametrize("name", ["fsdp2_train", "megatron_train"])
def test_moments_of_8_bits_are_deepspeeds_alone(name: str) -> None:
    found = problems(
        ["~actor_train.model_args", f"actor_train.strategy_args.strategy_name={name}", f"{OPTIM}=adamw_8bit"]
    )
    assert found[OPTIM] == (
        f"{name} trains with moments in float32 alone: leave adamw_8bit out, or take deepspeed_train"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_family(folder, "llama")
    load_policy(folder, ModelArgs(), seed=1).model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_least_memory_of_a_learner_counts_a_byte_per_moment(model: Path, dtype: str) -> None:
    of_model = (f"pretrain={model}", "~tiny", "warm_start=null", "~actor_train.model_args", f"+{MODEL}.dtype={dtype}")
    wide, narrow = (learner_gib(lora(*of_model, f"+{OPTIM}={name}")) for name in ("adamw_torch", "adamw_8bit"))
    assert wide is not None
    assert narrow == pytest.approx(wide - 6 * count_weights(str(model)) / GIB)


def test_the_least_memory_of_a_learner_counts_half_a_byte_per_weight(model: Path) -> None:
    of_model = (f"pretrain={model}", "~tiny", "warm_start=null", f"{MODEL}.dtype=bfloat16")
    wide, narrow = (learner_gib(lora(*of_model, *more)) for more in ((), FOUR_BITS[:1]))
    assert wide is not None
    assert narrow == pytest.approx(wide / 4)


def model_args(**changes: object) -> dict[str, object]:
    """Return the keys of the adapter that `write_adapter` writes."""
    return {"lora_target": "q_proj,v_proj", "lora_rank": 4, "lora_alpha": 12.0, **changes}


def write_quantized_adapter(folder: Path, **args: object) -> None:
    adapter = write_adapter(folder)
    if args:
        write_quantization(adapter, ModelArgs.model_validate(model_args(**args)))


def issues_of(resume: Path | str, **args: object) -> dict[str, str]:
    tree = {"actor_train": {"model_args": model_args(**args)}, "resume_from_checkpoint": str(resume)}
    return {issue.path: issue.message for issue in check_adapter(validate_tree(tree))}


@pytest.mark.parametrize(
    ("of_checkpoint", "of_run", "path", "says"),
    [
        ({"load_in_4bit": True}, {}, "load_in_4bit", "false, and .* were trained with true"),
        ({}, {"load_in_4bit": True}, "load_in_4bit", "true, and .* were trained with false"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            {"load_in_4bit": True},
            "bnb_4bit_quant_type",
            "nf4, and .* were trained with fp4",
        ),
        (
            {"load_in_4bit": True},
            {"load_in_4bit": True, "use_bnb_nested_quant": True},
            "use_bnb_nested_quant",
            "true, and .* were trained with false",
        ),
    ],
)
def test_a_resumed_runs_base_keeps_its_bits(
    tmp_path: Path, of_checkpoint: dict[str, object], of_run: dict[str, object], path: str, says: str
) -> None:
    """The learner would read the bits of the checkpoint as values of another kind."""
    write_quantized_adapter(tmp_path / "adapter", **of_checkpoint)
    assert issues_of(tmp_path, **of_checkpoint) == {}
    (only,) = issues_of(tmp_path, **of_run).items()
    assert only[0] == f"{MODEL}.{path}"
    assert re.match(says, only[1])


def test_a_checkpoints_damaged_file_is_named(tmp_path: Path) -> None:
    write_quantized_adapter(tmp_path / "adapter", load_in_4bit=True)
    (tmp_path / "adapter" / QUANTIZATION_CONFIG).write_text("{")
    message = issues_of(tmp_path, load_in_4bit=True)["resume_from_checkpoint"]
    assert message.startswith(f"{tmp_path / 'adapter' / QUANTIZATION_CONFIG} can't be read: ")


def test_a_checkpoint_by_url_is_not_the_newest_one_of_the_run(tmp_path: Path) -> None:
    """Its adapters are checked once the learner has fetched it."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / LEARNER).write_text('{"serial": 1, "step": 2}')
    (checkpoint / MANIFEST).write_text("{}")
    tree = {"actor_train": {"model_args": model_args()}, "output_dir": str(tmp_path / "run")}
    newest, elsewhere = (
        find_checkpoint(validate_tree(tree | {"resume_from_checkpoint": value}))
        for value in (True, f"file://{tmp_path}/ck")
    )
    assert newest == checkpoint
    assert elsewhere is None


@pytest.mark.parametrize(
    ("of_adapter", "of_run", "path", "says"),
    [
        ({"load_in_4bit": True}, {}, "load_in_4bit", "false, and the adapter .* on a base with true: take that"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            {"load_in_4bit": True},
            "bnb_4bit_quant_type",
            "nf4, and .* on a base with fp4",
        ),
    ],
)
def test_an_adapter_that_starts_a_run_keeps_its_base(
    tmp_path: Path, of_adapter: dict[str, object], of_run: dict[str, object], path: str, says: str
) -> None:
    write_quantized_adapter(tmp_path / "adapter", **of_adapter)

    def found(**args: object) -> dict[str, str]:
        tree = {"actor_train": {"model_args": {"adapter_name_or_path": str(tmp_path / "adapter"), **args}}}
        return {issue.path: issue.message for issue in check_adapter(validate_tree(tree))}

    assert found(**of_adapter) == {}
    (only,) = found(**of_run).items()
    assert only[0] == f"{MODEL}.{path}"
    assert re.match(says, only[1])


def test_an_adapter_that_names_no_base_starts_a_quantized_run(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter")
    args = {"adapter_name_or_path": str(tmp_path / "adapter"), "load_in_4bit": True}
    assert not list(check_adapter(validate_tree({"actor_train": {"model_args": args}})))
