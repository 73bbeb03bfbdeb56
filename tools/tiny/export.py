"""Writes a checkpoint as a plain `LlamaForCausalLM` directory, which any loader reads, and checks it."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from model import MODELS, TinyConfig, TinyLlama, from_hf_state_dict, mixed_precision, to_hf_state_dict
from safetensors.torch import load_file, save_file
from tokenizer import SPECIAL_TOKENS
from tokenizers import Tokenizer
from tool_data import TEMPLATE

END_OF_TEXT, END_OF_TURN, PAD = "<|endoftext|>", "<|im_end|>", "<|pad|>"


def config_json(config: TinyConfig, ids: dict[str, int]) -> dict[str, object]:
    """`config.json` of a Llama with tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[END_OF_TURN],
        "pad_token_id": ids[PAD],
    }


def generation_config_json(ids: dict[str, int]) -> dict[str, object]:
    """Sampling defaults; a chat turn and a document both end the generation."""
    return {
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": [ids[END_OF_TURN], ids[END_OF_TEXT]],
        "pad_token_id": ids[PAD],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.15,
    }


def tokenizer_config_json(max_positions: int) -> dict[str, object]:
    """`tokenizer_config.json`; no token is added around a text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "added_tokens_decoder": {
            str(index): {
                "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        },
    }  # fmt: skip


def write_json(path: Path, value: dict[str, object]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def load_further(build: Path, first: Path, share: float) -> TinyLlama:
    """The model that was trained further: a weighted mean of its weights and those it began with, which forgets less
    (Wortsman et al., Robust fine-tuning of zero-shot models, 2021)."""
    model = TinyLlama(MODELS["main"])
    began = from_hf_state_dict(model.config, load_file(first / "model.safetensors"))
    ended = torch.load(build / "further.pt", weights_only=True)["model"]
    model.load_state_dict({name: torch.lerp(began[name], ended[name], share) for name in began})
    return model


def load(build: Path, name: str) -> TinyLlama:
    """A model that was trained from the start."""
    model = TinyLlama(MODELS[name])
    model.load_state_dict(torch.load(build / f"{name}.pt", weights_only=True)["model"])
    return model


def export(build: Path, model: TinyLlama, out: Path) -> None:
    """Write the directory of a model."""
    tokenizer = Tokenizer.from_file(str(build / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}

    out.mkdir(parents=True, exist_ok=True)
    partial = out / "model.safetensors.partial"
    save_file(to_hf_state_dict(model.config, model.state_dict()), partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", config_json(model.config, ids))
    write_json(out / "generation_config.json", generation_config_json(ids))
    write_json(out / "tokenizer_config.json", tokenizer_config_json(model.config.max_positions))
    if out.resolve() != TEMPLATE.parent:
        shutil.copy(TEMPLATE, out)


def check_against_transformers(model: TinyLlama, out: Path) -> float:
    """The largest difference of the logits between the exported directory and the network, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is quire?"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nWhat is quire?<|im_end|>\n<|im_start|>assistant\n", rendered
    ids = torch.tensor([tokenizer(rendered)["input_ids"]])
    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        theirs = reference(ids).logits
        with mixed_precision():
            ours = model.logits(model(ids)).float()
    return (theirs - ours).abs().max().item()


def main() -> None:
    """Export one model and print its size and the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="build directory")
    parser.add_argument("--model", choices=sorted(MODELS), default="main")
    parser.add_argument(
        "--further-from", type=Path, help="exported directory that --model main was trained further from"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the further training in the mean of the weights")
    parser.add_argument("--out", type=Path, default=Path("quire/tiny"))
    args = parser.parse_args()
    if args.further_from:
        model = load_further(args.build, args.further_from, args.share)
    else:
        model = load(args.build, args.model)
    export(args.build, model, args.out)
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{args.out}: {size:,} bytes, largest logit difference {check_against_transformers(model, args.out):.3f}")


if __name__ == "__main__":
    main()
