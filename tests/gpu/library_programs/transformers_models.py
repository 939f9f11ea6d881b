"""Models of Hugging Face's Transformers for text, images and speech, and adapters of PEFT."""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from step_parts import Program

from library_programs.record import CALLS, images, on_gpu, program, state_of, tokens, training

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PAIRED = {
    "vocab_size": 64,
    "d_model": 32,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
"""Sizes of models with an encoder and a decoder."""


def model_of(device: str, kind: str, **sizes: Any) -> Any:
    """Return a model of Transformers of this class, with a configuration of these sizes, in training."""
    import transformers

    made = getattr(transformers, kind)
    return made(made.config_class(**sizes)).to(device).train()


def text_model(device: str, kind: str, **sizes: Any) -> Any:
    return model_of(device, kind, vocab_size=64, max_position_embeddings=32, **SMALL, **sizes)


def gpt2(device: str, layers: int = 2) -> Any:
    return model_of(device, "GPT2LMHeadModel", vocab_size=64, n_positions=32, n_embd=32, n_layer=layers, n_head=2)


def t5(device: str, layers: int = 1) -> Any:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
    return model_of(device, "T5ForConditionalGeneration", **sizes, num_layers=layers, decoder_start_token_id=0)


def adamw(model, **options: Any) -> torch.optim.AdamW:
    """Return the optimizer of most programs, for what is trained of the model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 1e-3, "fused": True, **options})


def causal(device: str, **options: Any) -> list[tuple[Any, ...]]:
    return [({"input_ids": ids, "labels": ids.clone()},) for ids in tokens(device, **options)]


def without_padding(labels: torch.Tensor, pad: int = 0) -> torch.Tensor:
    """Labels of which those of padding are left out of the loss, as programs assign them."""
    labels = labels.clone()
    labels[labels == pad] = -100
    return labels


def fine_tuning(model, optimizer, batches, **options) -> Program:
    """Train as Hugging Face's examples do: the batch is a dict, the model makes the loss."""
    loss_of = lambda batch: model(**batch).loss  # noqa: E731
    return training(loss_of, optimizer, batches, model, zeroed="last", detached=True, **options)


@program
def hf_gpt2_adamw_cosine_warm_up(device: str) -> Program:
    from transformers import get_cosine_schedule_with_warmup

    model = gpt2(device)
    optimizer = adamw(model)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4, CALLS)
    return fine_tuning(model, optimizer, causal(device), scheduler=scheduler, clip=1.0, cast=torch.bfloat16)


@program
def hf_llama_pad_labels_assigned_linear_schedule(device: str) -> Program:
    from transformers import get_linear_schedule_with_warmup

    model = text_model(device, "LlamaForCausalLM", num_key_value_heads=1, pad_token_id=0)
    optimizer = adamw(model, weight_decay=0.1, fused=False, foreach=True, capturable=on_gpu(device))
    scheduler = get_linear_schedule_with_warmup(optimizer, 3, CALLS)

    def step(input_ids):
        optimizer.zero_grad()
        labels = without_padding(input_ids)
        out = model(input_ids=input_ids, attention_mask=(input_ids != 0).long(), labels=labels, use_cache=False)
        out.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": out.loss.detach(), "grad_norm": norm}

    batches = [(ids,) for ids in tokens(device, pad=0)]
    return Program(step, batches, lambda: state_of(model, optimizer), lambda index: scheduler.step())


@program
def hf_mistral_sliding_window_checkpointed(device: str) -> Program:
    model = text_model(device, "MistralForCausalLM", num_key_value_heads=1, sliding_window=4)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    return fine_tuning(model, optimizer, causal(device), clip=1.0)


