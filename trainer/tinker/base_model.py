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
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.tinker.folders import write_tensors

MARKER, EXPORTED = "base.json", "base.safetensors"


def claim_folder(root: Path, model: Path, args: ModelArgs, seed: int) -> None:
    """Bind the folder to a base model; raises MeshError if it belongs to another."""
    about = {"model": str(model.resolve()), "dtype": args.dtype, "seed": seed}
    marker = root / MARKER
    if not marker.exists():
        write_json(marker, about)
        sync_folder(root)
    elif (before := json.loads(marker.read_text())) != about:
        key = next(key for key in about if before.get(key) != about[key])
        raise MeshError(
            f"{root} holds adapters of a base model with {key} {before.get(key)!r}, not {about[key]!r}: "
            "set another output_dir"
        )


def load_base(model: Path, args: ModelArgs, seed: int) -> PackedPolicy:
    """Load the base model; without weights, initialize it from `seed`."""
    return load_policy(model, args.without_adapters, seed)


def weights_file(root: Path, model: Path) -> Path:
    own = model / WEIGHTS
    return own if own.is_file() else root / EXPORTED


def export_base(policy: PackedPolicy, root: Path, model: Path) -> None:
    """Write the engine's file unless the model's folder has one."""
    path = weights_file(root, model)
    if path.parent != root or path.exists():
        return
    # tied weights once, under the name that the engine knows
    write_tensors(path, {name: each.detach().cpu() for name, each in policy.model.named_parameters()})
