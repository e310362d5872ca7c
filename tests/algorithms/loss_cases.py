"""Random inputs for every loss, and its formula written out row by row in float64."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from verl_omni.algorithms.base import row_mean
from verl_omni.algorithms.crd import centred
from verl_omni.algorithms.forward_process import noised, predicted_clean
from verl_omni.config import DiffusionActorConfig, DiffusionLossConfig
from verl_omni.trainer.diffusion.diffusion_algos import get_diffusion_loss_fn

ROWS, SHAPE = 12, (3, 4, 2)


def actor_config(**loss: Any) -> DiffusionActorConfig:
    return DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(**loss))


@dataclass
class Case:
    """A loss under a config, with inputs; `leaves` are what the model gives and what carries the gradient."""

    loss: str
    config: DiffusionActorConfig
    model_output: dict[str, torch.Tensor]
    data: dict[str, torch.Tensor]
    leaves: tuple[str, ...]

    def run(self, rows: slice = slice(None)):
        model_output = {k: v[rows] for k, v in self.model_output.items()}
        data = {k: v[rows] for k, v in self.data.items()}
        loss_fn = get_diffusion_loss_fn(self.loss)
        loss_fn.validate_inputs(loss_name=self.loss, model_output=model_output, data=data)
        return loss_fn(config=self.config, model_output=model_output, data=data)

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        leaves = [self.model_output[k] for k in self.leaves]
        return list(torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True))


def policy_gradient_case(
    loss: str, seed: int = 0, weights: bool = False, spread: float = 0.5, shares: bool = False, **settings: Any
) -> Case:
    """Steps of different s and dt in one batch, ratios on both sides of the bounds, advantages beyond the clamp.

    With `shares`, of which the first and the last latents have other ones in a log-probability.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    old_mean = normal(ROWS, *SHAPE)
    old_log_prob = normal(ROWS)
    data = {
        "old_log_probs": old_log_prob,
        "advantages": 2 * normal(ROWS),
        "old_prev_sample_mean": old_mean,
        "sqrt_dt": 0.1 + torch.rand(ROWS, generator=g, dtype=torch.float64),
    }
    data["teacher_prev_sample_mean"] = old_mean + 0.1 * normal(ROWS, *SHAPE)
    data["step_pull"] = 0.05 + 0.9 * torch.rand(ROWS, generator=g, dtype=torch.float64)
    # of five steps, which are another sample's other ones
    data["schedule_pulls"] = 0.1 + 0.8 * torch.rand(ROWS, 5, generator=g, dtype=torch.float64)
    if shares:
        data["log_prob_weights"] = torch.tensor([[2.25, 0.75, 0.0]], dtype=torch.float64).expand(ROWS, -1)
    if weights:
        data["rollout_is_weights"] = (normal(ROWS).exp() * (normal(ROWS) > 0)).clamp(max=2)
    model_output = {
        "log_probs": (old_log_prob + spread * normal(ROWS)).requires_grad_(),
        "prev_sample_mean": (old_mean + 0.05 * spread * normal(ROWS, *SHAPE)).requires_grad_(),
        "std_dev_t": (0.2 + torch.rand(ROWS, generator=g, dtype=torch.float64)).reshape(ROWS, 1, 1, 1),
    }
    return Case(loss, actor_config(**settings), model_output, data, ("log_probs", "prev_sample_mean"))


