"""Base model of a Tinker server.

Invariant: a server's folder belongs to one base model.
"""

import json
from pathlib import Path

from torch import nn

from offbeat.services.durable_files import sync_folder, write_json
from offbeat.services.errors import MeshError
from offbeat.services.generation.tensor_file import TensorFile
from offbeat.services.tinker.config import TinkerEngine
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.export import WEIGHTS
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.lora import named_weights
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.tinker.folders import write_tensors

MARKER, EXPORTED = "base.json", "base_model.safetensors"
WITHOUT_BUFFERS = "base.safetensors"
"""What earlier builds have exported."""


def claim_folder(root: Path, model: Path, args: ModelArgs, seed: int, digest: str) -> None:
    """Bind the folder to a base model; raises MeshError if it belongs to another. digest: of its files."""
    about = {"model": str(model.resolve()), "dtype": args.dtype, "seed": seed, "digest": digest}
    marker = root / MARKER
    before = json.loads(marker.read_text()) if marker.exists() else {}
    others = [key for key in about if before.get(key, about[key]) != about[key]]  # earlier builds wrote no digest
    if others == ["digest"]:
        raise MeshError(
            f"{root} holds adapters of a base model with other weights, sizes or words than {model} has now: set "
            "another output_dir"
        )
    if others:
        raise MeshError(
            f"{root} holds adapters of a base model with {others[0]} {before[others[0]]!r}, not {about[others[0]]!r}: "
            "set another output_dir"
        )
    if before != about:
        written = marker.with_name(f".{MARKER}")
        write_json(written, about)
        written.replace(marker)
        sync_folder(root)


def load_base(model: Path, args: ModelArgs, seed: int) -> PackedPolicy:
    """Load the base model; without weights, initialize it from `seed`. Activations are kept, as adapters of a shared pass
    are gone when they would be recomputed.
    """
    return load_policy(model, args.without_adapters.model_copy(update={"disable_gradient_checkpointing": True}), seed)


def weights_file(root: Path, model: Path, engine: TinkerEngine) -> Path:
    """Return the engine's file; vLLM reads the checkpoint's names and shapes, `hf_infer` those of the learner's model."""
    own = model / WEIGHTS
    return own if engine == "vllm" and own.is_file() else root / EXPORTED


def export_base(policy: PackedPolicy, root: Path, path: Path, model: Path) -> None:
    """Provide the engine's file, as a link where the model's own fits. path: of `weights_file`."""
    (root / WITHOUT_BUFFERS).unlink(missing_ok=True)
    if path.exists():
        return
    own = model / WEIGHTS
    if own.is_file() and _fits(policy.model, own):
        _link(path, own)
    else:  # tied weights once, under the name that the engine knows
        write_tensors(path, {name: each.detach().cpu() for name, each in named_weights(policy.model)})


def _fits(model: nn.Module, path: Path) -> bool:
    """Return whether a file has a model's names and shapes; mixtures of experts in memory differ from their files."""
    wanted = {name: each.shape for name, each in named_weights(model)}
    with TensorFile(path) as file:
        names = set(file.names()) - (model.state_dict().keys() - wanted.keys())  # tied ones may be there twice
        return names == wanted.keys() and all(file.get_tensor(name).shape == wanted[name] for name in names)


def _link(path: Path, target: Path) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.resolve())
    temporary.replace(path)
    sync_folder(path.parent)
