# pyright: basic
"""Export of a checkpoint for serving: merged weights, or the adapter alone, with tokenizer and chat template.

Invariant: a folder gets its name once transformers has loaded it and its logits equal the checkpoint's.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
)
from transformers.utils.logging import disable_progress_bar

from offbeat.deploy.config.checks.weight_files import weight_shapes
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.play.policy import policy_folder
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.generation.adapter_settings import ADAPTER_CONFIG, QUANTIZATION_CONFIG
from offbeat.services.generation.checkpoint_names import checkpoint_tensors
from offbeat.trainer.models.export import copy_model_files, export_weights
from offbeat.trainer.models.loading import policy_loader
from offbeat.trainer.models.lora import base_paths
from offbeat.trainer.models.quantization import quantize, read_quantization, silence_bitsandbytes

ADAPTER = "adapter"
"""Folder of a checkpoint."""
OURS = ("learner.json", "manifest.json")
"""For no other program."""
MIN_VLLM_RANK = 8
NUM_TOKENS = 16
MAX_DIFFERENCE = 1e-4
"""Between logits of the same weights and type."""
MAX_MERGED_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Between the base with its adapter and merged weights of this type."""

Dtype = Literal["float32", "bfloat16", "float16"]
Echo = Callable[[str], None]


class ExportError(ValueError):
    """Checkpoint that can't be exported."""


def export_merged(source: Path, out: Path, dtype: Dtype | None, echo: Echo) -> None:
    """Write a checkpoint's weights, with adapters merged. dtype: None keeps the checkpoint's.

    Raises:
        ExportError: no checkpoint, `out` is taken, or the copy computes something else.
    """
    checkpoint = _checkpoint(source)
    with _Aside(out) as aside:
        _copy_files(checkpoint, aside)
        kept = _write_weights(checkpoint, aside, dtype)
        difference = _compare(_load(checkpoint, kept), _load(aside, kept), aside)
        if not difference <= MAX_DIFFERENCE:
            raise ExportError(
                f"the copy's logits differ from those of {checkpoint} by {difference:.3g}: nothing was written"
            )
    echo(
        f"{out} holds the weights of {checkpoint} in {kept}; its logits differ by {difference:.2g} on {NUM_TOKENS} tokens."
    )
    echo(f"vllm serve {out}" + (" --runner pooling" if _is_classifier(checkpoint) else ""))


