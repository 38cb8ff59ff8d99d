"""Fine-tune a MoE model of transformers with LoRA on its experts, which run on pretuned.

    pip install . transformers peft    # in a clone; once 0.1.0 is released, pretuned in place of .
    python examples/finetune_lora.py --model Qwen/Qwen3-30B-A3B --text my.txt --out adapter
    python examples/finetune_lora.py --tiny --steps 20              # a small random model, on any machine

Experts of a quantised checkpoint (openai/gpt-oss-20b, Qwen/Qwen3-30B-A3B-FP8) stay quantised.
The text is cut into pieces of --length tokens; every step takes --batch of them. Only the adapters are trained; PEFT
saves them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from pretuned.integrations.transformers import keep_mxfp4, register


def tiny() -> Any:
    """A Qwen3-MoE of random weights."""
    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        intermediate_size=32,
    )
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="pretuned")


def main() -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a small random model, and bytes as tokens")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-4, help="the learning rate")
    args = parser.parse_args()
    if not (args.tiny or args.text):
        parser.error("--text names what to train on (or --tiny)")

    register()
    keep_mxfp4()  # of gpt-oss
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if args.tiny:
        model, ids = tiny(), torch.arange(64).repeat(64)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, experts_implementation="pretuned"
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    pieces = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    if not len(pieces):
        parser.error(f"the text has {len(ids)} tokens, wanted --length={args.length} at least")

    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = get_peft_model(model, lora).to(device)
    model.print_trainable_parameters()
    model.train()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=args.rate
    )
    losses = []
    for step in range(args.steps):
        batch = pieces[torch.randint(len(pieces), (args.batch,))].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        print(f"step {step:4}  loss {losses[-1]:.4f}", flush=True)
    if args.out:
        model.save_pretrained(args.out)
    return losses


if __name__ == "__main__":
    main()
