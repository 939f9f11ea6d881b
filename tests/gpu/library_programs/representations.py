"""Diffusion, self-supervision, meta-learning and distillation."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from real_programs.vision import Denoiser
from step_parts import Program
from torch import nn

from library_programs.record import CALLS, descend, drawn, many, on_the_device, program, state_of, training, variant
from library_programs.schedules import ConvNet, digits


class GaussianDiffusion(nn.Module):
    """lucidrains' denoising-diffusion-pytorch, cut down."""

    def __init__(self, model: nn.Module, timesteps: int = 50) -> None:
        super().__init__()
        self.model, self.num_timesteps = model, timesteps
        alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, timesteps), dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus", (1 - alphas_cumprod).sqrt())
        self.register_buffer("loss_weight", (alphas_cumprod / (1 - alphas_cumprod)).clamp(max=5))

    def extract(self, a, t, shape):
        b, *_ = t.shape
        return a.gather(-1, t).reshape(b, *((1,) * (len(shape) - 1)))

    def forward(self, img):
        b, device = img.shape[0], img.device
        t = torch.randint(0, self.num_timesteps, (b,), device=device).long()
        noise = torch.randn_like(img)
        x = (
            self.extract(self.sqrt_alphas_cumprod, t, img.shape) * img
            + self.extract(self.sqrt_one_minus, t, img.shape) * noise
        )
        loss = F.mse_loss(self.model(x, t), noise, reduction="none")
        loss = loss.reshape(b, -1).mean(1) * self.extract(self.loss_weight, t, loss.shape).reshape(b)
        return loss.mean()


def ddpm(device: str) -> Program:
    diffusion = GaussianDiffusion(Denoiser(8, channels=1)).to(device)
    ema = copy.deepcopy(diffusion).requires_grad_(False)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-3, betas=(0.9, 0.99), **on_the_device(device))

    def average():
        for mine, theirs in zip(ema.parameters(), diffusion.parameters(), strict=False):
            mine.lerp_(theirs, 0.05)

    data = many(lambda g: [drawn(g, size=8)], device)
    return training(diffusion, optimizer, data, diffusion, ema, last=average, clip=1.0, zeroed="last")


variant("ddpm_with_timesteps_on_the_device", ddpm)


@program
def maml_second_order_inner_loop(device: str) -> Program:
    from torch.func import functional_call

    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3, **on_the_device(device))

    def step(x_spt, y_spt, x_qry, y_qry):
        losses, accs = [], []
        meta_opt.zero_grad()
        for i in range(x_spt.shape[0]):
            fast = dict(net.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(functional_call(net, fast, (x_spt[i],)), y_spt[i])
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: w - 0.1 * g for (name, w), g in zip(fast.items(), grads, strict=False)}
            logits = functional_call(net, fast, (x_qry[i],))
            qry_loss = F.cross_entropy(logits, y_qry[i])
            losses.append(qry_loss.detach())
            accs.append((logits.argmax(1) == y_qry[i]).float().mean())
            qry_loss.backward()
        meta_opt.step()
        return sum(losses) / len(losses), torch.stack(accs).mean()

    data = many(
        lambda g: [
            torch.randn(3, 6, 4, generator=g),
            torch.randint(3, (3, 6), generator=g),
            torch.randn(3, 6, 4, generator=g),
            torch.randint(3, (3, 6), generator=g),
        ],
        device,
    )
    return Program(step, data, lambda: state_of(net, meta_opt))


@program
def maml_by_vmap_of_grad(device: str) -> Program:
    from torch.func import functional_call, grad, vmap

    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    params = dict(net.named_parameters())

    def task_loss(p, x1, y1, x2, y2):
        def inner(q):
            return F.mse_loss(functional_call(net, q, (x1,)), y1)

        grads = grad(inner)(p)
        adapted = {k: p[k] - 0.1 * g for k, g in grads.items()}
        return F.mse_loss(functional_call(net, adapted, (x2,)), y2)

    def loss_of(*tasks):
        losses = vmap(task_loss, in_dims=(None, 0, 0, 0, 0))(params, *tasks)
        return losses.mean(), {"each": losses.detach()}

    data = many(lambda g: [torch.randn(3, 5, d, generator=g) for d in (4, 1, 4, 1)], device)
    return training(loss_of, optimizer, data, net)


def small_encoder(out: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, out),
    )


def two_views(device: str, n: int = 4) -> list[tuple[Any, ...]]:
    return many(lambda g: [drawn(g, n, size=8), drawn(g, n, size=8)], device)


