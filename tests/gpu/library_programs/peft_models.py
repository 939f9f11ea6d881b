"""Adapters of PEFT."""

from __future__ import annotations

from typing import Any

import torch
from step_parts import Program
from torch import nn

from library_programs.record import CALLS, descend, on_gpu, program, state_of, tokens
from library_programs.transformers_models import SMALL, hf_step


def gpt2(device: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)).to(device)


def causal(device: str) -> list[tuple[Any, ...]]:
    return [
        ({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()},) for ids in tokens(device)
    ]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@program
def peft_lora_dropout_bfloat16_cosine(device: str) -> Program:
    from peft import LoraConfig, get_peft_model
    from transformers import get_cosine_schedule_with_warmup

    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = get_peft_model(gpt2(device), config).to(device).train()
    optimizer = torch.optim.AdamW(trained(model), lr=3e-3, fused=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, CALLS)
    step = hf_step(model, optimizer, 1.0, torch.bfloat16)
    return Program(step, causal(device), lambda: state_of(model, optimizer), lambda index: scheduler.step())


@program
def peft_dora_on_llama_two_adapters_switched(device: str) -> Program:
    """Weight-decomposed LoRA; another adapter is active from the eighth call on."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=32, **SMALL))
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], use_dora=True)
    model = get_peft_model(base.to(device), config)
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"]))
    model.to(device).train()
    for name, p in model.named_parameters():
        p.requires_grad = "lora_" in name
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "lora_" in n], lr=0.1, momentum=0.9)

    def between(index):
        if index == 6:
            model.set_adapter("other")

    return Program(hf_step(model, optimizer), causal(device), lambda: state_of(model, optimizer), between)


@program
def peft_prompt_tuning_linear(device: str) -> Program:
    from peft import PromptTuningConfig, get_peft_model
    from transformers import get_linear_schedule_with_warmup

    model = get_peft_model(gpt2(device), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    model.to(device).train()
    optimizer = torch.optim.AdamW(trained(model), lr=3e-2, fused=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, CALLS)
    step = hf_step(model, optimizer)
    return Program(step, causal(device), lambda: state_of(model, optimizer), lambda index: scheduler.step())


@program
def peft_adalora_allocates_behind_the_step(device: str) -> Program:
    from peft import AdaLoraConfig, get_peft_model

    config = AdaLoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        init_r=4,
        target_r=2,
        tinit=2,
        tfinal=3,
        deltaT=2,
        total_step=CALLS,
        lora_dropout=0.05,
    )
    model = get_peft_model(gpt2(device), config).to(device).train()
    optimizer = torch.optim.AdamW(trained(model), lr=3e-3, fused=True)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    def between(index):
        model.base_model.update_and_allocate(index)
        optimizer.zero_grad()

    return Program(step, causal(device), lambda: state_of(model, optimizer), between)


@program
def peft_ia3_on_t5_adamax(device: str) -> Program:
    from peft import IA3Config, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration

    base = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    config = IA3Config(task_type="SEQ_2_SEQ_LM", target_modules=["k", "v", "wo"], feedforward_modules=["wo"])
    model = get_peft_model(base.to(device), config).to(device).train()
    optimizer = torch.optim.Adamax(trained(model), lr=3e-2, capturable=on_gpu(device))

    def step(ids, target):
        labels = target.clone()
        labels[labels == 0] = -100
        return descend(model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss, optimizer).detach()

    batches = [(x, x.flip(0)[:, :7]) for x in tokens(device, pad=0)]
    return Program(step, batches, lambda: state_of(model, optimizer))
