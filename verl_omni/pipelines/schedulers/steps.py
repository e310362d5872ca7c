"""One reverse step of flow matching, as pure float32 functions.

Notation of the papers: ``x_t = (1-σ)·x0 + σ·ε``, velocity ``v = ε - x0``, a step goes from σ to σ' < σ, and
``dt = σ' - σ``. The two end points that a velocity implies are ``x̂0 = x - σv`` and ``ε̂ = x + (1-σ)v``. In them each
stochastic step is the Euler step and a pull towards less predicted noise, which makes room for the fresh noise:

    μ = x + dt·v + κ·ε̂,    x' = μ + s·√(-dt)·z,    z ~ N(0, I)

with s = 0 and κ = 0, exactly the ODE, at noise level 0. Every step type returns s, the diffusion coefficient, as
``std_dev_t``, so that losses need not know which step made a sample. What a KL to the reference is measured in differs
from author to author: ``kl_std`` says it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_omni.algorithms.base import column, row_mean
from verl_omni.config.knob import Range
from verl_omni.utils.registry import Registry

Formula = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Density = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def gaussian(x_next: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Log-density of N(mean, std²), element by element."""
    return -((x_next - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))


def squared_distance(x_next: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """``-(x'-μ)²`` with neither ``2·std²`` nor a normaliser: the choice of the CPS paper (arXiv 2509.05952)."""
    return -((x_next - mean) ** 2)


@dataclass(frozen=True)
class Step:
    """A step type: how it moves (``formula``) and how likely it finds a move (``density``, element by element)."""

    name: str
    formula: Formula
    density: Density = gaussian
    #: whether its authors' KL divides by the whole variance s²·(-dt), which is exact, or by s² alone
    kl_with_dt: bool = True
    #: the noise levels that it is made for
    noise_levels: Range = Range(least=0)

    def __call__(
        self,
        x: torch.Tensor,
        v: torch.Tensor,
        sigma: torch.Tensor,
        sigma_next: torch.Tensor,
        noise_level: torch.Tensor | float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean of x', and ``std_dev_t`` of shape (B, 1, ..., 1). σ, σ' and noise level are (B,) or scalar.

        Where the N entries of x's second dimension have levels of their own, σ and σ' are (B, N), and ``std_dev_t`` is
        (B, N, 1, ..., 1).
        """
        columns = [_column(value, x) for value in (sigma, sigma_next, noise_level)]
        mean, std_dev_t = self.formula(x.float(), v.float(), *columns)
        return mean, std_dev_t.expand(columns[0].shape)

    def adds_noise(self, noise_level: float) -> bool:
        """Whether a step at this noise level, half way from noise to data, is stochastic at all."""
        here = torch.zeros(1)
        return bool((self(here, here, torch.tensor(0.5), torch.tensor(0.4), noise_level)[1] > 0).all())

    def pull(self, sigma: torch.Tensor, sigma_next: torch.Tensor, noise_level: float) -> torch.Tensor:
        """How steeply the log-probability of x' follows the velocity, where x' is one standard deviation of the noise
        from μ: |∂ log p/∂v| of one element, (K,) for K steps. It is the same for every x, for μ is linear in v.
        Of levels (K, N) the mean over N."""
        with torch.enable_grad():
            x = torch.zeros(sigma.reshape(len(sigma), -1).shape)
            velocity = torch.zeros_like(x, requires_grad=True)
            mean, std_dev_t = self(x, velocity, sigma, sigma_next, noise_level)
            std = std_dev_t * (_column(sigma, x) - _column(sigma_next, x)).sqrt()
            (slope,) = torch.autograd.grad(self.density(mean.detach() + std, mean, std).sum(), velocity)
        return slope.abs().mean(dim=1)

    def log_prob(
        self,
        x_next: torch.Tensor,
        mean: torch.Tensor,
        std_dev_t: torch.Tensor,
        sigma: torch.Tensor,
        sigma_next: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Log-probability of x' (not differentiated through), mean over all but the batch dimension: (B,).

        `weights` (N,), of mean 1, say how much each of the N entries of the first of these dimensions counts.
        Where a step adds no noise there is nothing to be likely: the log-probability is 0 and so is its gradient.
        """
        std = std_dev_t * (_column(sigma, mean) - _column(sigma_next, mean)).sqrt()
        noisy = std > 0
        density = self.density(x_next.detach().float(), mean, torch.where(noisy, std, 1.0))
        return torch.where(noisy.reshape(len(noisy), -1).any(dim=1), row_mean(density, weights), 0.0)


_STEPS: Registry[Step] = Registry("sde_type")


def register_step(
    name: str, density: Density = gaussian, kl_with_dt: bool = True, most_noise: float | None = None
) -> Callable[[Formula], Step]:
    """Make a step type out of a formula ``(x, v, sigma, sigma_next, noise_level) -> (mean, std_dev_t)``.

    The formula gets float32 tensors that broadcast against each other. ``std_dev_t`` is the diffusion coefficient: the
    noise added is ``std_dev_t·√(-dt)·z``. The name then works as ``actor_rollout_ref.rollout.algo.sde_type``. A KL to
    the reference is that of the two Gaussians, or, without ``kl_with_dt``, leaves dt out. A noise level above
    ``most_noise`` is refused.
    """

    def wrap(formula: Formula) -> Step:
        step = Step(name, formula, density, kl_with_dt, Range(least=0, most=most_noise))
        _STEPS.add(name, step, defined_by=formula)
        return step

    return wrap


def get_step(name: str) -> Step:
    """The step type registered under ``name``."""
    return _STEPS.get(name)


def step_names() -> list[str]:
    """Names of all registered step types."""
    return _STEPS.names()


def kl_std(sde_type: str, std_dev_t: torch.Tensor, sqrt_neg_dt: torch.Tensor) -> torch.Tensor:
    """What a KL to the reference is measured in, as the authors of the step have it: of the shape of ``std_dev_t``.

    A type that only an adapter's own scheduler knows has the exact one, the standard deviation of the noise added.
    """
    with_dt = get_step(sde_type).kl_with_dt if sde_type in _STEPS else True
    return std_dev_t * sqrt_neg_dt.reshape(-1, *std_dev_t.shape[1:]) if with_dt else std_dev_t


@register_step("ode")
def ode(x, v, sigma, sigma_next, noise_level):
    """The Euler step, whatever the noise level."""
    return x + (sigma_next - sigma) * v, torch.zeros_like(sigma)


@register_step("sde", kl_with_dt=False)
def sde(x, v, sigma, sigma_next, noise_level):
    """Flow-GRPO (arXiv 2505.05470): ``s = a·√(σ/(1-σ))``, ``κ = s²dt/(2σ) = a²dt/(2(1-σ))``."""
    # At the very first step σ = 1 (up to rounding) and s would be infinite: there the next σ stands in.
    below_one = torch.where(sigma > 1 - 1e-6, sigma_next, sigma)
    s = noise_level * (sigma / (1 - below_one)).sqrt()
    dt = sigma_next - sigma
    kappa = noise_level**2 * dt / (2 * (1 - below_one))
    return x + dt * v + kappa * (x + (1 - sigma) * v), s


@register_step("cps", density=squared_distance, most_noise=1)
def cps(x, v, sigma, sigma_next, noise_level):
    """Coefficients-preserving sampling (arXiv 2509.05952): ``(1-σ')x̂0 + √(σ'²-s²)ε̂``, noise ``s = σ'·sin(aπ/2)``.

    With the angle ``θ = aπ/2`` the root is ``σ'·cos θ``, hence ``κ = -σ'·(1 - cos θ)``.
    """
    theta = noise_level * (math.pi / 2)
    dt = sigma_next - sigma
    kappa = -sigma_next * (1 - theta.cos().abs())
    full_std = sigma_next * theta.sin().abs()
    std_dev_t = torch.where(dt < 0, full_std / (-dt).clamp_min(torch.finfo(dt.dtype).tiny).sqrt(), 0.0)
    return x + dt * v + kappa * (x + (1 - sigma) * v), std_dev_t


@register_step("dance_sde")
def dance_sde(x, v, sigma, sigma_next, noise_level):
    """DanceGRPO (arXiv 2505.07818): constant ``s = η``; ``score = -ε̂/σ``, ``κ·ε̂ = -½η²·score·dt``."""
    dt = sigma_next - sigma
    kappa = noise_level**2 * dt / (2 * sigma.clamp_min(torch.finfo(sigma.dtype).tiny))
    return x + dt * v + kappa * (x + (1 - sigma) * v), noise_level


def _column(value: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    """A number per sample, as float32 of shape (B, 1, ..., 1) on x's device; the host does not wait for it. Of (B, N),
    a number for each of the N entries of x's second dimension, (B, N, 1, ..., 1)."""
    value = torch.as_tensor(value, dtype=torch.float32).to(x.device, non_blocking=True)
    return column(value if value.ndim == 2 else value.reshape(-1).expand(x.shape[0]), x)
