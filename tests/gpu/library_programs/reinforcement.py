"""Reinforcement learning, in the manner of CleanRL and PyTorch's tutorials."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from step_parts import Program
from torch import nn

from library_programs.record import CALLS, capturable, descend, many, on_the_device, program, state_of, variant


class ActorCritic(nn.Module):
    def __init__(self, obs: int = 8, actions: int = 4, width: int = 32) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, 1))
        self.actor = nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, actions))

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None):
        probs = torch.distributions.Categorical(logits=self.actor(x), validate_args=False)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def gae(rewards, values, dones, next_value, next_done, gamma=0.99, lam=0.95):
    advantages = torch.zeros_like(rewards)
    lastgaelam = 0
    steps = rewards.shape[0]
    for t in reversed(range(steps)):
        if t == steps - 1:
            nextnonterminal = 1.0 - next_done
            nextvalues = next_value
        else:
            nextnonterminal = 1.0 - dones[t + 1]
            nextvalues = values[t + 1]
        delta = rewards[t] + gamma * nextvalues * nextnonterminal - values[t]
        advantages[t] = lastgaelam = delta + gamma * lam * nextnonterminal * lastgaelam
    return advantages, advantages + values


def rollouts(g):
    steps, envs = 8, 4
    return [
        {
            "obs": torch.randn(steps, envs, 8, generator=g),
            "actions": torch.randint(4, (steps, envs), generator=g),
            "logprobs": -torch.rand(steps, envs, generator=g) - 0.9,
            "rewards": torch.randn(steps, envs, generator=g),
            "dones": (torch.rand(steps, envs, generator=g) > 0.8).float(),
            "next_obs": torch.randn(envs, 8, generator=g),
            "next_done": (torch.rand(envs, generator=g) > 0.8).float(),
        }
    ]


@program
def ppo_of_cleanrl_with_annealed_rate(device: str) -> Program:
    """CleanRL: advantages in the step, two epochs of two minibatches by randperm on the device."""
    agent = ActorCritic().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5, **on_the_device(device))

    def update(data):
        with torch.no_grad():
            values = agent.critic(data["obs"]).squeeze(-1)
            next_value = agent.critic(data["next_obs"]).reshape(-1)
            advantages, returns = gae(data["rewards"], values, data["dones"], next_value, data["next_done"])
        b_obs = data["obs"].reshape(-1, 8)
        b_actions, b_logprobs = data["actions"].reshape(-1), data["logprobs"].reshape(-1)
        b_adv, b_ret, b_val = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)
        clipfracs = []
        for _ in range(2):
            order = torch.randperm(b_obs.shape[0], device=b_obs.device)
            for start in range(0, b_obs.shape[0], 16):
                mb = order[start : start + 16]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
                logratio = newlogprob - b_logprobs[mb]
                ratio = logratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfracs += [((ratio - 1.0).abs() > 0.2).float().mean()]
                mb_adv = b_adv[mb]
                mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
                pg_loss = torch.max(-mb_adv * ratio, -mb_adv * torch.clamp(ratio, 0.8, 1.2)).mean()
                newvalue = newvalue.view(-1)
                v_clipped = b_val[mb] + torch.clamp(newvalue - b_val[mb], -0.2, 0.2)
                v_loss = 0.5 * torch.max((newvalue - b_ret[mb]) ** 2, (v_clipped - b_ret[mb]) ** 2).mean()
                entropy_loss = entropy.mean()
                loss = pg_loss - 0.01 * entropy_loss + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        return {
            "loss": loss.detach(),
            "kl": approx_kl,
            "clipfrac": torch.stack(clipfracs).mean(),
            "explained": 1 - (b_ret - b_val).var() / b_ret.var(),
        }

    def between(index: int) -> None:
        optimizer.param_groups[0]["lr"] = (1.0 - (index + 1) / CALLS) * 2.5e-4 + 1e-6

    return Program(update, many(rollouts, device), lambda: state_of(agent, optimizer), between)


@program
def a2c_with_entropy_and_sampled_actions(device: str) -> Program:
    agent = ActorCritic().to(device)
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=7e-4, alpha=0.99, eps=1e-5, **capturable(device))

    def update(data):
        obs = data["obs"].flatten(0, 1)
        action, logprob, entropy, value = agent.get_action_and_value(obs)
        values = value.view(8, 4)
        with torch.no_grad():
            rewards = data["rewards"] + 0.1 * action.view(8, 4)
            R = agent.critic(data["next_obs"]).squeeze(-1) * (1 - data["next_done"])
            returns = []
            for t in reversed(range(8)):
                R = rewards[t] + 0.99 * R * (1 - data["dones"][t])
                returns.insert(0, R)
            returns = torch.stack(returns)
        advantage = returns - values
        policy_loss = -(logprob.view(8, 4) * advantage.detach()).mean()
        value_loss = advantage.pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * entropy.mean()
        descend(loss, optimizer, clip=0.5)
        return {"policy": policy_loss.detach(), "value": value_loss.detach(), "action": action}

    return Program(update, many(rollouts, device), lambda: state_of(agent, optimizer))


def transitions(g):
    return [
        torch.randn(16, 8, generator=g),
        torch.randint(4, (16, 1), generator=g),
        torch.randn(16, generator=g),
        torch.randn(16, 8, generator=g),
        torch.rand(16, generator=g) > 0.2,
    ]


@program
def dqn_of_the_tutorial_with_soft_target(device: str) -> Program:
    """The tutorial's optimize_model; the mask of final states by where, and the soft update by load_state_dict."""
    policy_net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    target_net = copy.deepcopy(policy_net)
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True, **on_the_device(device))
    criterion = nn.SmoothL1Loss()

    def optimize_model(state, action, reward, next_state, alive):
        values = policy_net(state).gather(1, action)
        with torch.no_grad():
            next_values = torch.where(alive, target_net(next_state).max(1).values, 0.0)
        expected = next_values * 0.99 + reward
        loss = criterion(values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        target_state = target_net.state_dict()
        policy_state = policy_net.state_dict()
        for key in policy_state:
            target_state[key] = policy_state[key] * 0.005 + target_state[key] * 0.995
        target_net.load_state_dict(target_state)
        return loss

    return Program(optimize_model, many(transitions, device), lambda: state_of(policy_net, target_net, optimizer))


@program
def double_dqn_prioritised_with_hard_target_between(device: str) -> Program:
    q = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3, fused=True)
    priorities = torch.ones(64, device=device)

    def train(state, action, reward, next_state, alive, where):
        weights = (64 * priorities[where] / priorities.sum()).pow(-0.4)
        weights = weights / weights.max()
        with torch.no_grad():
            best = q(next_state).argmax(1, keepdim=True)
            goal = reward + 0.99 * alive * target(next_state).gather(1, best).squeeze(1)
        td = goal - q(state).gather(1, action).squeeze(1)
        loss = (weights * F.huber_loss(td, torch.zeros_like(td), reduction="none")).mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        priorities[where] = td.detach().abs() + 1e-6
        return loss.detach(), td.detach()

    def between(index: int) -> None:
        if index % 5 == 4:
            target.load_state_dict(q.state_dict())

    data = many(lambda g: [*transitions(g), torch.randperm(64, generator=g)[:16]], device)
    return Program(train, data, lambda: [*state_of(q, target, optimizer), priorities], between)