@program
def hf_bert_mlm_masks_of_the_collator_on_the_gpu(device: str) -> Program:
    """`torch_mask_tokens` as it stands in the collator; its last line reads by a mask."""
    model = text_model(device, "BertForMaskedLM")
    optimizer = adamw(model)

    def mask_tokens(inputs):
        labels = inputs.clone()
        probability = torch.full(labels.shape, 0.15, device=inputs.device)
        probability.masked_fill_(inputs < 6, value=0.0)
        masked = torch.bernoulli(probability).bool()
        labels[~masked] = -100
        replaced = torch.bernoulli(torch.full(labels.shape, 0.8, device=inputs.device)).bool() & masked
        inputs[replaced] = 3
        random = torch.bernoulli(torch.full(labels.shape, 0.5, device=inputs.device)).bool() & masked & ~replaced
        words = torch.randint(64, labels.shape, dtype=torch.long, device=inputs.device)
        inputs[random] = words[random]
        return inputs, labels

    def loss_of(ids):
        ids, labels = mask_tokens(ids.clone())
        return model(input_ids=ids, labels=labels).loss

    return training(loss_of, optimizer, [(ids,) for ids in tokens(device, rows=8)], model)


@program
def hf_bert_mlm_masks_by_where_amp_scaler(device: str) -> Program:
    from transformers import get_constant_schedule_with_warmup

    model = text_model(device, "BertForMaskedLM")
    optimizer = adamw(model)
    scheduler = get_constant_schedule_with_warmup(optimizer, 5)
    scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=4)

    def step(ids):
        labels = ids.clone()
        masked = torch.rand(ids.shape, device=ids.device) < 0.15
        labels[~masked] = -100
        inputs = ids.clone()
        kind = torch.rand(ids.shape, device=ids.device)
        inputs[masked & (kind < 0.8)] = 3
        inputs = torch.where(masked & (kind > 0.9), torch.randint_like(ids, 64), inputs)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(input_ids=inputs, labels=labels)
        scaler.scale(out.loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        hit = (out.logits.argmax(-1) == labels) & masked
        return {"loss": out.loss.detach(), "accuracy": hit.sum() / masked.sum().clamp(min=1)}

    batches = [(ids,) for ids in tokens(device, rows=8)]
    return Program(step, batches, lambda: state_of(model, optimizer), lambda index: scheduler.step())


@program
def hf_roberta_classification_adafactor_fixed_lr(device: str) -> Program:
    from transformers.optimization import Adafactor

    model = text_model(device, "RobertaForSequenceClassification", num_labels=3, pad_token_id=1)
    optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False, warmup_init=False)
    batches = [
        ({"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": ids[:, 1] % 3},)
        for ids in tokens(device, pad=1)
    ]
    return fine_tuning(model, optimizer, batches)


@program
def hf_t5_adafactor_relative_step(device: str) -> Program:
    """Adafactor finds its own learning rate by counting steps in Python."""
    from transformers.optimization import Adafactor

    model = t5(device, layers=2)
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    return t5_training(device, model, optimizer, 8)


def t5_training(device: str, model, optimizer, length: int) -> Program:
    """Training whose targets are the rows in another order, so long."""

    def loss_of(ids, target):
        return model(input_ids=ids, attention_mask=ids.ne(0), labels=without_padding(target)).loss

    batches = [(x, x.flip(0)[:, :length]) for x in tokens(device, pad=0)]
    return training(loss_of, optimizer, batches, model)


@program
def hf_t5_torch_adafactor_inverse_sqrt(device: str) -> Program:
    """PyTorch's own Adafactor."""
    from transformers import get_inverse_sqrt_schedule

    model = t5(device)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    scheduler = get_inverse_sqrt_schedule(optimizer, num_warmup_steps=3)
    batches = [({"input_ids": x, "labels": x.flip(0)[:, :6].contiguous()},) for x in tokens(device)]
    return fine_tuning(model, optimizer, batches, scheduler=scheduler, clip=1.0)


@program
def hf_bart_draws_for_layerdrop(device: str) -> Program:
    """The encoder draws on the host for each layer: refused without host_draws."""
    model = model_of(device, "BartForConditionalGeneration", **PAIRED, encoder_layers=2, max_position_embeddings=32)
    batches = [
        ({"input_ids": x, "attention_mask": (x != 1).long(), "labels": x[:, :7].masked_fill(x[:, :7] == 1, -100)},)
        for x in tokens(device, pad=1)
    ]
    return fine_tuning(model, adamw(model), batches, clip=0.1)


