"""Differential equations and second derivatives."""

from __future__ import annotations

import itertools

import torch
from step_parts import Program
from torch import nn

from library_programs.record import capturable, many, on_the_device, program, training


@program
def pinn_burgers_second_derivatives(device: str) -> Program:
    layers = [2, 16, 16, 16, 1]
    net = nn.Sequential()
    for i in range(len(layers) - 1):
        net.append(nn.Linear(layers[i], layers[i + 1]))
        if i < len(layers) - 2:
            net.append(nn.Tanh())
    net.to(device)
    lambda_1 = nn.Parameter(torch.tensor([0.0], device=device))
    lambda_2 = nn.Parameter(torch.tensor([-6.0], device=device))
    optimizer = torch.optim.Adam([*net.parameters(), lambda_1, lambda_2], lr=1e-3, **on_the_device(device))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def net_f(x, t):
        u = net(torch.cat([x, t], dim=1))
        u_t = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
        return u, u_t + lambda_1 * u * u_x - torch.exp(lambda_2) * u_xx

    def loss_of(x, t, u):
        x = x.clone().requires_grad_(True)
        t = t.clone().requires_grad_(True)
        u_pred, f_pred = net_f(x, t)
        return torch.mean((u - u_pred) ** 2) + torch.mean(f_pred**2)

    data = many(
        lambda g: [torch.rand(20, 1, generator=g), torch.rand(20, 1, generator=g), torch.randn(20, 1, generator=g)],
        device,
    )
    return training(loss_of, optimizer, data, net, [lambda_1, lambda_2], scheduler=scheduler)


@program
def neural_ode_by_rk4(device: str) -> Program:

    class ODEFunc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
            for m in self.net.modules():
                if isinstance(m, nn.Linear):
                    nn.init.normal_(m.weight, mean=0, std=0.1)
                    nn.init.constant_(m.bias, val=0)

        def forward(self, t, y):
            return self.net(y**3)

    def odeint(func, y, t):
        ys = [y]
        for t0, t1 in itertools.pairwise(t):
            dt = t1 - t0
            k1 = func(t0, y)
            k2 = func(t0 + dt / 2, y + dt * k1 / 2)
            k3 = func(t0 + dt / 2, y + dt * k2 / 2)
            k4 = func(t1, y + dt * k3)
            y = y + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6
            ys.append(y)
        return torch.stack(ys)

    func = ODEFunc().to(device)
    optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3, **capturable(device))
    times = torch.linspace(0.0, 1.0, 5).to(device)

    def loss_of(y0, y):
        return torch.mean(torch.abs(odeint(func, y0, times) - y))

    data = many(lambda g: [torch.randn(6, 1, 2, generator=g), torch.randn(5, 6, 1, 2, generator=g)], device)
    return training(loss_of, optimizer, data, func)
