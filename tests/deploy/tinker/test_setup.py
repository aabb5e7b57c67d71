import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.deploy import run_folder
from offbeat.deploy.config.loader import read_run
from offbeat.deploy.tinker.setup import TinkerSetup
from offbeat.services.errors import MeshError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.hf.model import PolicyModel
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.lora import named_weights
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.tinker.base_model import MARKER, WITHOUT_BUFFERS, export_base, load_base, weights_file
from tests.families import write_family, write_multimodal
from tests.integration.policy_weights import random_policy


def prepare(folder: Path, *overrides: str) -> TinkerSetup:
    return TinkerSetup(read_run(Path("quickstart"), [f"output_dir={folder}/run", *overrides]))


@pytest.mark.parametrize("key", ["actor_infer.num_replicas", "actor_train.num_processes"])
def test_more_than_one_engine_or_learner_is_refused_with_its_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(MeshError, match=f"{key}: 2: a Tinker server has one engine and one learner: set it to 1"):
        TinkerSetup(read_run(Path("quickstart"), [f"output_dir={tmp_path}", f"{key}=2"]))
    assert not list(tmp_path.iterdir())


def test_a_runs_folder_is_refused(tmp_path: Path) -> None:
    run_folder.claim(tmp_path / "run", "lake", resume=False)
    with pytest.raises(MeshError, match="run is the folder of run 'lake': set a folder of its own"):
        prepare(tmp_path)
    assert not (tmp_path / "run" / "policy").exists()


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bfloat16"), ("cpu", "float32")])
def test_adapters_on_gpus_are_sampled_in_bfloat16(tmp_path: Path, device: str, dtype: str) -> None:
    setup = TinkerSetup(read_run(Path("quickstart"), [f"output_dir={tmp_path}", f"actor_infer.device={device}"]))
    settings = setup.service("redis://127.0.0.1/0")
    assert GenerationConfig.model_validate_json(settings.generation).model_args.dtype == dtype


def test_a_folder_belongs_to_the_weights_that_its_base_model_has(tmp_path: Path) -> None:
    """Adapters and moments would go on upon others without a word."""
    model = tmp_path / "model"
    write_tiny_policy(model, TinyPolicyConfig(), [f"w{i}" for i in range(25)])
    for seed in (3, 3, 4):
        random_policy(model, seed).save_pretrained(model)
        if seed == 4:
            with pytest.raises(MeshError, match=f"other weights, sizes or words than {model} has now: set another"):
                prepare(tmp_path, f"pretrain={model}")
        else:
            prepare(tmp_path, f"pretrain={model}")


@pytest.mark.parametrize(
    "change", ["tiny.hidden_size=128", "custom_envs.FrozenLake.agent_template='{observation} ahoi'"]
)
def test_another_tiny_policy_is_refused_before_its_files_are_replaced(tmp_path: Path, change: str) -> None:
    setup = prepare(tmp_path)
    files = sorted((tmp_path / "run" / "policy").iterdir())
    before = [each.read_bytes() for each in files]
    with pytest.raises(MeshError, match="set another output_dir"):
        prepare(tmp_path, change)
    assert [each.read_bytes() for each in files] == before
    marker = setup.root / MARKER
    known = json.loads(marker.read_text())
    marker.write_text(json.dumps({key: value for key, value in known.items() if key != "digest"}))
    prepare(tmp_path)  # with what an earlier build wrote
    assert json.loads(marker.read_text()) == known


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor_train.model_args={lora_target: all-linear, load_in_4bit: true}",
            "actor_train.model_args.load_in_4bit: a Tinker server's base is not quantized: leave it out",
        ),
        (
            "actor_train.training_args.optim=adamw_8bit",
            "actor_train.training_args.optim: a Tinker server's optimizer is AdamW in float32: leave it out",
        ),
        ("tiny.vision={}", "pretrain: the policy has image input; adapters support text models only"),
        ("actor_infer.kv_cache_gib=1e-6", "actor_infer.kv_cache_gib: 1e-06 GiB hold no sequence"),
    ],
)
def test_a_model_that_adapters_or_the_engine_cannot_serve_is_refused(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(MeshError, match=message):
        prepare(tmp_path, override)
    assert not list(tmp_path.iterdir())


def test_a_base_that_can_not_be_packed_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "bloom")
    with pytest.raises(MeshError, match=r"pretrain: .*model"):
        prepare(tmp_path, f"pretrain={tmp_path / 'model'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("write", "family"), [(write_family, "lfm2"), (write_multimodal, "qwen3_5")])
def test_recurrent_layers_share_no_pass(write: Callable[[Path, str], None], family: str, tmp_path: Path) -> None:
    write(tmp_path / "model", family)
    with pytest.raises(MeshError, match=r"tinker.shared_pass_tokens: .*recurrent layers"):
        prepare(tmp_path, f"pretrain={tmp_path / 'model'}", "tinker.shared_pass_tokens=256")


def test_recurrent_layers_need_vllm_and_on_a_cpu_bfloat16(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "qwen3_5_text", linear_key_head_dim=64, linear_value_head_dim=64)
    with pytest.raises(MeshError, match=r"pretrain: .*layers of linear_attention.*take vllm \(tinker.engine\)"):
        prepare(tmp_path, f"pretrain={tmp_path / 'model'}")
    with pytest.raises(MeshError, match=r"actor_infer.model_args.dtype: .*in bfloat16 alone"):
        prepare(tmp_path, f"pretrain={tmp_path / 'model'}", "tinker.engine=vllm")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tinker.engine=vllm", "tinker.engine: the base model has 4 experts, whose adapters vLLM serves on GPUs"),
        (
            "tinker.shared_pass_tokens=64",
            "tinker.shared_pass_tokens: the base model has 4 experts, which mix tokens of",
        ),
    ],
)
def test_what_experts_do_not_allow_is_refused(tmp_path: Path, override: str, message: str) -> None:
    write_family(tmp_path / "model", "qwen2_moe")
    prepare(tmp_path, f"pretrain={tmp_path / 'model'}")
    with pytest.raises(MeshError, match=message):
        prepare(tmp_path, f"pretrain={tmp_path / 'model'}", override)


def test_the_engines_file_has_the_bases_buffers(tmp_path: Path) -> None:
    write_family(tmp_path, "glm4_moe")
    base = load_base(tmp_path, ModelArgs(), seed=1)
    former = tmp_path / WITHOUT_BUFFERS  # of an earlier build, which an engine must not read before the learner is up
    former.touch()
    path = weights_file(tmp_path, tmp_path, "hf_infer")
    export_base(base, tmp_path, path, tmp_path)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in load_file(path)
    assert not former.exists()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral", "qwen3"])
def test_hf_infer_reads_a_base_whose_file_has_other_names(tmp_path: Path, family: str) -> None:
    """Files of mixtures of experts have a tensor per expert, which transformers fuses as it reads them."""
    model, root = tmp_path / "model", tmp_path / "root"
    root.mkdir()
    write_family(model, family)
    base = load_base(model, ModelArgs(), seed=1)
    base.model.save_pretrained(model)
    path = weights_file(root, model, "hf_infer")
    for _ in range(2):  # the second time for a learner that starts again
        export_base(base, root, path, model)
    weights = PolicyModel(model, torch.float32).read(path).weights
    wanted = dict(named_weights(base.model))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert path.is_symlink() == (family == "qwen3")  # a file that fits is not copied
    assert weights_file(root, model, "vllm") == model / "model.safetensors"