def export_adapter(source: Path, out: Path, echo: Echo) -> None:
    """Write a checkpoint's LoRA adapter in PEFT's form.

    Raises:
        ExportError: no checkpoint, adapter or base, `out` is taken, or base and adapter compute something else.
    """
    checkpoint = _checkpoint(source)
    if not (checkpoint / ADAPTER / ADAPTER_CONFIG).is_file():
        raise ExportError(
            f"{checkpoint} holds no adapter: its run had no actor_train.model_args.lora_target, or was trained by a build "
            "before 0.2; export the merged weights (--merge)"
        )
    settings = json.loads((checkpoint / ADAPTER / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = Path(settings["base_model_name_or_path"])
    if not any(base.glob("*.safetensors")) and not any(base.glob("pytorch_model*.bin")):
        raise ExportError(
            f"the adapter's base, {base}, holds no weights (random ones, from which a tiny policy starts, are not kept): "
            "export the merged ones (--merge)"
        )
    if (checkpoint / ADAPTER / QUANTIZATION_CONFIG).is_file():
        if find_spec("bitsandbytes") is None:
            raise ExportError(
                f"the adapter's base, {base}, is quantized, and to compare its logits needs bitsandbytes: pip install "
                "'offbeat[quantization]', or export the merged weights (--merge)"
            )
        echo(f"Quantizing {base} on the CPU to compare logits, about 35 s of CPU time per billion weights")
    with _Aside(out) as aside:
        for path in (checkpoint / ADAPTER).iterdir():
            shutil.copyfile(path, aside / path.name)
        _copy_files(checkpoint, aside, without=("config.json", "generation_config.json"))
        dtype = _dtype_of(checkpoint)
        difference = _compare(_load(checkpoint, dtype), _load_adapted(base, aside, dtype), aside)
        if not difference <= MAX_MERGED_DIFFERENCE.get(dtype, MAX_MERGED_DIFFERENCE["bfloat16"]):
            reason = f"{base} with the adapter differs from {checkpoint} by {difference:.3g} in its logits"
            if _has_experts(checkpoint):
                reason += (
                    ", as PEFT takes dense layers' names for those of experts: export the merged weights (--merge)"
                )
            raise ExportError(f"{reason}: nothing was written")
    echo(
        f"{out} holds the adapter of {checkpoint}; on {base} its logits differ from the merged weights' by {difference:.2g}."
    )
    if (out / QUANTIZATION_CONFIG).is_file():
        echo(
            f"Its base is quantized: AutoModelForCausalLM.from_pretrained({str(base)!r}, quantization_config="
            f"BitsAndBytesConfig(...)) with the keys of {out / QUANTIZATION_CONFIG}"
        )
        return
    rank = max(MIN_VLLM_RANK, 1 << (int(settings["r"]) - 1).bit_length())
    echo(f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules policy={out}")


def _checkpoint(source: Path) -> Path:
    try:
        return policy_folder(source)
    except ConfigError as error:
        raise ExportError(str(error.issues[0])) from error


class _Aside:
    """Folder beside `out`, renamed on success."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._aside = out.with_name(f".{out.name}.writing")

    def __enter__(self) -> Path:
        if self._out.exists() and (not self._out.is_dir() or any(self._out.iterdir())):
            raise ExportError(f"{self._out} is there already: name a new folder, or remove it")
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        return self._aside

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
            return
        if self._out.exists():
            self._out.rmdir()
        self._aside.rename(self._out)


def _copy_files(checkpoint: Path, folder: Path, without: tuple[str, ...] = ()) -> None:
    copy_model_files(checkpoint, folder)
    for name in (*OURS, *without):
        (folder / name).unlink(missing_ok=True)


def _write_weights(checkpoint: Path, folder: Path, dtype: Dtype | None) -> str:
    kept = dtype or _dtype_of(checkpoint)
    target = getattr(torch, kept)
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    tensors = checkpoint_tensors(config, _tensors(checkpoint))
    export_weights(
        folder,
        ((name, tensor.to(target) if dtype and tensor.is_floating_point() else tensor) for name, tensor in tensors),
    )
    path = folder / "config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree.pop("torch_dtype", None)
    tree["dtype"] = kept
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return kept


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                yield name, file.get_tensor(name)


def _dtype_of(checkpoint: Path) -> str:
    return next(
        str(tensor.dtype).removeprefix("torch.") for _, tensor in _tensors(checkpoint) if tensor.is_floating_point()
    )


def _load(folder: Path, dtype: str) -> Any:
    disable_progress_bar()
    auto = AutoModelForSequenceClassification if _is_classifier(folder) else policy_loader(folder)
    model, info = auto.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        dtype=getattr(torch, dtype),
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise ExportError(f"{folder} lacks {missing[0]} ({len(missing)} in all), without which it is another model")
    return model.eval()


def _is_classifier(folder: Path) -> bool:
    """Return whether a folder is a reward model's."""
    architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def _has_experts(folder: Path) -> bool:
    return any(".experts." in name for name, _ in weight_shapes(folder))


def _load_adapted(base: Path, adapter: Path, dtype: str) -> Any:
    silence_bitsandbytes()
    from peft import PeftModel  # slow to import  # noqa: PLC0415

    model = PeftModel.from_pretrained(_load(base, dtype), str(adapter)).eval()
    if (quantization := read_quantization(adapter)) is not None:
        policy = model.get_base_model()
        quantize(policy, base_paths(policy), quantization, torch.device("cpu"))
    return model


def _compare(one: Any, two: Any, folder: Path) -> float:
    """Return the greatest difference of logits over the vocabulary; load the tokenizer."""
    load_chat_format(folder)
    size = one.config.get_text_config().vocab_size
    tokens = torch.linspace(0, size - 1, NUM_TOKENS).long()[None]
    with torch.inference_mode():
        logits = [model(tokens).logits.float() for model in (one, two)]
    return float((logits[0] - logits[1]).abs().max())
