"""Training programs on models of Transformers for images and speech."""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from step_parts import Program

from library_programs.record import CALLS, images, program, state_of, tokens, training
from library_programs.transformers_models import PAIRED, SMALL, adamw, fine_tuning, model_of


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
