"""Any local Hugging Face folder is trained like the built-in policy, and comes out as such a folder."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from offbeat.benchmarks.harness.pretrained import write_llama
from offbeat.services.chat.append_only import load_chat_format
from tests.integration.learner_run import a_run


def test_a_llama_with_a_bpe_tokenizer_is_trained_from_its_own_weights(redis_server: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "llama"
    folder.mkdir()
    write_llama(folder)
    settings = (f"pretrain={folder}", "warm_start=null", "max_steps=2", "sequence_length=1024", "save_steps=1")
    with a_run(redis_server, tmp_path, "llama-run", settings) as run:
        assert run.start().wait(timeout=240) == 0, run.complaint()
        assert run.counters().trained == 4
        newest = run.config.output_dir / "checkpoints" / "step-000002"
        start, trained = load_file(folder / "model.safetensors"), run.weights(2)
        assert start.keys() == trained.keys()
        moved = {name: float((trained[name] - tensor).abs().max()) for name, tensor in start.items()}
        assert 0 < max(moved.values()) < 0.1
        model = AutoModelForCausalLM.from_pretrained(newest)
        assert torch.equal(model.lm_head.weight, trained["model.embed_tokens.weight"])
        prompt = ("Walk P to G .", "P _")
        assert load_chat_format(newest).first_prompt(*prompt) == load_chat_format(folder).first_prompt(*prompt)
        assert (
            AutoTokenizer.from_pretrained(newest)("Down").input_ids
            == AutoTokenizer.from_pretrained(folder)("Down").input_ids
        )