@program
def hf_deberta_v2_token_classification(device: str) -> Program:
    attention = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    attention |= {"norm_rel_ebd": "layer_norm", "share_att_key": True}
    model = text_model(device, "DebertaV2ForTokenClassification", num_labels=4, **attention)
    optimizer = adamw(model)

    def loss_and_predictions(batch):
        labels = batch["labels"].clone()
        labels[batch["attention_mask"] == 0] = -100
        out = model(**{**batch, "labels": labels})
        return out.loss, {"predictions": out.logits.argmax(dim=-1)}

    batches = [({"input_ids": x, "attention_mask": (x != 0).long(), "labels": x % 4},) for x in tokens(device, pad=0)]
    return training(loss_and_predictions, optimizer, batches, model, zeroed="last")


@program
def hf_mamba_in_plain_torch(device: str) -> Program:
    sizes = {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    model = model_of(device, "MambaForCausalLM", **sizes, use_cache=False)
    optimizer = adamw(model, fused=None, capturable=on_gpu(device))
    return fine_tuning(model, optimizer, causal(device, length=8), clip=1.0)


@program
def hf_albert_question_answering_swa_two_groups(device: str) -> Program:
    model = text_model(device, "AlbertForQuestionAnswering", embedding_size=16)
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if n.endswith(("bias", "LayerNorm.weight")) is plain],
            "weight_decay": 0.0 if plain else 0.01,
        }
        for plain in (False, True)
    ]
    optimizer = torch.optim.NAdam(groups, lr=1e-3, capturable=on_gpu(device))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-4, anneal_epochs=6)

    def loss_and_hits(ids, start, end):
        out = model(input_ids=ids, start_positions=start, end_positions=end)
        return out.loss, (out.start_logits.argmax(1) == start).sum()

    def between(index):
        if index > 8:
            averaged.update_parameters(model)
        scheduler.step()

    batches = [(x, x[:, 0] % 12, x[:, 1] % 12) for x in tokens(device)]
    return training(loss_and_hits, optimizer, batches, model, averaged, between=between)


@program
def hf_gpt2_micro_batches_label_smoother(device: str) -> Program:
    """Two micro-batches in a step, the loss by the Trainer's LabelSmoother."""
    from transformers.trainer_pt_utils import LabelSmoother

    model = gpt2(device, layers=1)
    optimizer = adamw(model)
    smoother = LabelSmoother(epsilon=0.1)

    def step(batch):
        optimizer.zero_grad()
        total = torch.zeros((), device=batch.device)
        for ids in batch.chunk(2):
            out = model(input_ids=ids, attention_mask=(ids != 0).long())
            loss = smoother(out, without_padding(ids), shift_labels=True) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Program(step, [(ids,) for ids in tokens(device, rows=4, pad=0)], lambda: state_of(model, optimizer))


@program
def hf_whisper_features_label_smoothing(device: str) -> Program:
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    sizes = {"num_mel_bins": 8, "encoder_layers": 1, "max_source_positions": 16, "max_target_positions": 16}
    model = model_of(device, "WhisperForConditionalGeneration", **PAIRED, **sizes, **marks)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 6))

    def step(features, labels):
        optimizer.zero_grad(set_to_none=False)
        logits = model(input_features=features, labels=labels).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, ignore_index=-100)
        loss.backward()
        optimizer.step()
        return loss.detach()

    made = torch.Generator().manual_seed(3)
    batches = [(torch.randn(2, 8, 32, generator=made).to(device), x) for x in tokens(device, rows=2, length=8)]
    return Program(step, batches, lambda: state_of(model, optimizer), lambda index: scheduler.step())