@program
def simclr_with_scaler_and_boolean_masks(device: str) -> Program:
    """info_nce_loss of sthalles/SimCLR takes rows by boolean masks; refused is fine."""
    model = small_encoder().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=CALLS, eta_min=0)

    def info_nce_loss(features):
        labels = torch.cat([torch.arange(4) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().to(device)
        features = F.normalize(features, dim=1)
        similarity = features @ features.T
        mask = torch.eye(labels.shape[0], dtype=torch.bool).to(device)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity = similarity[~mask].view(similarity.shape[0], -1)
        positives = similarity[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        return logits / 0.07, torch.zeros(logits.shape[0], dtype=torch.long).to(device)

    return training(
        lambda a, b: F.cross_entropy(*info_nce_loss(model(torch.cat([a, b])))),
        optimizer,
        two_views(device),
        model,
        scheduler=scheduler,
        cast=torch.float16 if device == "cuda" else None,
        scaler=torch.amp.GradScaler(device, enabled=device == "cuda"),
        detached=True,
    )


@program
def simclr_nt_xent_of_fixed_size(device: str) -> Program:
    model = small_encoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=CALLS, eta_min=1e-4)

    def loss_and_accuracy(a, b):
        z = F.normalize(model(torch.cat([a, b])), dim=1)
        sim = z @ z.t() / 0.5
        sim.fill_diagonal_(float("-inf"))
        n = a.shape[0]
        target = torch.arange(2 * n, device=z.device).roll(n)
        return F.cross_entropy(sim, target), (sim.argmax(1) == target).float().mean()

    return training(loss_and_accuracy, optimizer, two_views(device), model, scheduler=scheduler)


@program
def byol_with_target_average(device: str) -> Program:

    class BYOL(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = small_encoder()
            self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
            self.target = None

        def target_encoder(self):
            if self.target is None:
                self.target = copy.deepcopy(self.online)
                for p in self.target.parameters():
                    p.requires_grad = False
            return self.target

        def forward(self, a, b):
            p1, p2 = self.predictor(self.online(a)), self.predictor(self.online(b))
            with torch.no_grad():
                target = self.target_encoder()
                t1, t2 = target(a).detach(), target(b).detach()

            def loss_fn(x, y):
                return 2 - 2 * (F.normalize(x, dim=-1, p=2) * F.normalize(y, dim=-1, p=2)).sum(dim=-1)

            return (loss_fn(p1, t2) + loss_fn(p2, t1)).mean()

    learner = BYOL().to(device)
    optimizer = torch.optim.Adam(
        [*learner.online.parameters(), *learner.predictor.parameters()], lr=3e-3, **on_the_device(device)
    )

    def average():
        for current, mean in zip(learner.online.parameters(), learner.target.parameters(), strict=False):
            mean.mul_(0.99).add_(current, alpha=0.01)

    return training(learner, optimizer, two_views(device), learner, last=average)


def moco(device: str, pointer: str) -> Program:

    class MoCo(nn.Module):
        def __init__(self, K: int = 20) -> None:
            super().__init__()
            self.K, self.m, self.T = K, 0.99, 0.07
            self.encoder_q, self.encoder_k = small_encoder(), small_encoder()
            for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=False):
                k.data.copy_(q.data)
                k.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(16, K), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _dequeue_and_enqueue(self, keys):
            n = keys.shape[0]
            if pointer == "host":
                ptr = int(self.queue_ptr)
                self.queue[:, ptr : ptr + n] = keys.T
                self.queue_ptr[0] = (ptr + n) % self.K
            else:
                where = (self.queue_ptr + torch.arange(n, device=keys.device)) % self.K
                self.queue.index_copy_(1, where, keys.T)
                self.queue_ptr.add_(n).remainder_(self.K)

        def forward(self, im_q, im_k):
            q = F.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                for a, b in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=False):
                    b.data = (
                        b.data * self.m + a.data * (1.0 - self.m)
                        if pointer == "host"
                        else b.data.mul_(self.m).add_(a.data, alpha=1 - self.m)
                    )
                shuffle = torch.randperm(im_k.shape[0], device=im_k.device)
                k = F.normalize(self.encoder_k(im_k[shuffle]), dim=1)[torch.argsort(shuffle)]
            l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
            l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
            logits = torch.cat([l_pos, l_neg], dim=1) / self.T
            labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
            self._dequeue_and_enqueue(k)
            return logits, labels

    model = MoCo().to(device)
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)

    def step(a, b):
        output, target = model(a, b)
        loss = F.cross_entropy(output, target)
        _, pred = output.topk(5, 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        descend(loss, optimizer)
        return {
            "loss": loss.detach(),
            "acc1": correct[:1].reshape(-1).float().sum(0),
            "acc5": correct.reshape(-1).float().sum(0),
        }

    return Program(step, two_views(device), lambda: state_of(model, optimizer))


variant("moco_queue_pointer_on_the_device", moco, "device")
# As in facebookresearch/moco; refused is fine: `int(self.queue_ptr)`, and `.data = ...`.
variant("moco_queue_pointer_read_on_the_host", moco, "host")


@program
def clip_contrastive_with_clamped_scale(device: str) -> Program:
    vision, text_model, proj = small_encoder().to(device), nn.Embedding(40, 16).to(device), nn.Linear(16, 16).to(device)
    logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07), device=device))
    params = [*vision.parameters(), *text_model.parameters(), *proj.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": 0.2}, {"params": [logit_scale], "weight_decay": 0.0}], lr=5e-4, fused=True
    )

    def step(image, words):
        with torch.autocast(device, torch.bfloat16):
            f_i = F.normalize(vision(image), dim=-1)
            f_t = F.normalize(proj(text_model(words)[torch.arange(4, device=device), words.argmax(-1)]), dim=-1)
            logits = logit_scale.exp() * f_i @ f_t.T
            labels = torch.arange(logits.shape[0], device=device, dtype=torch.long)
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        descend(loss, optimizer)
        with torch.no_grad():
            logit_scale.clamp_(0, math.log(100))
        return {"loss": loss.detach(), "scale": logit_scale.detach().exp()}

    data = many(lambda g: [drawn(g, size=8), torch.randint(40, (4, 6), generator=g)], device)
    return Program(step, data, lambda: [*state_of(vision, text_model, proj, optimizer), logit_scale])


@program
def distillation_of_the_tutorial(device: str) -> Program:
    teacher, student = ConvNet().to(device), ConvNet().to(device)
    ce_loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, **on_the_device(device))
    T = 2
    teacher.eval()
    student.train()

    def loss_of(inputs, labels):
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft_targets = nn.functional.softmax(teacher_logits / T, dim=-1)
        soft_prob = nn.functional.log_softmax(student_logits / T, dim=-1)
        soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
        return 0.25 * soft_loss + 0.75 * ce_loss(student_logits, labels)

    return training(loss_of, optimizer, digits(device), teacher, student)
