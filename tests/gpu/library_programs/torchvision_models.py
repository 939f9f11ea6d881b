"""Models of torchvision, with its references' ways to train them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from step_parts import Program
from torch import nn

from library_programs.record import CALLS, descend, images, on_gpu, program, state_of, training


@program
def tv_resnet18_sgd_amp_scaler_cosine_epochs(device: str) -> Program:
    """torchvision's references/classification/train.py: GradScaler, clipping behind unscale_."""
    import torchvision

    model = torchvision.models.resnet18(weights=None, num_classes=5).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)

    def step(image, target):
        with torch.autocast(device, dtype=torch.float16, enabled=on_gpu(device)):  # slow on CPUs
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    def between(index):
        if index % 4 == 3:
            scheduler.step()

    return Program(step, images(device), lambda: state_of(model, optimizer), between)


@program
def tv_mobilenet_v3_rmsprop_steplr_ema(device: str) -> Program:
    """The recipe of the references, with the ExponentialMovingAverage of utils.py."""
    import torchvision

    class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
        def __init__(self, model, decay, device="cpu"):
            def ema_avg(avg_model_param, model_param, num_averaged):
                return decay * avg_model_param + (1 - decay) * model_param

            super().__init__(model, device, ema_avg, use_buffers=True)

    model = torchvision.models.mobilenet_v3_small(weights=None, num_classes=5).to(device)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5, eps=0.0316, alpha=0.9, capturable=on_gpu(device)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.973)
    ema = ExponentialMovingAverage(model, 0.9, device=torch.device(device))

    def step(image, target):
        output = model(image)
        return descend(F.cross_entropy(output, target), optimizer).detach()

    def between(index):
        ema.update_parameters(model)
        scheduler.step()

    return Program(step, images(device), lambda: state_of(model, optimizer, ema), between)


@program
def tv_efficientnet_adamw_top1_top5(device: str) -> Program:
    """Stochastic depth and dropout; accuracy as in utils.accuracy, which is not read."""
    import torchvision

    model = torchvision.models.efficientnet_b0(weights=None, num_classes=8, stochastic_depth_prob=0.3).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def accuracy(output, target, topk=(1,)):
        with torch.inference_mode():
            maxk = max(topk)
            batch_size = target.size(0)
            if target.ndim == 2:
                target = target.max(dim=1)[1]
            _, pred = output.topk(maxk, 1, True, True)
            pred = pred.t()
            correct = pred.eq(target[None])
            res = []
            for k in topk:
                correct_k = correct[:k].flatten().sum(dtype=torch.float32)
                res.append(correct_k * (100.0 / batch_size))
            return res

    def step(image, target):
        output = model(image)
        loss = F.cross_entropy(output, target)
        descend(loss, optimizer)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        return {"loss": loss, "acc1": acc1, "acc5": acc5}

    return Program(step, images(device, classes=8), lambda: state_of(model, optimizer))


@program
def tv_vit_adamw_linear_warm_up_sequential(device: str) -> Program:
    import torchvision

    model = torchvision.models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        dropout=0.1,
        attention_dropout=0.1,
        num_classes=5,
    ).to(device)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=3e-3, fused=True
    )
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.033, total_iters=4)
    main = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers=[warm, main], milestones=[4])

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

    model = torchvision.models.DenseNet(
        growth_rate=8, block_config=(2, 3), num_init_features=16, memory_efficient=True, num_classes=5
    ).to(device)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, capturable=on_gpu(device))

    return training(lambda image, target: F.cross_entropy(model(image), target), optimizer, images(device), model)


@program
def tv_deeplab_aux_polynomial_confusion(device: str) -> Program:
    """references/segmentation/train.py, with a confusion matrix by bincount kept on the GPU."""
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5, aux_loss=True
    ).to(device)
    groups = [
        {"params": [p for p in model.backbone.parameters() if p.requires_grad]},
        {"params": [p for p in model.classifier.parameters() if p.requires_grad]},
        {"params": list(model.aux_classifier.parameters()), "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=CALLS, power=0.9)
    matrix = torch.zeros(5, 5, dtype=torch.int64, device=device)

    def criterion(inputs, target):
        losses = {name: F.cross_entropy(x, target, ignore_index=255) for name, x in inputs.items()}
        return losses["out"] + 0.5 * losses["aux"]

    def step(image, target):
        output = model(image)
        loss = criterion(output, target)
        descend(loss, optimizer)
        with torch.no_grad():
            guess = output["out"].argmax(1).flatten()
            valid = (target.flatten() < 5).to(torch.int64)
            index = 5 * target.flatten().clamp(max=4) + guess
            matrix.view(-1).scatter_add_(0, index, valid)
        return loss.detach()

    made = torch.Generator().manual_seed(5)
    batches = []
    for image, _ in images(device, rows=2):
        target = torch.randint(5, (2, 32, 32), generator=made)
        target[torch.rand(2, 32, 32, generator=made) < 0.1] = 255
        batches.append((image, target.to(device)))
    return Program(step, batches, lambda: state_of(model, optimizer, matrix), lambda index: scheduler.step())


@program
def tv_swin_adamw_onecycle_without_momentum(device: str) -> Program:
    import torchvision

    model = torchvision.models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=5,
        stochastic_depth_prob=0.2,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=CALLS + 1, cycle_momentum=False)

    def step(image, target):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(image), target)
        descend(loss, optimizer)
        return loss.detach()

    return Program(step, images(device), lambda: state_of(model, optimizer), lambda index: scheduler.step())