@program
def hf_vit_classification_loss_kept_by_trainer_class(device: str) -> Program:
    model = model_of(device, "ViTForImageClassification", image_size=32, patch_size=8, num_labels=5, **SMALL)

    class Trainer:
        def __init__(self):
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            self.tr_loss = torch.tensor(0.0, device=device)

        def training_step(self, inputs):
            loss = model(**inputs).loss
            loss.backward()
            self.optimizer.step()
            model.zero_grad()
            self.tr_loss = self.tr_loss + loss.detach()
            return loss.detach()

    trainer = Trainer()
    batches = [({"pixel_values": x, "labels": y},) for x, y in images(device)]
    return Program(trainer.training_step, batches, lambda: state_of(model, trainer.optimizer, trainer.tr_loss))


@program
def hf_vit_mae_noise_drawn_on_the_gpu(device: str) -> Program:
    from transformers import get_cosine_with_hard_restarts_schedule_with_warmup

    decoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    decoder = {f"decoder_{name}": size for name, size in decoder.items()}
    sizes = {"image_size": 32, "patch_size": 8, **decoder, **SMALL}
    model = model_of(device, "ViTMAEForPreTraining", norm_pix_loss=True, **sizes)
    optimizer = adamw(model, betas=(0.9, 0.95), weight_decay=0.05)
    scheduler = get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 2, CALLS, num_cycles=2)
    batches = [({"pixel_values": x},) for x, _ in images(device)]
    return fine_tuning(model, optimizer, batches, scheduler=scheduler, cast=torch.bfloat16)


@program
def hf_clip_contrastive_logit_scale_clamped(device: str) -> Program:
    model = model_of(
        device,
        "CLIPModel",
        text_config=dict(vocab_size=64, max_position_embeddings=16, eos_token_id=2, bos_token_id=1, **SMALL),
        vision_config=dict(image_size=32, patch_size=8, **SMALL),
        projection_dim=16,
    )
    optimizer = adamw(model, betas=(0.9, 0.98), eps=1e-6)

    def loss_and_hits(ids, pixels):
        out = model(input_ids=ids, pixel_values=pixels, return_loss=True)
        hit = (out.logits_per_image.argmax(1) == torch.arange(len(ids), device=ids.device)).float().mean()
        return out.loss, {"hit": hit}

    ids = [torch.cat([x, torch.full_like(x[:, :1], 2)], 1) for x in tokens(device, rows=4, length=10)]
    batches = [(x, pixels) for x, (pixels, _) in zip(ids, images(device), strict=True)]
    return training(loss_and_hits, optimizer, batches, model, last=lambda: model.logit_scale.clamp_(0, math.log(100)))


def wav2vec2(device: str, kind: str, **options: Any):
    layers = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    layers |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
    model = model_of(device, kind, vocab_size=16, num_labels=4, **layers, **SMALL, **options)
    model.freeze_feature_encoder()
    return model


def audio(device: str, rows: int = 2, length: int = 800) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(8)
    return [torch.randn(rows, length, generator=made).to(device) for _ in range(CALLS)]


@program
def hf_wav2vec2_classification_frozen_encoder(device: str) -> Program:
    model = wav2vec2(device, "Wav2Vec2ForSequenceClassification", apply_spec_augment=False, layerdrop=0.0)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    batches = [
        ({"input_values": x, "labels": torch.tensor([i % 4, (i * i) % 4], device=device)},)
        for i, x in enumerate(audio(device))
    ]
    return fine_tuning(model, optimizer, batches)


@program
def hf_wav2vec2_ctc_spec_augment_of_numpy(device: str) -> Program:
    """CTC, masks drawn by NumPy and LayerDrop: a refusal is expected."""
    model = wav2vec2(device, "Wav2Vec2ForCTC", mask_time_prob=0.2, mask_time_length=2, ctc_zero_infinity=True)
    numpy.random.seed(9)
    batches = [
        ({"input_values": x, "labels": ids % 12 + 2},)
        for x, ids in zip(audio(device), tokens(device, rows=2, length=5), strict=True)
    ]
    return fine_tuning(model, adamw(model), batches)


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
