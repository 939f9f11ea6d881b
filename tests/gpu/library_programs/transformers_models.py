"""Models of Hugging Face's Transformers."""

from __future__ import annotations

from typing import Any

import torch
from step_parts import Program

from library_programs.record import CALLS, on_gpu, program, state_of, tokens, training

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
