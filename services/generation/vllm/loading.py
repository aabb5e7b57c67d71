"""Weight loading into a model that vLLM reloads layer by layer, and its verification.

Invariant: on success every parameter was filled, and compared ones agree: exactly, or by a probe where the CPU packs
them.
"""

# pyright: basic
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from offbeat.services.generation.tensor_file import TensorFile

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative error of a packed matrix's probe, beyond rounding."""


class LoadError(Exception):
    """The model's parameters differ from the file."""


def finish_reload(model: Any, model_config: Any, expected: set[str], loaded: set[str]) -> None:
    """Finish the reload of layers.

    expected: the model's parameters before; loaded: those with new values.

    Raises:
        LoadError: a parameter got none.
    """
    finalize_layerwise_reload(model, model_config)
    tied = _repack_tied_head(model) if _is_tied(model_config) else set[str]()
    missing = expected - loaded - tied
    if missing:
        raise LoadError(f"{len(missing)} parameters are not in this version, {sorted(missing)[0]} for one")


def _is_tied(model_config: Any) -> bool:
    """Return whether the output layer has the embeddings' weights, by whichever of a multimodal model's settings says so."""
    configs = (model_config.hf_text_config, model_config.hf_config)
    return next((each.tie_word_embeddings for each in configs if hasattr(each, "tie_word_embeddings")), False)


def _repack_tied_head(model: Any) -> set[str]:
    """Repack a tied head, which the layerwise reload skips; return its names."""
    tables = {path: m for path, m in model.named_modules() if isinstance(m, VocabParallelEmbedding)}
    heads = {path: module for path, module in tables.items() if isinstance(module, ParallelLMHead)}
    if not heads:  # as in a pipeline's stages before the last, of which those in the middle have no embedding either
        return set()
    for head in heads.values():
        size = (head.org_vocab_size, head.embedding_dim)  # Gemma 4 has a table of its layers' inputs, too
        others = (table for path, table in tables.items() if path not in heads)
        head.weight = next(table.weight for table in others if (table.org_vocab_size, table.embedding_dim) == size)
        head.quant_method.process_weights_after_loading(head)
    return {f"{path}.weight" for path in heads}


def compare(model: Any, file: TensorFile) -> Iterator[None]:
    """Compare model and file, yielding after each parameter; those split over workers are skipped.

    Raises:
        LoadError: they differ.
    """
    names = _names_here(model, file)
    fused = fused_names(model)
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        prefix = f"{parent}." if parent else ""
        for kind, parameter in module.named_parameters(recurse=False):
            sources = [f"{prefix}{part}.{kind}" for part in fused.get(leaf, [leaf])]
            if leaf == "lm_head" and sources[0] not in names:
                sources = [f"{prefix}model.embed_tokens.weight"]
            absent = [name for name in sources if name not in names]
            if len(absent) == len(sources):
                continue  # goes by another name in the file; that it was loaded is checked
            if absent:
                raise LoadError(f"{absent[0]} is not in the file")
            if not _agrees(module, _unpacked(module, parameter), [file.get_tensor(names[name]) for name in sources]):
                raise LoadError(f"{path}.{kind} differs from the file after loading")
            yield


def _unpacked(module: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter as it was loaded: of a convolution that the CPU packs, vLLM keeps [channels, width]."""
    kept = getattr(module, "_cpu_unpacked_conv_weight", None)
    return parameter if kept is None else kept[:, None]


def _names_here(model: Any, file: TensorFile) -> dict[str, str]:
    """Return unfused names -> the file's."""
    rename = renamer(model)
    names = {rename(name): name for name in file.names()}
    return {here: name for here, name in names.items() if here is not None}


def renamer(model: Any) -> Callable[[str], str | None]:
    """Return the function from a checkpoint's name to the model's, unfused; None of what the model leaves out."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return str if mapper is None else replace(mapper, orig_to_new_stacked={}).map_name


def fused_names(model: Any) -> dict[str, list[str]]:
    """Return modules that fuse several tensors, by the last part of their names."""
    fused: dict[str, list[str]] = {}
    for module in model.modules():
        fused |= getattr(module, "packed_modules_mapping", {})
    return fused


def _agrees(module: Any, parameter: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Return whether a parameter has the rows of the file's tensors, one after the other."""
    if getattr(module, "tp_size", 1) > 1:
        return True  # one worker's part of it
    if parameter.numel() == 0:
        return _probe_agrees(module, [part.to(parameter.dtype) for part in parts])
    lengths = [len(part) for part in parts]
    if parameter.shape[1:] != parts[0].shape[1:] or parameter.shape[0] < sum(lengths):
        return True  # in another layout, as stacked experts are
    rows = parameter.data[: sum(lengths)].split(lengths)
    return all(torch.equal(mine, part.to(mine)) for mine, part in zip(rows, parts, strict=True))


def _probe_agrees(module: Any, parts: Sequence[torch.Tensor]) -> bool:
    dtype = parts[0].dtype
    probe = torch.randn(1, parts[0].shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    found = module.quant_method.apply(module, probe).float()
    # in the weights' dtype: a float32 copy of all of them takes longer than the comparison
    expected = torch.cat([torch.nn.functional.linear(probe, part) for part in parts], 1).float()
    if found.shape != expected.shape:
        return True
    return bool((found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max())
