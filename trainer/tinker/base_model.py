"""Base model of a Tinker server.

Invariant: a server's folder belongs to one base model.
"""

import json
from pathlib import Path

from offbeat.services.durable_files import sync_folder, write_json
from offbeat.services.errors import MeshError
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
    """Load the base model; without weights, initialize it from `seed`."""
    return load_policy(model, args.without_adapters, seed)


def weights_file(root: Path, model: Path) -> Path:
    own = model / WEIGHTS
    return own if own.is_file() else root / EXPORTED


def export_base(policy: PackedPolicy, root: Path, model: Path) -> None:
    """Write the engine's file unless the model's folder has one."""
    (root / WITHOUT_BUFFERS).unlink(missing_ok=True)
    path = weights_file(root, model)
    if path.parent != root or path.exists():
        return
    # tied weights once, under the name that the engine knows
    write_tensors(path, {name: each.detach().cpu() for name, each in named_weights(policy.model)})
