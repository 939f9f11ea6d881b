"""Models of torchvision, with its references' ways to train them."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
import torch.optim.lr_scheduler as rates
from step_parts import Program
from torch import nn

from library_programs.record import CALLS, images, on_gpu, program, state_of, training


def built(device: str, name: str, **options: Any) -> Any:
    """A model of torchvision with five classes, unless `options` say another number."""
    import torchvision

    return operator.attrgetter(name)(torchvision.models)(**{"weights": None, "num_classes": 5, **options}).to(device)


def cross_entropy(model: nn.Module, **options: Any) -> Any:
    return lambda image, target: F.cross_entropy(model(image), target, **options)


@program
def tv_resnet18_sgd_amp_scaler_cosine_epochs(device: str) -> Program:
    """torchvision's references/classification/train.py: GradScaler, clipping after unscale_."""
    model = built(device, "resnet18")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True, fused=True)
    return training(
        cross_entropy(model, label_smoothing=0.1),
        optimizer,
        images(device),
        model,
        scheduler=rates.CosineAnnealingLR(optimizer, T_max=4),
        every=4,
        clip=1.0,
        cast=torch.float16 if on_gpu(device) else None,  # slow on CPUs
        scaler=torch.amp.GradScaler(device, init_scale=1024.0),
    )


@program
def tv_mobilenet_v3_rmsprop_steplr_ema(device: str) -> Program:
    """The recipe of the references, with the ExponentialMovingAverage of utils.py."""
    model = built(device, "mobilenet_v3_small")
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5, eps=0.0316, alpha=0.9, capturable=on_gpu(device)
    )
    scheduler = rates.StepLR(optimizer, step_size=2, gamma=0.973)

    def average(mean, new, count):
        return 0.9 * mean + (1 - 0.9) * new

    ema = torch.optim.swa_utils.AveragedModel(model, torch.device(device), average, use_buffers=True)

    def between(index):
        ema.update_parameters(model)
        scheduler.step()

    return training(cross_entropy(model), optimizer, images(device), model, ema, between=between)


@program
def tv_efficientnet_adamw_top1_top5(device: str) -> Program:
    """Stochastic depth and dropout; accuracy as in utils.accuracy, which is not read."""
    model = built(device, "efficientnet_b0", num_classes=8, stochastic_depth_prob=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss_and_accuracy(image, target):
        output = model(image)
        with torch.inference_mode():
            _, pred = output.topk(5, 1, True, True)
            correct = pred.t().eq(target[None])
            best = [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in (1, 5)]
        return F.cross_entropy(output, target), best

    return training(loss_and_accuracy, optimizer, images(device, classes=8), model)


@program
def tv_vit_adamw_linear_warm_up_sequential(device: str) -> Program:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    import torchvision

    model = torchvision.models.VisionTransformer(**sizes, dropout=0.1, attention_dropout=0.1, num_classes=5).to(device)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is decays], "weight_decay": 0.3 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, fused=True)
    parts = [
        rates.LinearLR(optimizer, start_factor=0.033, total_iters=4),
        rates.CosineAnnealingLR(optimizer, T_max=10),
    ]
    scheduler = rates.SequentialLR(optimizer, schedulers=parts, milestones=[4])

    def step(image, target):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(image), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm

    return Program(step, images(device), lambda: state_of(model, optimizer), lambda index: scheduler.step())


@program
def tv_densenet_memory_efficient_nadam(device: str) -> Program:
    """Layers are checkpointed, without dropout."""
    import torchvision

    sizes = {"growth_rate": 8, "block_config": (2, 3), "num_init_features": 16, "num_classes": 5}
    model = torchvision.models.DenseNet(**sizes, memory_efficient=True).to(device)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, capturable=on_gpu(device))
    return training(cross_entropy(model), optimizer, images(device), model)


