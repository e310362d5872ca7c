"""Reverse steps against the formulas of the papers, written out literally in float64."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler, get_step, register_step
from verl_omni.pipelines.schedulers.flow_match_sde import of_steps, pulls
from verl_omni.pipelines.schedulers.steps import kl_std

STEPS = ["sde", "cps", "dance_sde"]
# The scheduler configs of real checkpoints: SD3, Qwen-Image (dynamic shift stretched to a terminal σ), FLUX.
QWEN_IMAGE = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
CONFIGS = {
    "plain": ({"shift": 1.0}, {}),
    "sd3": ({"shift": 3.0}, {}),
    "qwen_image": (QWEN_IMAGE, {"mu": 0.7, "sigmas": [1 - i / 10 * 0.9 for i in range(10)]}),
    "flux": ({"use_dynamic_shifting": True}, {"mu": 1.15}),
}


def scheduler(name="sd3", steps=10, cls=FlowMatchSDEDiscreteScheduler):
    config, arguments = CONFIGS[name]
    made = cls(**config)
    made.set_timesteps(**({"num_inference_steps": steps} | arguments))
    return made


def latents(batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 4, 6, 2, generator=generator) for _ in range(2)]


def oracle(kind, x, v, sigma, sigma_next, a, second_sigma):
    """(mean, full standard deviation, log-prob of x'): float64, in the papers' own terms."""
    dt = sigma_next - sigma
    x0, eps = x - sigma * v, x + (1 - sigma) * v
    if kind == "sde":
        s = a * math.sqrt(sigma / (1 - (second_sigma if sigma == 1 else sigma)))
        mean = x * (1 + s**2 * dt / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        std = s * math.sqrt(-dt)
    elif kind == "cps":
        std = sigma_next * math.sin(a * math.pi / 2)
        mean = (1 - sigma_next) * x0 + math.sqrt(sigma_next**2 - std**2) * eps
        return mean, std, lambda x_next: -((x_next - mean) ** 2)
    else:
        score = -(x - (1 - sigma) * x0) / sigma**2
        mean = x + dt * v - 0.5 * a**2 * score * dt
        std = a * math.sqrt(-dt)
    normal = torch.distributions.Normal(mean, std)
    return mean, std, normal.log_prob


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", STEPS)
def test_step_equals_the_papers_formula(kind, config):
    sched, (x, v) = scheduler(config), latents()
    sigmas = sched.sigmas.double().tolist()
    for i, t in enumerate(sched.timesteps[:-1]):
        mean, std, log_prob = oracle(kind, x.double(), v.double(), sigmas[i], sigmas[i + 1], 0.6, sigmas[1])
        got = sched.sample_previous_step(
            x, v, t, generator=torch.Generator().manual_seed(i), noise_level=0.6, sde_type=kind
        )
        z = torch.randn(x.shape, generator=torch.Generator().manual_seed(i))
        torch.testing.assert_close(got[2].double(), mean, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(got[0].double(), mean + std * z, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(got[1].double(), log_prob(mean + std * z).mean((1, 2, 3)), rtol=1e-4, atol=1e-5)
        # one meaning for every step type: the noise added is std_dev_t·√(-dt)
        assert got[3].shape == (3, 1, 1, 1)
        sqrt_dt = sched.sqrt_neg_dt(t)
        torch.testing.assert_close(got[3].flatten() * sqrt_dt, torch.full((3,), std), rtol=1e-5, atol=0)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", [*STEPS, "ode"])
def test_without_noise_every_step_is_diffusers_euler_step(kind, config):
    ours, theirs = scheduler(config), scheduler(config, cls=FlowMatchEulerDiscreteScheduler)
    assert torch.equal(ours.timesteps, theirs.timesteps) and torch.equal(ours.sigmas, theirs.sigmas)
    x, v = latents()
    for t in theirs.timesteps:
        expected = theirs.step(v, t, x, return_dict=False)[0]
        got, log_prob, mean, std_dev_t = ours.sample_previous_step(x, v, t, noise_level=0.0, sde_type=kind)
        assert torch.equal(got, expected) and torch.equal(mean, expected)
        assert not log_prob.any() and not std_dev_t.any()
        x = expected


def test_dance_sde_is_sde_with_a_constant_diffusion_coefficient():
    x, v = latents()
    sigma, sigma_next, eta = torch.tensor([0.9, 0.5, 0.2]), torch.tensor([0.8, 0.3, 0.0]), 0.3
    # the noise level at which sde's s = a·√(σ/(1-σ)) is η
    level = eta * ((1 - sigma) / sigma).sqrt()
    dance, flow = get_step("dance_sde")(x, v, sigma, sigma_next, eta), get_step("sde")(x, v, sigma, sigma_next, level)
    torch.testing.assert_close(dance[0], flow[0])
    torch.testing.assert_close(dance[1], flow[1])
    assert torch.equal(dance[1].flatten(), torch.full((3,), eta))


def test_log_prob_of_the_mean_is_the_normaliser_alone():
    sched, (x, v) = scheduler(), latents()
    t = sched.timesteps[4]
    for kind in STEPS:
        _, _, mean, std_dev_t = sched.sample_previous_step(x, v, t, sde_type=kind)
        log_prob = sched.sample_previous_step(x, v, t, prev_sample=mean, sde_type=kind)[1]
        std = (std_dev_t.flatten() * sched.sqrt_neg_dt(t)).double()
        expected = torch.zeros(3).double() if kind == "cps" else -std.log() - math.log(math.sqrt(2 * math.pi))
        torch.testing.assert_close(log_prob.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", STEPS)
def test_a_stored_sample_has_the_same_log_prob_to_the_last_bit(kind):
    sched, (x, v) = scheduler("qwen_image"), latents()
    for t in sched.timesteps:
        taken = sched.sample_previous_step(x, v, t, torch.Generator().manual_seed(1), sde_type=kind)
        leaf = v.clone().requires_grad_()
        again = sched.sample_previous_step(x, leaf, t, prev_sample=taken[0], sde_type=kind)
        for before, after in zip(taken, again, strict=True):
            assert torch.equal(before, after)
        x = taken[0]


def test_no_gradient_flows_through_the_sample_that_was_taken():
    sched, (x, v) = scheduler(), latents()
    v.requires_grad_()
    prev_sample, log_prob, mean, _ = sched.sample_previous_step(x, v, sched.timesteps[3], torch.Generator())
    assert not prev_sample.requires_grad and mean.requires_grad
    (gradient,) = torch.autograd.grad(log_prob.sum(), v)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("kind", STEPS)
def test_gradient_of_the_log_prob_equals_that_of_the_formula(kind):
    sched, (x, v) = scheduler(), latents()
    t, i = sched.timesteps[4], 4
    stored = sched.sample_previous_step(x, v, t, torch.Generator(), sde_type=kind)[0]
    mine = v.clone().requires_grad_()
    sched.sample_previous_step(x, mine, t, prev_sample=stored, sde_type=kind)[1].sum().backward()
    exact = v.double().requires_grad_()
    sigmas = sched.sigmas.double().tolist()
    _, _, log_prob = oracle(kind, x.double(), exact, sigmas[i], sigmas[i + 1], 0.7, sigmas[1])
    log_prob(stored.double()).mean((1, 2, 3)).sum().backward()
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", STEPS)
def test_last_step_is_finite_and_cps_adds_no_noise_there(kind):
    sched, (x, v) = scheduler(), latents()
    v.requires_grad_()
    prev_sample, log_prob, mean, std_dev_t = sched.sample_previous_step(x, v, sched.timesteps[-1], sde_type=kind)
    assert all(torch.isfinite(out).all() for out in (prev_sample, log_prob, mean, std_dev_t))
    (gradient,) = torch.autograd.grad(log_prob.sum(), v)
    assert torch.isfinite(gradient).all()
    assert torch.equal(prev_sample, mean.detach()) == (kind == "cps")


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_that_starts_at_zero_noise_stands_still(kind):
    """Z-Image's schedule ends with a step from σ = 0 to σ' = 0."""
    sched, (x, v) = FlowMatchSDEDiscreteScheduler(), latents()
    sched.set_timesteps(sigmas=[1.0, 0.5, 0.0])
    outs = sched.sample_previous_step(x, v, sched.timesteps[-1], sde_type=kind)
    assert torch.equal(outs[0], x) and not outs[1].any()


@pytest.mark.parametrize("kind", STEPS)
def test_mixed_timesteps_and_noise_levels_equal_the_samples_one_by_one(kind):
    sched, (x, v) = scheduler(), latents(batch=4)
    index, levels = [0, 7, 3, 8], torch.tensor([0.7, 0.0, 0.3, 0.9])
    stored = sched.sample_previous_step(x, v, sched.timesteps[index], None, levels, sde_type=kind)[0]
    v.requires_grad_()
    batch = sched.sample_previous_step(
        x, v, sched.timesteps[index], noise_level=levels, prev_sample=stored, sde_type=kind
    )
    for row, (i, level) in enumerate(zip(index, levels.tolist(), strict=True)):
        one = slice(row, row + 1)
        alone = sched.sample_previous_step(
            x[one], v[one], sched.timesteps[i].item(), noise_level=level, prev_sample=stored[one], sde_type=kind
        )
        for together, single in zip(batch, alone, strict=True):
            torch.testing.assert_close(together[one], single, rtol=1e-6, atol=1e-7)
    # outside its window a sample takes the ODE step: no likelihood, no NaN, no gradient
    euler = x[1] + (sched.sigmas[8] - sched.sigmas[7]) * v[1]
    assert torch.equal(stored[1], euler) and batch[1][1] == 0
    (gradient,) = torch.autograd.grad(batch[1].sum(), v)
    assert torch.isfinite(gradient).all() and not gradient[1].any() and gradient[0].any()


def test_noise_of_a_sample_comes_from_its_own_generator_only():
    sched, (x, v) = scheduler(), latents(batch=3)

    def walk(rows, levels):
        sample, generators = x[rows], [torch.Generator().manual_seed(100 + row) for row in rows]
        for i, t in enumerate(sched.timesteps):
            level = torch.tensor([levels[row] if i in range(row, row + 3) else 0.0 for row in rows])
            sample = sched.sample_previous_step(sample, v[rows], t, generators, level)[0]
        return sample

    together, levels = walk([0, 1, 2], [0.7, 0.7, 0.7]), [0.7, 0.7, 0.7]
    for row in range(3):
        # also when the others are elsewhere, or when nobody in the batch draws at a step
        assert torch.equal(walk([row], levels)[0], together[row])
    assert torch.equal(walk([2, 0], levels), together[[2, 0]])


def test_float_and_tensor_noise_level_agree_and_half_precision_is_lifted():
    sched, (x, v) = scheduler(), latents()
    t = sched.timesteps[2]
    a = sched.sample_previous_step(x, v, t, torch.Generator().manual_seed(3), 0.5)
    b = sched.sample_previous_step(x, v, t.expand(3), torch.Generator().manual_seed(3), torch.full((3,), 0.5))
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    half = sched.sample_previous_step(x.bfloat16(), v.bfloat16(), t)
    assert all(out.dtype == torch.float32 for out in half)


def test_named_output():
    sched, (x, v) = scheduler(), latents()
    out = sched.sample_previous_step(x, v, sched.timesteps[0], return_dict=True)
    assert out.prev_sample is out[0] and out.log_prob is out[1] and out.prev_sample_mean is out[2]
    assert out.std_dev_t is out[3]


def test_sigma_one_up_to_rounding_stays_finite():
    x, v = latents(batch=1)
    exact = get_step("sde")(x, v, torch.tensor([1.0]), torch.tensor([0.9]), 0.7)
    rounded = get_step("sde")(x, v, torch.tensor([1.0 - 6e-8]), torch.tensor([0.9]), 0.7)
    torch.testing.assert_close(exact, rounded, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("timestep", "message"),
    [
        (501.5, "501.5"),
        (torch.tensor([1000.0, 3.0, 1000.0]), r"\[3.0\] are not in the schedule"),
        (torch.tensor([720.3456]).bfloat16().float(), "scheduler.timesteps, in float32"),
    ],
)
def test_unknown_timestep_is_named(timestep, message):
    sched, (x, v) = scheduler(), latents()
    with pytest.raises(ValueError, match=message):
        sched.sample_previous_step(x, v, timestep)


def test_misuse_gets_a_clear_line():
    sched, (x, v) = scheduler(), latents()
    with pytest.raises(ValueError, match='unknown sde_type "cpss": did you mean "cps"'):
        sched.sample_previous_step(x, v, sched.timesteps[0], sde_type="cpss")
    with pytest.raises(ValueError, match="2 generators for a batch of 3"):
        sched.sample_previous_step(x, v, sched.timesteps[0], [torch.Generator()] * 2)
    with pytest.raises(RuntimeError, match="call set_timesteps first"):
        FlowMatchSDEDiscreteScheduler().sample_previous_step(x, v, 1000.0)
    with pytest.raises(ValueError, match="decrease strictly"):
        FlowMatchSDEDiscreteScheduler().set_timesteps(sigmas=[1.0, 0.5, 0.5])


def test_a_registered_step_works_by_name_and_a_name_is_taken_once():
    @register_step("test_half_euler")
    def half_euler(x, v, sigma, sigma_next, noise_level):
        return x + 0.5 * (sigma_next - sigma) * v, noise_level * torch.ones_like(sigma)

    sched, (x, v) = scheduler(), latents()
    _, _, mean, std_dev_t = sched.sample_previous_step(x, v, sched.timesteps[1], sde_type="test_half_euler")
    torch.testing.assert_close(mean, x + 0.5 * (sched.sigmas[2] - sched.sigmas[1]) * v)
    assert torch.equal(std_dev_t, torch.full((3, 1, 1, 1), 0.7))
    # its KL is that of two Gaussians, unless it says otherwise
    root = sched.sqrt_neg_dt(sched.timesteps[:3])
    assert torch.equal(kl_std("test_half_euler", std_dev_t, root), std_dev_t * root[:, None, None, None])
    register_step("test_kl_without_dt", kl_with_dt=False)(half_euler.formula)
    assert torch.equal(kl_std("test_kl_without_dt", std_dev_t, root), std_dev_t)
    with pytest.raises(ValueError, match='"sde" is already registered by verl_omni.pipelines.schedulers.steps.sde'):
        register_step("sde")(half_euler.formula)


def test_config_of_a_checkpoint_is_read_and_written_like_the_parents(tmp_path):
    FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE).save_pretrained(tmp_path)
    ours = FlowMatchSDEDiscreteScheduler.from_pretrained(tmp_path)
    assert ours.config.shift_terminal == 0.02 and ours.config.use_dynamic_shifting


def closed_pull(kind, sigma, sigma_next, a, second_sigma):
    dt = sigma_next - sigma
    _, std, _ = oracle(kind, 0.0, 0.0, sigma, sigma_next, a, second_sigma)
    if kind == "cps":
        return 2 * std * (-dt + (1 - sigma) * (sigma_next - math.sqrt(sigma_next**2 - std**2)))
    s = std / math.sqrt(-dt)
    return math.sqrt(-dt) / s + s * math.sqrt(-dt) * (1 - sigma) / (2 * sigma)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_pulls_as_hard_as_its_log_prob_follows_the_velocity(kind, config):
    """In float64: the gradient over the noise that was drawn is the same number in every element, the closed one."""
    sched, (x, v) = scheduler(config), (t.double() for t in latents())
    sigmas, found = sched.sigmas.double().tolist(), pulls(sched, kind, 0.7).double()
    v, z = v.requires_grad_(), torch.randn(x.shape, dtype=torch.float64)
    for i, t in enumerate(sched.timesteps[:-1]):
        mean, std, log_prob = oracle(kind, x, v, sigmas[i], sigmas[i + 1], 0.7, sigmas[1])
        (slope,) = torch.autograd.grad(log_prob((mean + std * z).detach()).sum(), v)
        closed = closed_pull(kind, sigmas[i], sigmas[i + 1], 0.7, sigmas[1])
        torch.testing.assert_close((slope / z).abs(), torch.full_like(z, closed), rtol=1e-8, atol=0)
        assert found[i].item() == pytest.approx(closed, rel=2e-4), "float32: σ' - √(σ'² - s²) cancels"
        assert torch.equal(of_steps(sched, t.reshape(1), found), found[i : i + 1])


def test_parts_at_levels_of_their_own_step_as_they_would_alone():
    """Five entries of seven at the schedule's level, two below it, as by another shift."""
    parts, generator = (5, 2), torch.Generator().manual_seed(0)
    x, v, x_next = (torch.randn(3, sum(parts), 4, generator=generator) for _ in range(3))
    own = [scheduler(), scheduler()]
    own[1].sigmas = own[1].sigmas / (4 - 3 * own[1].sigmas)
    both, timesteps = scheduler(), own[0].timesteps[[0, 3, 7]]
    both.levels_at = lambda sigma: torch.stack([sigma, sigma / (4 - 3 * sigma)], 1).repeat_interleave(
        torch.tensor(parts), dim=1
    )
    for kind in STEPS:
        got = both.sample_previous_step(x, v, timesteps, prev_sample=x_next, sde_type=kind)
        pieces = [one.split(parts, dim=1) for one in (x, v, x_next)]
        alone = [
            own[i].sample_previous_step(pieces[0][i], pieces[1][i], timesteps, prev_sample=pieces[2][i], sde_type=kind)
            for i in range(2)
        ]
        assert torch.equal(got[2], torch.cat([one[2] for one in alone], dim=1)) and got[3].shape == (3, 7, 1)
        for i, part in enumerate(got[3].split(parts, dim=1)):
            assert torch.equal(part, alone[i][3].expand_as(part))
        torch.testing.assert_close(got[1], (5 * alone[0][1] + 2 * alone[1][1]) / 7)
        root = torch.cat([own[i].sqrt_neg_dt(timesteps)[:, None].expand(-1, parts[i]) for i in range(2)], dim=1)
        assert torch.equal(both.sqrt_neg_dt(timesteps), root)
        drawn = both.sample_previous_step(x, v, timesteps, [torch.Generator().manual_seed(i) for i in range(3)], 0.7)
        z = torch.stack([torch.randn(7, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)])
        torch.testing.assert_close(drawn[0], drawn[2] + drawn[3] * root[..., None] * z)
        pulled = [pulls(one, kind, 0.7)[:-1] for one in own]
        torch.testing.assert_close(pulls(both, kind, 0.7)[:-1], (5 * pulled[0] + 2 * pulled[1]) / 7)
