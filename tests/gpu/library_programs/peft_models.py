"""Adapters of PEFT."""

from __future__ import annotations

from typing import Any

import torch
from step_parts import Program

from library_programs.record import CALLS, on_gpu, program, state_of
from library_programs.transformers_models import adamw, causal, fine_tuning, gpt2, t5, t5_training, text_model


def with_masks(device: str) -> list[tuple[Any, ...]]:
    return [({**batch, "attention_mask": torch.ones_like(batch["input_ids"])},) for (batch,) in causal(device)]


@program
def peft_lora_dropout_bfloat16_cosine(device: str) -> Program:
    from peft import LoraConfig, get_peft_model
    from transformers import get_cosine_schedule_with_warmup

    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = get_peft_model(gpt2(device), config).to(device).train()
    optimizer = adamw(model, lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, CALLS)
    return fine_tuning(model, optimizer, with_masks(device), scheduler=scheduler, clip=1.0, cast=torch.bfloat16)


@program
def peft_dora_on_llama_two_adapters_switched(device: str) -> Program:
    """Weight-decomposed LoRA; another adapter is active from the eighth call on."""
    from peft import LoraConfig, get_peft_model

    base = text_model(device, "LlamaForCausalLM", num_key_value_heads=1)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], use_dora=True)
    model = get_peft_model(base, config)
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"]))
    model.to(device).train()
    for name, p in model.named_parameters():
        p.requires_grad = "lora_" in name
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "lora_" in n], lr=0.1, momentum=0.9)

    def between(index):
        if index == 6:
            model.set_adapter("other")

    return fine_tuning(model, optimizer, with_masks(device), between=between)


@program
def peft_prompt_tuning_linear(device: str) -> Program:
    from peft import PromptTuningConfig, get_peft_model
    from transformers import get_linear_schedule_with_warmup

    model = get_peft_model(gpt2(device), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    model.to(device).train()
    optimizer = adamw(model, lr=3e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, CALLS)
    return fine_tuning(model, optimizer, with_masks(device), scheduler=scheduler)


@program
def peft_adalora_allocates_behind_the_step(device: str) -> Program:
    from peft import AdaLoraConfig, get_peft_model

    ranks = {"init_r": 4, "target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 2, "total_step": CALLS}
    config = AdaLoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.05, **ranks
    )
    model = get_peft_model(gpt2(device), config).to(device).train()
    optimizer = adamw(model, lr=3e-3)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    def between(index):
        model.base_model.update_and_allocate(index)
        optimizer.zero_grad()

    return Program(step, with_masks(device), lambda: state_of(model, optimizer), between)


@program
def peft_ia3_on_t5_adamax(device: str) -> Program:
    from peft import IA3Config, get_peft_model

    config = IA3Config(task_type="SEQ_2_SEQ_LM", target_modules=["k", "v", "wo"], feedforward_modules=["wo"])
    model = get_peft_model(t5(device), config).to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adamax(trained, lr=3e-2, capturable=on_gpu(device))
    return t5_training(device, model, optimizer, 7)