class SoftActor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.mean, self.log_std = nn.Linear(32, 2), nn.Linear(32, 2)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("bias", torch.tensor(0.5))

    def get_action(self, x):
        h = self.body(x)
        mean, log_std = self.mean(h), torch.tanh(self.log_std(h))
        log_std = -5 + 0.5 * 7 * (log_std + 1)
        normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.scale + self.bias, log_prob.sum(1, keepdim=True)


def soft_actor_critic(device: str) -> Program:
    actor = SoftActor().to(device)

    def critic():
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)

    qf1, qf2 = critic(), critic()
    qf1_target, qf2_target = copy.deepcopy(qf1), copy.deepcopy(qf2)
    q_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-3, fused=True)
    actor_optimizer = torch.optim.Adam(list(actor.parameters()), lr=3e-4, fused=True)
    log_alpha = torch.zeros(1, requires_grad=True, device=device)
    a_optimizer = torch.optim.Adam([log_alpha], lr=1e-3, fused=True)

    def update(state, action, reward, next_state, alive):
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_pi = actor.get_action(next_state)
            joined = torch.cat([next_state, next_action], 1)
            low = torch.min(qf1_target(joined), qf2_target(joined)) - alpha * next_log_pi
            goal = reward + alive.float() * 0.99 * low.view(-1)
        joined = torch.cat([state, action], 1)
        q1, q2 = qf1(joined).view(-1), qf2(joined).view(-1)
        qf_loss = F.mse_loss(q1, goal) + F.mse_loss(q2, goal)
        descend(qf_loss, q_optimizer)
        pi, log_pi = actor.get_action(state)
        joined = torch.cat([state, pi], 1)
        actor_loss = ((alpha * log_pi) - torch.min(qf1(joined), qf2(joined))).mean()
        descend(actor_loss, actor_optimizer)
        with torch.no_grad():
            _, log_pi = actor.get_action(state)
        alpha_loss = (-log_alpha.exp() * (log_pi - 2.0)).mean()
        descend(alpha_loss, a_optimizer)
        for net, net_target in ((qf1, qf1_target), (qf2, qf2_target)):
            for param, target_param in zip(net.parameters(), net_target.parameters(), strict=False):
                target_param.data.copy_(0.005 * param.data + 0.995 * target_param.data)
        return {"qf": qf_loss.detach(), "actor": actor_loss.detach(), "alpha": alpha_loss.detach()}

    data = many(lambda g: [(t := transitions(g))[0], torch.randn(16, 2, generator=g), *t[2:]], device)
    parts = (actor, qf1, qf2, qf1_target, qf2_target, q_optimizer, actor_optimizer, a_optimizer, log_alpha)
    return Program(update, data, lambda: state_of(*parts))


variant("sac_with_three_optimizers_and_tuned_temperature", soft_actor_critic)
