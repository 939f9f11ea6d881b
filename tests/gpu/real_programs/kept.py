"""Results that are read after the compiled function has been called again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from real_programs.pieces import (
    batches,
    bert_config,
    built,
    descend,
    integers,
    mlp,
    normal,
    served,
    transformer,
    weights,
)
from real_programs.record import Body, Setting, program


@program(calls=8, keeps=True)
def list_of_results(setting: Setting) -> Body:
    """Predictions of all batches in a list, read when all are there."""
    width = setting.pick(256, 16)
    call = setting.compile(built(setting, lambda: transformer(width, setting.pick(4, 1))).eval())
    inputs = batches(4, lambda generator: normal(setting, generator, 4, setting.pick(32, 4), width))

    return served(lambda i: call(inputs[i % 4]))


@program(calls=6, trains=True)
def two_calls_in_a_step(setting: Setting) -> Body:
    """A contrastive step: one compiled tower is called on both views, and both results go into the loss."""
    width = setting.pick(256, 16)
    model = built(setting, lambda: mlp(width, 4))
    call = setting.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    views = batches(3, lambda generator: [normal(setting, generator, setting.pick(64, 4), width) for _ in range(2)])

    def step(i: int) -> Any:
        left, right = views[i % 3]
        first, second = call(left), call(right)
        similar = nn.functional.normalize(first) @ nn.functional.normalize(second).t()
        return descend(nn.functional.cross_entropy(similar, torch.arange(len(left), device=setting.device)), optimizer)

    return Body(step, lambda: weights(model))


@program(calls=6, trains=True, keeps=True)
def soft_actor_critic(setting: Setting) -> Body:
    """A soft actor-critic update: five compiled networks, whose losses are kept for the log."""
    width, observed, acted, batch = setting.pick((256, 64, 16, 128), (16, 6, 2, 8))
    actor = built(setting, lambda: mlp(width, 2, observed, 2 * acted), seed=1)
    critics = [built(setting, lambda: mlp(width, 2, observed + acted, 1), seed=2 + index) for index in range(2)]
    targets = copy.deepcopy(critics)
    act = setting.compile(actor)
    judge = [setting.compile(critic) for critic in critics]
    judge_next = [setting.compile(target) for target in targets]
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-4)
    critic_optimizer = torch.optim.Adam([p for critic in critics for p in critic.parameters()], lr=1e-4)
    memory = batches(
        3,
        lambda generator: [
            normal(setting, generator, batch, size) for size in (observed, acted, 1, observed, acted, acted)
        ],
    )

    def sampled(state: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_spread = act(state).chunk(2, -1)
        spread = log_spread.clamp(-4, 1).exp()
        raw = mean + spread * noise
        density = -0.5 * noise.square() - log_spread.clamp(-4, 1) - torch.log1p(1e-4 - raw.tanh().square())
        return raw.tanh(), density.sum(-1, keepdim=True)

    def step(i: int) -> Any:
        state, action, reward, following, noise, next_noise = memory[i % 3]
        with torch.no_grad():
            next_action, next_density = sampled(following, next_noise)
            judged = torch.cat([following, next_action], -1)
            values = [judge_target(judged) for judge_target in judge_next]
            target = reward + 0.99 * (torch.min(*values) - 0.2 * next_density)
        taken = torch.cat([state, action], -1)
        found = [critic(taken) for critic in judge]
        critic_loss = sum(nn.functional.mse_loss(value, target) for value in found)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        new_action, density = sampled(state, noise)
        judged = torch.cat([state, new_action], -1)
        actor_loss = (0.2 * density - torch.min(*[critic(judged) for critic in judge])).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        with torch.no_grad():
            for target_critic, critic in zip(targets, critics, strict=True):
                for slow, fast in zip(target_critic.parameters(), critic.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        return critic_loss.detach(), actor_loss.detach(), [value.detach() for value in found]

    return Body(step, lambda: weights(actor))


@program(calls=4, trains=True)
def bert_gradient_accumulation(setting: Setting) -> Body:
    """Hugging Face BERT: four micro-batches of a step, whose losses are kept and averaged at its end."""
    from transformers import BertForSequenceClassification

    config = bert_config(setting, num_labels=3)
    model = built(setting, lambda: BertForSequenceClassification(config))
    call = setting.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = batches(
        8,
        lambda generator: {
            "input_ids": integers(setting, generator, config.vocab_size, 4, setting.pick(32, 8)),
            "labels": integers(setting, generator, 3, 4),
        },
    )

    def step(i: int) -> Any:
        outputs = []
        for micro in range(4):
            output = call(**data[(4 * i + micro) % len(data)])
            (output.loss / 4).backward()
            outputs.append(output)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([output.loss.detach() for output in outputs]).mean(), [each.logits for each in outputs]

    return Body(step)


@program(calls=4, trains=True)
def validation_loop(setting: Setting) -> Body:
    """A training step, then a validation epoch that collects losses and predictions and reads them at its end."""
    width, classes = setting.pick(256, 16), 10
    model = built(setting, lambda: mlp(width, 4, width, classes))
    call = setting.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = batches(
        5,
        lambda generator: (
            normal(setting, generator, setting.pick(64, 4), width),
            integers(setting, generator, classes, setting.pick(64, 4)),
        ),
    )

    def step(i: int) -> Any:
        model.train()
        x, y = data[i % len(data)]
        loss = descend(nn.functional.cross_entropy(call(x), y), optimizer)
        model.eval()
        collected = []
        with torch.no_grad():
            for x, y in data:
                logits = call(x)
                collected.append({"loss": nn.functional.cross_entropy(logits, y), "logits": logits})
        return loss, torch.stack([each["loss"] for each in collected]), [each["logits"] for each in collected]

    return Body(step)


@program(calls=8, trains=True, keeps=True)
def compiled_sgd_step(setting: Setting) -> Body:
    """Loss and optimizer's step compiled, as in the recipe of PyTorch's tutorials; the losses are kept."""
    width = setting.pick(256, 16)
    model = built(setting, lambda: mlp(width, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    data = batches(3, lambda generator: normal(setting, generator, setting.pick(64, 4), width))

    @setting.compile
    def compute_loss(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), x)

    @setting.compile
    def update() -> None:
        optimizer.step()

    def step(i: int) -> Any:
        loss = compute_loss(data[i % 3])
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return Body(step, lambda: weights(model))


@program(calls=6)
def hidden_state_fed_back(setting: Setting) -> Body:
    """A recurrent cell called once per time step with the state it returned; the outputs are stacked at the end."""
    width, batch = setting.pick((256, 32), (16, 2))
    cell = built(setting, lambda: nn.LSTMCell(width, width)).eval()
    call = setting.compile(cell)
    data = batches(3, lambda generator: normal(setting, generator, setting.pick(16, 3), batch, width))

    def step(i: int) -> Any:
        state = (torch.zeros(batch, width, device=setting.device), torch.zeros(batch, width, device=setting.device))
        outputs = []
        for x in data[i % 3]:
            state = call(x, state)
            outputs.append(state[0])
        return torch.stack(outputs)

    return served(step)


@program(calls=6, trains=True)
def teacher_and_student(setting: Setting) -> Body:
    """Distillation: the teacher's result is read after the student's forward and in its backward."""
    width = setting.pick(256, 16)
    teacher = built(setting, lambda: mlp(width, 4), seed=1).eval()
    student = built(setting, lambda: mlp(width, 2), seed=2)
    teach, learn = setting.compile(teacher), setting.compile(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
    data = batches(3, lambda generator: normal(setting, generator, setting.pick(64, 4), width))

    def step(i: int) -> Any:
        x = data[i % 3]
        with torch.no_grad():
            wanted = teach(x)
        given = learn(x)
        loss = nn.functional.kl_div(given.log_softmax(-1), wanted.log_softmax(-1), log_target=True)
        descend(loss, optimizer)
        return loss.detach(), wanted

    return Body(step, lambda: weights(student))