@program
def tv_shufflenet_adadelta_accumulates_two(device: str) -> Program:
    import torchvision

    model = torchvision.models.shufflenet_v2_x0_5(weights=None, num_classes=5).to(device)
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
    import torchvision

    model = torchvision.models.squeezenet1_1(weights=None, num_classes=5).to(device)
    optimizer = torch.optim.ASGD(model.parameters(), lr=1e-2, capturable=on_gpu(device))

    def step(image, target):
        hot = F.one_hot(target, 5).float()
        loss = torchvision.ops.sigmoid_focal_loss(model(image), hot, reduction="mean")
        descend(loss, optimizer)
        return {"loss": loss.detach(), "hits": (target == target.mode().values).sum()}

    return Program(step, images(device), lambda: state_of(model, optimizer))


@program
def tv_googlenet_aux_heads_multistep(device: str) -> Program:
    import torchvision

    model = torchvision.models.googlenet(weights=None, num_classes=5, aux_logits=True, init_weights=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9], gamma=0.1)

    def step(image, target):
        out = model(image)
        return descend(
            F.cross_entropy(out.logits, target)
            + 0.3 * F.cross_entropy(out.aux_logits1, target)
            + 0.3 * F.cross_entropy(out.aux_logits2, target),
            optimizer,
        ).detach()

    return Program(step, images(device), lambda: state_of(model, optimizer), lambda index: scheduler.step())


@program
def tv_frozen_backbone_batchnorm_eval_head_radam(device: str) -> Program:
    """Transfer learning: the backbone in eval mode, a new head."""
    import torchvision

    model = torchvision.models.resnet18(weights=None)
    for p in model.parameters():
        p.requires_grad = False
    model.fc = nn.Sequential(nn.Dropout(0.2), nn.Linear(512, 5))
    model.to(device).eval()
    model.fc.train()
    optimizer = torch.optim.RAdam(model.fc.parameters(), lr=1e-3, capturable=on_gpu(device))

    def step(image, target):
        optimizer.zero_grad()
        with torch.set_grad_enabled(True):
            outputs = model(image)
            _, preds = torch.max(outputs, 1)
            loss = F.cross_entropy(outputs, target)
            loss.backward()
            optimizer.step()
        return {"loss": loss, "corrects": torch.sum(preds == target.data)}

    return Program(step, images(device), lambda: state_of(model, optimizer))


@program
def tv_detection_head_iou_losses_two_optimizers(device: str) -> Program:
    """A one-box detector: roi_align, giou loss; backbone by SGD, head by Adamax."""
    import torchvision

    body = nn.Sequential(
        torchvision.ops.Conv2dNormActivation(3, 16, stride=2),
        torchvision.ops.SqueezeExcitation(16, 4),
        torchvision.ops.Conv2dNormActivation(16, 16, stride=2),
    ).to(device)
    head = torchvision.ops.MLP(16 * 9, [32, 4 + 5], dropout=0.1).to(device)
    first = torch.optim.SGD(body.parameters(), lr=0.01, momentum=0.9)
    second = torch.optim.Adamax(head.parameters(), lr=1e-3, capturable=on_gpu(device))

    def step(image, boxes, target):
        first.zero_grad()
        second.zero_grad()
        rois = torch.cat([torch.arange(image.shape[0], device=image.device)[:, None].float(), boxes], 1)
        pooled = torchvision.ops.roi_align(body(image), rois, output_size=3, spatial_scale=0.25)
        out = head(pooled.flatten(1))
        corner = boxes[:, :2] + out[:, :2].tanh()
        guess = torch.cat([corner, corner + out[:, 2:4].exp().clamp(max=30)], 1)
        box = torchvision.ops.generalized_box_iou_loss(guess, boxes, reduction="mean")
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
    import torchvision

    model = torchvision.models.video.VideoResNet(
        block=torchvision.models.video.resnet.BasicBlock,
        conv_makers=[torchvision.models.video.resnet.Conv2Plus1D] * 4,
        layers=[1, 1, 1, 1],
        stem=torchvision.models.video.resnet.R2Plus1dStem,
        num_classes=5,
    ).to(device)
    head = list(model.layer4.parameters()) + list(model.fc.parameters())
    optimizer = torch.optim.Rprop(head, lr=1e-4, capturable=on_gpu(device))

    def step(image, target):
        clip = image[:, :, None].expand(-1, -1, 4, -1, -1)
        return descend(F.cross_entropy(model(clip), target), optimizer).detach()

    return Program(step, images(device, rows=2, size=16), lambda: state_of(model, optimizer))
