"""A checkpoint as a model directory in hub layout, checked, with sample outputs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples.training.card import model_card
from examples.training.corpus import load_corpus
from examples.training.model import active_parameters, build_model
from examples.training.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS, tokenizer_config
from examples.training.train import Progress

STORY_PROMPTS = (
    "It is a truth universally acknowledged, that",
    "Elizabeth",
    "The morning was so fine, that",
    '"My dear Emma," said Mr. Knightley, "',
)
CHAT_PROMPTS = ("Tell me about Mr. Darcy.", "Write a short story about a ball at Netherfield.", "Hello!")


def generate(directory: Path, seed: int = 1) -> list[tuple[str, str, str]]:
    """Sample outputs of a saved model: (kind, prompt, text)."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    for kind, prompts in (("story", STORY_PROMPTS), ("chat", CHAT_PROMPTS)):
        for prompt in prompts:
            text = prompt
            if kind == "chat":
                message = [{"role": "user", "content": prompt}]
                text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            inputs = tokenizer(text, return_tensors="pt")
            torch.manual_seed(seed)
            with torch.no_grad():
                output = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=100 if kind == "story" else 200,
                    do_sample=True,
                    temperature=0.7,
                    top_p=0.9,
                )[0]
            new = tokenizer.decode(output[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            results.append((kind, prompt, new))
    return results


def stage_sample(directory: Path) -> None:
    for kind, prompt, text in generate(directory):
        print(f"--- {kind}: {prompt}\n{text}\n")


def stage_save(work: Path, out: Path, args: argparse.Namespace) -> None:
    """Write the checkpoint as a model directory, check it, and move it into place.

    The check is that it can be loaded again.
    """
    saved = torch.load(work / "checkpoint.pt", weights_only=True)
    progress = Progress(**saved["progress"])
    model = build_model(args.experts)
    model.load_state_dict(saved["model"])
    model.eval()
    # And not model.to(): that would round the positions' frequencies, too.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    new = out.parent / f".{out.name}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    model.generation_config = GenerationConfig(
        eos_token_id=[SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(IM_END)],
        pad_token_id=0,
        bos_token_id=None,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    model.config.dtype = torch.bfloat16
    model.save_pretrained(new)
    config = json.loads((new / "config.json").read_text("utf-8"))
    config["num_experts"] = config["num_local_experts"]  # the name most configurations on the hub use
    (new / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(work / "tokenizer.json", new / "tokenizer.json")
    (new / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(), indent=2) + "\n", encoding="utf-8"
    )

    tokenizer = AutoTokenizer.from_pretrained(new)
    text = load_corpus(work).validation[0][:1500]
    ids = Tokenizer.from_file(str(new / "tokenizer.json")).encode(text).ids
    if tokenizer(text)["input_ids"] != ids or tokenizer.decode(ids) != text:
        raise RuntimeError("the two ways to load the tokenizer do not agree")
    model = model.float()
    again = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).eval()
    batch = torch.tensor([ids])
    with torch.no_grad():
        difference = (model(input_ids=batch).logits - again(input_ids=batch).logits).abs().max().item()
    if difference > 1e-3:
        raise RuntimeError(f"the reloaded model's logits differ by {difference}")
    card = model_card(progress, args, active_parameters(model), generate(new))
    (new / "README.md").write_text(card, encoding="utf-8")

    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(new.iterdir()):
        path.chmod(0o644)
        os.replace(path, out / path.name)
    new.rmdir()
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / 1e6:.1f} MB, reloaded logits differ by at most {difference:.1e}", flush=True)
