"""Optimizers that wrap others, averages of weights, and steps that are compiled inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from step_parts import Program
from torch import nn

from library_programs.record import backend, capturable, descend, drawn, many, program, state_of, training, variant
from library_programs.representations import small_encoder, two_views
from library_programs.schedules import ConvNet, digits


class SAM(torch.optim.Optimizer):
    """davda54/sam."""

    def __init__(self, params, base_optimizer, rho=0.05, adaptive=False, **kwargs) -> None:
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False, in_place=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if in_place:
                    self.state[p].setdefault("old_p", torch.empty_like(p)).copy_(p)
                else:
                    self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step_in_place(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        self.zero_grad()

    def _grad_norm(self):
        shared = self.param_groups[0]["params"][0].device
        return torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2).to(shared)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


def disable_running_stats(model, back=False):
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if back and hasattr(module, "backup_momentum"):
                module.momentum = module.backup_momentum
            elif not back:
                module.backup_momentum = module.momentum
                module.momentum = 0


def sharpness_aware(device: str, adaptive: bool, in_place: bool) -> Program:
    model = ConvNet().to(device)
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.5, adaptive=adaptive, lr=0.05, momentum=0.9)

    def step(x, y):
        disable_running_stats(model, back=True)
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.first_step(zero_grad=True, in_place=in_place)
        disable_running_stats(model)
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        if in_place:
            optimizer.second_step_in_place()
        else:
            optimizer.second_step(zero_grad=True)
        disable_running_stats(model, back=True)
        return loss.detach()

    return Program(step, digits(device), lambda: state_of(model, optimizer.base_optimizer))


# As in the repository. It may be refused: it sets `p.data = old`, and keeps another backup in each call.
variant("sam_with_exchanged_data", sharpness_aware, False, False)
variant("sam_adaptive_in_place", sharpness_aware, True, True)


@program
def lookahead_every_fifth_call_by_an_argument(device: str) -> Program:
    model = ConvNet().to(device)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    slow = [p.detach().clone() for p in model.parameters()]

    def step(x, y, synchronise):
        base.zero_grad(set_to_none=False)
        loss = F.nll_loss(model(x), y)
        loss.backward()
        base.step()
        if synchronise:
            with torch.no_grad():
                for fast, kept in zip(model.parameters(), slow, strict=False):
                    kept.add_(fast - kept, alpha=0.5)
                    fast.copy_(kept)
        return loss.detach()

    data = [(x, y, i % 3 == 2) for i, (x, y) in enumerate(digits(device))]
    return Program(step, data, lambda: [*state_of(model, base), *slow])


@program
def lookahead_that_counts_itself(device: str) -> Program:
    """Refused is fine: the optimizer counts its calls in Python."""
    model = ConvNet(dropout=False).to(device)
    base = torch.optim.SGD(model.parameters(), lr=0.05)

    class Lookahead:
        def __init__(self) -> None:
            self.counter = 0
            self.slow = [p.detach().clone() for p in model.parameters()]

        def zero_grad(self):
            base.zero_grad()

        def step(self):
            base.step()
            self.counter += 1
            if self.counter % 5 == 0:
                with torch.no_grad():
                    for fast, kept in zip(model.parameters(), self.slow, strict=False):
                        kept.lerp_(fast, 0.5)
                        fast.copy_(kept)

    optimizer = Lookahead()

    def step(x, y):
        return descend(F.nll_loss(model(x), y), optimizer).detach()

    return Program(step, digits(device), lambda: [*state_of(model, base), *optimizer.slow])


@program
def siamese_triplets_with_hard_negatives(device: str) -> Program:
    net = small_encoder().to(device)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=1e-2)
    triplet = nn.TripletMarginWithDistanceLoss(distance_function=lambda a, b: 1 - F.cosine_similarity(a, b), margin=0.5)

    def loss_of(anchor, positive, pool):
        a, p, n = net(anchor), net(positive), net(pool)
        with torch.no_grad():
            hardest = torch.cdist(a, n).argmin(dim=1)
        return triplet(a, p, n[hardest]), {"hardest": hardest}

    data = many(lambda g: [drawn(g, size=8), drawn(g, size=8), drawn(g, 8, size=8)], device)
    return training(loss_of, optimizer, data, net)


def factorization(device: str, sparse: bool) -> Program:

    class MF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(30, 8, sparse=sparse), nn.Embedding(20, 8, sparse=sparse)
            self.user_bias, self.item_bias = nn.Embedding(30, 1, sparse=sparse), nn.Embedding(20, 1, sparse=sparse)

        def forward(self, u, i):
            pred = (self.users(u) * self.items(i)).sum(1, keepdim=True)
            return (pred + self.user_bias(u) + self.item_bias(i)).squeeze()

    model = MF().to(device)
    optimizer = (
        torch.optim.SparseAdam(model.parameters(), lr=0.01)
        if sparse
        else torch.optim.SGD(model.parameters(), lr=0.1, maximize=False)
    )

    data = many(
        lambda g: [
            torch.randint(30, (8,), generator=g),
            torch.randint(20, (8,), generator=g),
            torch.randn(8, generator=g),
        ],
        device,
    )
    return training(lambda u, i, rating: F.mse_loss(model(u, i), rating), optimizer, data, model)


# Refused is fine: gradients are sparse.
variant("matrix_factorization_with_sparse_adam", factorization, True)
variant("matrix_factorization_with_dense_gradients", factorization, False)


@program
def lbfgs_with_a_closure(device: str) -> Program:
    """Refused is fine."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    data = many(lambda g: [torch.randn(8, 4, generator=g), torch.randn(8, 1, generator=g)], device)
    return Program(step, data, lambda: state_of(model))