def direct_preference_case(loss: str, seed: int = 0, **settings: Any) -> Case:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    clean, noise = normal(ROWS, *SHAPE), normal(ROWS // 2, *SHAPE).repeat_interleave(2, dim=0)
    velocity = noise - clean + 0.3 * normal(ROWS, *SHAPE)
    data = {
        "clean_latents": clean,
        "noise": noise,
        "sigma": torch.rand(ROWS // 2, generator=g, dtype=torch.float64).repeat_interleave(2),
        "advantages": 3 * normal(ROWS),
        "preference": torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64).repeat(ROWS // 4),
        "old_velocity": velocity + 0.1 * normal(ROWS, *SHAPE),
        "ref_velocity": velocity + 0.1 * normal(ROWS, *SHAPE),
        "ema_velocity": velocity + 0.1 * normal(ROWS, *SHAPE),
    }
    data["teacher_velocity"] = velocity.detach() + 0.1 * normal(ROWS, *SHAPE)
    case = Case(loss, actor_config(**settings), {"velocity": velocity.requires_grad_()}, data, ("velocity",))
    if loss == "draft":
        case.model_output["predicted_reward"] = quadratic_reward(case)
    if get_diffusion_loss_fn(loss).by_group:
        data |= grouped(case)
    return case


def quadratic_reward(case: Case) -> torch.Tensor:
    """Of the clean latents that the model predicts: minus their squared distance from 0.3, by the engine's formulas."""
    d, v = case.data, case.model_output["velocity"]
    x_t = noised(d["clean_latents"], d["noise"], d["sigma"])
    return -row_mean((predicted_clean(x_t, v, d["sigma"]) - 0.3) ** 2)


GROUPS = torch.tensor([0, 0, 1, 0, 2, 1, 1, 0, 2, 2, 2, 0])  # of sizes 5, 3 and 4, mixed


def grouped(case: Case) -> dict[str, torch.Tensor]:
    """What the trainer and the engine add for losses that look at whole groups; sums by the loss's own terms."""
    data, loss_fn = case.data, get_diffusion_loss_fn(case.loss)
    data["group_share"] = 1 / GROUPS.bincount()[GROUPS].double()
    if case.loss == "crd":
        temperature = loss_fn.settings(case.config).temperature
        data["centre"], data["targets"] = centred(data["advantages"].clamp(-5, 5), GROUPS, temperature)
    terms = loss_fn.group_terms(config=case.config, model_output=case.model_output, data=data).detach()
    return {"group_sums": torch.stack([terms[GROUPS == group].sum(dim=0) for group in GROUPS])}


# ---- the formulas, one row at a time ---------------------------------------------------------------------------------


def clipped(ratio, advantage, low, high, most=5.0):
    a = min(max(float(advantage), -most), most)
    return torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - low, 1 + high))


def flow_grpo_row(m, d, i, low, high, most=5.0):
    return clipped(torch.exp(m["log_probs"][i] - d["old_log_probs"][i]), d["advantages"][i], low, high, most)


def shared_mean(d, i, values):
    """Of a row's values, each of the first dimension with its share."""
    shares = d["log_prob_weights"][i].tolist() if "log_prob_weights" in d else [1] * len(values)
    return sum(share * part.mean() for share, part in zip(shares, values, strict=True)) / len(values)


def grpo_guard_row(m, d, i, low, high):
    sqrt_dt, s = float(d["sqrt_dt"][i]), float(m["std_dev_t"][i])
    c = sqrt_dt * s
    bias = shared_mean(d, i, (m["prev_sample_mean"][i] - d["old_prev_sample_mean"][i]) ** 2) / (2 * c * c)
    ratio = torch.exp((m["log_probs"][i] - d["old_log_probs"][i] + bias) * c)
    return clipped(ratio, d["advantages"][i], low, high) / sqrt_dt**2


def tempflow_row(m, d, i, low, high, c):
    noise = float(m["std_dev_t"][i]) * float(d["sqrt_dt"][i])
    return c * noise * flow_grpo_row(m, d, i, low, high)


def flash_row(m, d, i, low, high):
    w = [1 / pull for pull in d["schedule_pulls"][i].tolist()]
    return 1 / float(d["step_pull"][i]) / (sum(w) / len(w)) * flow_grpo_row(m, d, i, low, high)


def opd_row(m, d, i):
    drift = shared_mean(d, i, (m["prev_sample_mean"][i] - d["teacher_prev_sample_mean"][i]) ** 2)
    return drift / (2 * float(m["std_dev_t"][i]) ** 2 * float(d["sqrt_dt"][i]) ** 2)


def flow_dppo_row(m, d, i, tau):
    ratio = torch.exp(m["log_probs"][i] - d["old_log_probs"][i])
    a = min(max(float(d["advantages"][i]), -5), 5)
    drift = (m["prev_sample_mean"][i] - d["old_prev_sample_mean"][i]) ** 2
    kl = float(shared_mean(d, i, drift.detach() / (2 * m["std_dev_t"][i] ** 2 * d["sqrt_dt"][i] ** 2)))
    further = (ratio > 1 and a > 0) or (ratio < 1 and a < 0)
    return 0 * ratio if kl >= tau and further else -a * ratio