@program
def tv_deeplab_aux_polynomial_confusion(device: str) -> Program:
    """references/segmentation/train.py, with a confusion matrix by bincount kept on the GPU."""
    model = built(device, "segmentation.deeplabv3_mobilenet_v3_large", weights_backbone=None, aux_loss=True)
    groups = [
        {"params": [p for p in model.backbone.parameters() if p.requires_grad]},
        {"params": [p for p in model.classifier.parameters() if p.requires_grad]},
        {"params": list(model.aux_classifier.parameters()), "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    scheduler = rates.PolynomialLR(optimizer, total_iters=CALLS, power=0.9)
    matrix = torch.zeros(5, 5, dtype=torch.int64, device=device)

    def loss_of(image, target):
        output = model(image)
        losses = {name: F.cross_entropy(x, target, ignore_index=255) for name, x in output.items()}
        with torch.no_grad():
            guess = output["out"].argmax(1).flatten()
            valid = (target.flatten() < 5).to(torch.int64)
            index = 5 * target.flatten().clamp(max=4) + guess
            matrix.view(-1).scatter_add_(0, index, valid)
        return losses["out"] + 0.5 * losses["aux"]

    made = torch.Generator().manual_seed(5)
    batches = []
    for image, _ in images(device, rows=2):
        target = torch.randint(5, (2, 32, 32), generator=made)
        target[torch.rand(2, 32, 32, generator=made) < 0.1] = 255
        batches.append((image, target.to(device)))
    return training(loss_of, optimizer, batches, model, matrix, scheduler=scheduler, detached=True)


@program
def tv_swin_adamw_onecycle_without_momentum(device: str) -> Program:
    import torchvision

    sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    model = torchvision.models.SwinTransformer(**sizes, num_classes=5, stochastic_depth_prob=0.2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    scheduler = rates.OneCycleLR(optimizer, 5e-3, total_steps=CALLS + 1, cycle_momentum=False)
    return training(cross_entropy(model), optimizer, images(device), model, scheduler=scheduler, cast=torch.bfloat16)


@program
def tv_shufflenet_adadelta_accumulates_two(device: str) -> Program:
    model = built(device, "shufflenet_v2_x0_5")
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, capturable=on_gpu(device), foreach=True)

    def step(image, target, update: bool):
        loss = F.cross_entropy(model(image), target) / 2
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach() * 2

    batches = [(*batch, index % 2 == 1) for index, batch in enumerate(images(device))]
    return Program(step, batches, lambda: state_of(model, optimizer))


@program
def tv_squeezenet_asgd_focal_loss(device: str) -> Program:
    from torchvision.ops import sigmoid_focal_loss

    model = built(device, "squeezenet1_1")
    optimizer = torch.optim.ASGD(model.parameters(), lr=1e-2, capturable=on_gpu(device))

    def loss_and_hits(image, target):
        hot = F.one_hot(target, 5).float()
        return sigmoid_focal_loss(model(image), hot, reduction="mean"), (target == target.mode().values).sum()

    return training(loss_and_hits, optimizer, images(device), model)


@program
def tv_googlenet_aux_heads_multistep(device: str) -> Program:
    model = built(device, "googlenet", aux_logits=True, init_weights=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)

    def loss_of(image, target):
        out = model(image)
        first, second = (0.3 * F.cross_entropy(aux, target) for aux in (out.aux_logits1, out.aux_logits2))
        return F.cross_entropy(out.logits, target) + first + second

    scheduler = rates.MultiStepLR(optimizer, [5, 9], gamma=0.1)
    return training(loss_of, optimizer, images(device), model, scheduler=scheduler)


@program
def tv_frozen_backbone_batchnorm_eval_head_radam(device: str) -> Program:
    """Transfer learning: the backbone in eval mode, a new head."""
    model = built(device, "resnet18", num_classes=1000).requires_grad_(False).eval()
    model.fc = nn.Sequential(nn.Dropout(0.2), nn.Linear(512, 5)).to(device).train()
    optimizer = torch.optim.RAdam(model.fc.parameters(), lr=1e-3, capturable=on_gpu(device))

    def loss_and_hits(image, target):
        outputs = model(image)
        _, preds = torch.max(outputs, 1)
        return F.cross_entropy(outputs, target), {"corrects": torch.sum(preds == target.data)}

    return training(loss_and_hits, optimizer, images(device), model, detached=False)


@program
def tv_detection_head_iou_losses_two_optimizers(device: str) -> Program:
    """A one-box detector: roi_align, giou loss; backbone by SGD, head by Adamax."""
    from torchvision import ops

    body = nn.Sequential(
        ops.Conv2dNormActivation(3, 16, stride=2),
        ops.SqueezeExcitation(16, 4),
        ops.Conv2dNormActivation(16, 16, stride=2),
    ).to(device)
    head = ops.MLP(16 * 9, [32, 4 + 5], dropout=0.1).to(device)
    first = torch.optim.SGD(body.parameters(), lr=0.01, momentum=0.9)
    second = torch.optim.Adamax(head.parameters(), lr=1e-3, capturable=on_gpu(device))

    def step(image, boxes, target):
        first.zero_grad()
        second.zero_grad()
        rois = torch.cat([torch.arange(image.shape[0], device=image.device)[:, None].float(), boxes], 1)
        out = head(ops.roi_align(body(image), rois, output_size=3, spatial_scale=0.25).flatten(1))
        corner = boxes[:, :2] + out[:, :2].tanh()
        guess = torch.cat([corner, corner + out[:, 2:4].exp().clamp(max=30)], 1)
        box = ops.generalized_box_iou_loss(guess, boxes, reduction="mean")
        kind = F.cross_entropy(out[:, 4:], target)
        (box + kind).backward()
        first.step()
        second.step()
        return {"box": box.detach(), "class": kind.detach()}

    made = torch.Generator().manual_seed(5)
    batches = []
    for image, target in images(device):
        low = torch.rand(4, 2, generator=made) * 12
        batches.append((image, torch.cat([low, low + 4 + torch.rand(4, 2, generator=made) * 12], 1).to(device), target))
    return Program(step, batches, lambda: state_of(body, head, first, second))


@program
def tv_r2plus1d_video_rprop(device: str) -> Program:
    from torchvision.models.video import VideoResNet, resnet

    kinds = {"block": resnet.BasicBlock, "conv_makers": [resnet.Conv2Plus1D] * 4, "stem": resnet.R2Plus1dStem}
    model = VideoResNet(**kinds, layers=[1, 1, 1, 1], num_classes=5).to(device)
    head = [*model.layer4.parameters(), *model.fc.parameters()]
    optimizer = torch.optim.Rprop(head, lr=1e-4, capturable=on_gpu(device))

    def loss_of(image, target):
        return F.cross_entropy(model(image[:, :, None].expand(-1, -1, 4, -1, -1)), target)

    return training(loss_of, optimizer, images(device, rows=2, size=16), model, detached=True)