@program
def swa_of_the_documentation(device: str) -> Program:
    """AveragedModel after the step from the sixth call on, and SWALR."""
    from torch.optim.swa_utils import SWALR, AveragedModel

    model = ConvNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    swa_model = AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)

    def between(index: int) -> None:
        if index > 5:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()

    return training(lambda x, y: F.nll_loss(model(x), y), optimizer, digits(device), model, swa_model, between=between)


@program
def ema_by_averaged_model_in_the_step(device: str) -> Program:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = ConvNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ema = AveragedModel(model, device=torch.device(device), multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)

    def loss_of(x, y):
        return F.nll_loss(model(x), y)

    return training(loss_of, optimizer, digits(device), model, ema, last=lambda: ema.update_parameters(model))


@program
def scaler_that_overflows(device: str) -> Program:
    """A scale of 2**20 overflows float16 in the first calls; a batch of the middle holds an infinity."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=3)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss.detach(), "norm": norm}

    data = many(lambda g: [drawn(g, 8, size=8), torch.randint(10, (8,), generator=g)], device)
    data[9][0][0, 0, 0, 0] = float("inf")
    return Program(step, data, lambda: [*state_of(model, optimizer), scaler._scale, scaler._growth_tracker])


@program
def gradient_noise_that_decays(device: str) -> Program:
    """Noise on the gradients by hooks, and its size by a tensor argument."""
    model = ConvNet().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True, **capturable(device))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 11], gamma=0.1)

    def step(x, y, sigma):
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad) * sigma)
        optimizer.step()
        return loss

    data = [(x, y, torch.tensor(0.01 / (1 + i) ** 0.55, device=device)) for i, (x, y) in enumerate(digits(device))]
    return Program(step, data, lambda: state_of(model, optimizer), lambda i: scheduler.step())


@program
def convnet_step_compiled_by_aot_eager(device: str) -> Program:
    model = ConvNet(dropout=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    called = torch.compile(model, backend="aot_eager")

    return training(lambda x, y: F.nll_loss(called(x), y), optimizer, digits(device), model)


@program
def mlp_and_optimizer_compiled_inside(device: str) -> Program:
    """The optimizer's step compiled too, as in the tutorial."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=device), **capturable(device))
    called = torch.compile(model, backend=backend(device))

    @torch.compile(fullgraph=False, backend=backend(device))
    def update():
        optimizer.step()

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(called(x), y)
        loss.backward()
        update()
        return loss

    data = many(lambda g: [drawn(g, 8, size=8), torch.randint(10, (8,), generator=g)], device)
    return Program(step, data, lambda: state_of(model, optimizer))


@program
def loss_compiled_inside(device: str) -> Program:
    model = small_encoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)

    @torch.compile(backend=backend(device))
    def barlow_twins(a, b):
        a, b = (a - a.mean(0)) / (a.std(0) + 1e-5), (b - b.mean(0)) / (b.std(0) + 1e-5)
        c = a.T @ b / a.shape[0]
        on = (torch.diagonal(c) - 1).pow(2).sum()
        return on + 0.005 * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())

    return training(lambda a, b: barlow_twins(model(a), model(b)), optimizer, two_views(device, 8), model)