def dpo_pair(m, d, pair, beta):
    def gain(i):
        target = d["noise"][i] - d["clean_latents"][i]
        return ((m["velocity"][i] - target) ** 2).mean() - ((d["ref_velocity"][i] - target) ** 2).mean()

    rows = (2 * pair, 2 * pair + 1)
    winner, loser = rows if d["preference"][rows[0]] > 0 else rows[::-1]
    z = -0.5 * beta * (gain(winner) - gain(loser))
    return torch.log(1 + torch.exp(-z))


def nft_row(m, d, i, beta, c, lam):
    r = min(max(0.5 * float(d["advantages"][i]) / c + 0.5, 0), 1)
    t, x0, v, old = d["sigma"][i], d["clean_latents"][i], m["velocity"][i], d["old_velocity"][i]
    x_t = (1 - t) * x0 + t * d["noise"][i]

    def error(velocity):
        x0_hat = x_t - t * velocity
        w = max(float((x0_hat - x0).detach().abs().mean()), 1e-5)
        return ((x0_hat - x0) ** 2 / w).mean()

    policy = (r * error(beta * v + (1 - beta) * old) + (1 - r) * error((1 + beta) * old - beta * v)) / beta * c
    return policy + lam * ((v - d["ref_velocity"][i]) ** 2).mean()


def awm_row(m, d, i, weighting, low, high, kl=0.0, ema=0.0):
    t, target = d["sigma"][i], d["noise"][i] - d["clean_latents"][i]

    def log_prob(velocity):
        e = ((velocity - target) ** 2).mean()
        # the last as its authors write it: a power p, divided by p, and 0 where e is
        ghuber = -(torch.pow(e + 1e-10, 0.25) - torch.pow(torch.tensor(1e-10, dtype=e.dtype), 0.25)) * t / 0.25
        of = {"uniform": -e, "t": -t * e, "t2": -t * t * e, "huber": -t * (torch.sqrt(e + 1e-10) - 1e-5)}
        return {**of, "ghuber": ghuber}[weighting]

    v = m["velocity"][i]
    ratio = torch.exp(log_prob(v) - log_prob(d["old_velocity"][i]))
    anchors = kl * ((v - d["ref_velocity"][i]) ** 2).mean() + ema * ((v - d["ema_velocity"][i]) ** 2).mean()
    return clipped(ratio, d["advantages"][i], low, high) + anchors


def error_of(d, i, velocity):
    return ((velocity - (d["noise"][i] - d["clean_latents"][i])) ** 2).mean()


def dgpo_row(m, d, i, beta, clip, anchor="ref_velocity"):
    def a(j):
        return min(max(float(d["advantages"][j]), -5), 5)

    group = [j for j in range(ROWS) if GROUPS[j] == GROUPS[i]]
    gains = {j: error_of(d, j, m["velocity"][j]) - error_of(d, j, d[anchor][j]) for j in group}
    s = beta / len(group) * sum(a(j) * float(gain) for j, gain in gains.items())
    error = error_of(d, i, m["velocity"][i])
    ratio = float(torch.exp(error_of(d, i, d["old_velocity"][i]) - error))
    if (ratio > 1 + clip and a(i) > 0) or (ratio < 1 - clip and a(i) < 0):
        error = error.detach()
    return torch.sigmoid(torch.tensor(s, dtype=torch.float64)) * a(i) * error


def crd_row(m, d, i, beta, temperature=None):
    group = [j for j in range(ROWS) if GROUPS[j] == GROUPS[i]]
    a = {j: min(max(float(d["advantages"][j]), -5), 5) for j in group}
    r = {j: -(error_of(d, j, m["velocity"][j]) - error_of(d, j, d["old_velocity"][j])) for j in group}
    sides = []
    for sign in (0,) if temperature is None else (1, -1):
        e = {j: math.exp(sign * a[j] / (temperature or 1)) for j in group}
        w = {j: e[j] / sum(e.values()) for j in group}
        mean_r, mean_a = sum(w[j] * float(r[j]) for j in group), sum(w[j] * a[j] for j in group)
        sides.append((beta * (r[i] - mean_r) - (a[i] - mean_a)) ** 2)
    return sum(sides) / len(sides)


def draft_row(m, d, i, kl_beta):
    t, v = float(d["sigma"][i]), m["velocity"][i]
    predicted = (1 - t) * d["clean_latents"][i] + t * d["noise"][i] - t * v
    return ((predicted - 0.3) ** 2).mean() + kl_beta * ((v - d["ref_velocity"][i]) ** 2).mean()
