"""Images: timm, torchvision, and a diffusion loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from real_programs.pieces import batches, built, descend, integers, mlp, normal, served, weights
from real_programs.record import Body, Setting, program


@program(calls=8, needs=("timm",))
def timm_inference(setting: Setting) -> Body:
    """timm: a small CNN in inference, channels last, a new batch in each call."""
    import timm

    side = setting.pick(160, 32)
    model = built(setting, lambda: timm.create_model("mobilenetv3_small_050", pretrained=False)).eval()
    call = setting.compile(model.to(memory_format=torch.channels_last))
    images = batches(
        3, lambda g: normal(setting, g, setting.pick(16, 1), 3, side, side).to(memory_format=torch.channels_last)
    )

    return served(lambda i: call(images[i % 3]))


@program(calls=5, trains=True, needs=("timm",), tolerance=5e-3)
def timm_training(setting: Setting) -> Body:
    """timm: a small ResNet in training, with batch statistics and a cosine schedule."""
    import timm

    side, batch = setting.pick((128, 16), (32, 2))
    model = built(setting, lambda: timm.create_model("resnet10t", pretrained=False, num_classes=10)).train()
    call = setting.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = batches(3, lambda g: (normal(setting, g, batch, 3, side, side), integers(setting, g, 10, batch)))

    def step(i: int) -> Any:
        images, labels = data[i % 3]
        loss = descend(nn.functional.cross_entropy(call(images), labels), optimizer)
        scheduler.step()
        return loss

    return Body(step, lambda: weights(model))


@program(calls=3, needs=("torchvision",))
def torchvision_detection(setting: Setting) -> Body:
    """torchvision: SSDLite with its backbone and heads compiled, boxes decoded and sorted out in eager mode."""
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    model = built(
        setting,
        lambda: ssdlite320_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=5, detections_per_img=20
        ),
    ).eval()
    sizes = iter(((320, 320), (280, 400), (320, 240)))
    photos = batches(3, lambda g: torch.rand(3, *next(sizes), generator=g).to(setting.device))
    # Without statistics of its own, a random network gives the same scores for every photo.
    model.train()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None
    with torch.no_grad():
        together = torch.stack([nn.functional.interpolate(photo[None], (320, 320))[0] for photo in photos])
        model.head(list(model.backbone(2 * together - 1).values()))
    model.eval()
    model.backbone, model.head = setting.compile(model.backbone), setting.compile(model.head)

    def step(i: int) -> Any:
        (found,) = model([photos[i % 3]])
        # Boxes of near-equal scores may change places; the scores in order do not.
        return found["scores"].sort().values

    return served(step)


class Denoiser(nn.Module):
    """A two-level UNet with a time embedding, over [batch, channels, side, side]."""

    def __init__(self, width: int, channels: int = 3) -> None:
        super().__init__()
        self.embed = mlp(width, 1, width, 2 * width)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, channels, 3, padding=1)
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, -4, width // 2)))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angles = time.to(x.device).float().reshape(-1, 1) * self.frequencies
        embedded = self.embed(torch.cat([angles.sin(), angles.cos()], -1))[..., None, None]
        first = nn.functional.silu(self.first(x))
        deep = nn.functional.silu(self.middle(nn.functional.silu(self.down(first)) + embedded))
        return self.last(torch.cat([first, self.up(deep)], 1))


@program(calls=4)
def diffusion_loop(setting: Setting) -> Body:
    """A denoising loop: timesteps on the CPU, as schedulers hold them, the image fed back in every step."""
    width, side = setting.pick((64, 64), (8, 8))
    call = setting.compile(built(setting, lambda: Denoiser(width)).eval())
    noises = batches(3, lambda g: normal(setting, g, 2, 3, side, side))
    times = torch.linspace(999, 0, setting.pick(20, 3)).long()
    kept = torch.linspace(0.98, 1.0, len(times))

    def step(i: int) -> Any:
        image = noises[i % 3]
        for time, share in zip(times, kept, strict=True):
            image = share * image - 0.02 * call(image, time)
        return image

    return served(step)


@program(calls=3, needs=("diffusers",))
def diffusers_pipeline(setting: Setting) -> Body:
    """diffusers: a compiled UNet2DModel under a DDIM scheduler."""
    from diffusers import DDIMScheduler, UNet2DModel

    side = setting.pick(32, 8)
    widths = setting.pick((64, 128), (8, 16))
    model = built(
        setting,
        lambda: UNet2DModel(
            sample_size=side,
            block_out_channels=widths,
            down_block_types=("DownBlock2D", setting.pick("AttnDownBlock2D", "DownBlock2D")),
            up_block_types=(setting.pick("AttnUpBlock2D", "UpBlock2D"), "UpBlock2D"),
            add_attention=not setting.tiny,  # aot_eager fails in its group norm on a CPU
            layers_per_block=1,
            norm_num_groups=4,
        ),
    ).eval()
    call = setting.compile(model)
    scheduler = DDIMScheduler(num_train_timesteps=100)
    noises = batches(2, lambda g: normal(setting, g, 1, 3, side, side))

    def step(i: int) -> Any:
        scheduler.set_timesteps(setting.pick(10, 2))
        image = noises[i % 2]
        for time in scheduler.timesteps:
            image = scheduler.step(call(image, time).sample, time, image).prev_sample
        return image

    return served(step)
