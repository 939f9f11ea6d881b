"""Adversarial and variational models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from step_parts import Program
from torch import nn

from library_programs.record import descend, drawn, many, on_the_device, program, state_of


def small_generator(z=8):
    return nn.Sequential(
        nn.ConvTranspose2d(z, 16, 4, 1, 0, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def small_critic(norm=True):
    return nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1, bias=False),
        *([nn.BatchNorm2d(16)] if norm else []),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    )


@program
def dcgan_of_the_tutorial(device: str) -> Program:
    netG, netD = small_generator().to(device), nn.Sequential(small_critic(), nn.Sigmoid()).to(device)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999), **on_the_device(device))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999), **on_the_device(device))

    def step(real):
        netD.zero_grad()
        b_size = real.size(0)
        label = torch.full((b_size,), 1.0, dtype=torch.float, device=device)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean()
        noise = torch.randn(b_size, 8, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        return errD, errG, D_x, fake.detach()

    parts = (netG, netD, optimizerD, optimizerG)
    return Program(step, many(lambda g: [drawn(g)], device), lambda: state_of(*parts))


@program
def wgan_gp_critic_five_times_by_an_argument(device: str) -> Program:
    G, D = small_generator().to(device), small_critic(False).to(device)
    opt_G = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.9), fused=True)
    opt_D = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.9), fused=True)

    def compute_gradient_penalty(real, fake):
        alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        out = D(mixed)
        ones = torch.ones_like(out)
        (gradients,) = torch.autograd.grad(out, mixed, ones, create_graph=True, retain_graph=True, only_inputs=True)
        return ((gradients.view(real.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()

    def step(real, i):
        z = torch.randn(real.size(0), 8, 1, 1, device=real.device)
        fake = G(z)
        d_loss = -D(real).mean() + D(fake.detach()).mean() + 10 * compute_gradient_penalty(real, fake.detach())
        descend(d_loss, opt_D)
        opt_G.zero_grad()
        result = {"d": d_loss.detach()}
        if i % 2 == 0:
            g_loss = -D(G(z)).mean()
            g_loss.backward()
            opt_G.step()
            result["g"] = g_loss.detach()
        return result

    data = [(real, i % 2) for i, (real,) in enumerate(many(lambda g: [drawn(g)], device))]
    return Program(step, data, lambda: state_of(G, D, opt_G, opt_D))


@program
def cyclegan_two_optimizers_linear_decay(device: str) -> Program:

    def gen():
        return nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(1, 8, 3),
            nn.InstanceNorm2d(8),
            nn.ReLU(True),
            nn.Conv2d(8, 1, 3, padding=1),
            nn.Tanh(),
        ).to(device)

    def disc():
        return nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 1, 4, padding=1)).to(
            device
        )

    G_A, G_B, D_A, D_B = gen(), gen(), disc(), disc()
    options = {"lr": 2e-4, "betas": (0.5, 0.999), **on_the_device(device)}
    opt_G = torch.optim.Adam([*G_A.parameters(), *G_B.parameters()], **options)
    opt_D = torch.optim.Adam([*D_A.parameters(), *D_B.parameters()], **options)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e - 4) / 12.0) for o in (opt_G, opt_D)]
    real_label = torch.tensor(1.0, device=device)
    fake_label = torch.tensor(0.0, device=device)
    mse, l1 = nn.MSELoss(), nn.L1Loss()

    def gan(pred, real):
        return mse(pred, (real_label if real else fake_label).expand_as(pred))

    def set_requires_grad(nets, flag):
        for net in nets:
            for p in net.parameters():
                p.requires_grad = flag

    def optimize_parameters(real_A, real_B):
        fake_B, fake_A = G_A(real_A), G_B(real_B)
        rec_A, rec_B = G_B(fake_B), G_A(fake_A)
        set_requires_grad([D_A, D_B], False)
        idt = l1(G_A(real_B), real_B) * 5 + l1(G_B(real_A), real_A) * 5
        loss_G = gan(D_A(fake_B), True) + gan(D_B(fake_A), True) + 10 * (l1(rec_A, real_A) + l1(rec_B, real_B)) + idt
        descend(loss_G, opt_G)
        set_requires_grad([D_A, D_B], True)
        opt_D.zero_grad()
        loss_D_A = (gan(D_A(real_B), True) + gan(D_A(fake_B.detach()), False)) * 0.5
        loss_D_A.backward()
        loss_D_B = (gan(D_B(real_A), True) + gan(D_B(fake_A.detach()), False)) * 0.5
        loss_D_B.backward()
        opt_D.step()
        return {"G": loss_G.detach(), "D_A": loss_D_A.detach(), "D_B": loss_D_B.detach()}

    def between(index: int) -> None:
        for scheduler in schedulers:
            scheduler.step()

    parts = (G_A, G_B, D_A, D_B, opt_G, opt_D)
    data = many(lambda g: [drawn(g, 2, size=12), drawn(g, 2, size=12)], device)
    return Program(optimize_parameters, data, lambda: state_of(*parts), between)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


@program
def vae_of_the_examples(device: str) -> Program:
    model = VAE().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def step(data):
        model.train()
        recon, mu, logvar = model(data)
        BCE = F.binary_cross_entropy(recon, data.view(-1, 64), reduction="sum")
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = BCE + KLD
        descend(loss, optimizer)
        return loss / len(data)

    return Program(
        step, many(lambda g: [torch.rand(6, 1, 8, 8, generator=g)], device), lambda: state_of(model, optimizer)
    )


class VectorQuantizerEMA(nn.Module):
    def __init__(self, k=16, d=8, decay=0.9, eps=1e-5) -> None:
        super().__init__()
        self.k, self.d, self.decay, self.eps = k, d, decay, eps
        self.embedding = nn.Embedding(k, d)
        self.embedding.weight.requires_grad_(False)
        self.register_buffer("ema_cluster_size", torch.zeros(k))
        self.register_buffer("ema_w", torch.randn(k, d))

    def forward(self, inputs):
        flat = inputs.permute(0, 2, 3, 1).contiguous().view(-1, self.d)
        distances = (
            flat.pow(2).sum(1, keepdim=True)
            + self.embedding.weight.pow(2).sum(1)
            - 2 * flat @ self.embedding.weight.t()
        )
        indices = torch.argmin(distances, dim=1).unsqueeze(1)
        encodings = torch.zeros(indices.shape[0], self.k, device=inputs.device)
        encodings.scatter_(1, indices, 1)
        b, _, h, w = inputs.shape
        quantized = (encodings @ self.embedding.weight).view(b, h, w, self.d).permute(0, 3, 1, 2)
        if self.training:
            with torch.no_grad():
                self.ema_cluster_size = self.ema_cluster_size * self.decay + (1 - self.decay) * encodings.sum(0)
                n = self.ema_cluster_size.sum()
                self.ema_cluster_size = (self.ema_cluster_size + self.eps) / (n + self.k * self.eps) * n
                self.ema_w = self.ema_w * self.decay + (1 - self.decay) * (encodings.t() @ flat)
                self.embedding.weight.copy_(self.ema_w / self.ema_cluster_size.unsqueeze(1))
        loss = 0.25 * F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        avg = encodings.mean(0)
        return loss, quantized, torch.exp(-torch.sum(avg * torch.log(avg + 1e-10)))


@program
def vq_vae_with_ema_codebook(device: str) -> Program:
    encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1)).to(device)
    vq = VectorQuantizerEMA().to(device)
    decoder = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)).to(device)
    params = [p for m in (encoder, vq, decoder) for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=1e-3, amsgrad=False, **on_the_device(device))

    def step(data):
        vq_loss, quantized, perplexity = vq(encoder(data))
        recon_error = F.mse_loss(decoder(quantized), data) / 0.06
        loss = recon_error + vq_loss
        descend(loss, optimizer)
        return {"recon": recon_error.detach(), "perplexity": perplexity}

    parts = (encoder, vq, decoder, optimizer)
    return Program(step, many(lambda g: [drawn(g)], device), lambda: state_of(*parts))
