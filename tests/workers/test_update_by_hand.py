"""Two optimizer steps of FlowGRPO with KL, AdamW and gradient clipping, written out in float64 from the papers.

The oracle uses diffusers' plain transformer and scheduler, peft, and torch.optim; nothing of ours but the stored
trajectories that both sides are given.
"""

import math

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from engine_cases import (
    NOISE,
    OPTIM,
    SIZE,
    STEPS,
    add_reference,
    loss_function,
    make_engine,
    model_config,
    moved,
    part,
    roll_out,
    update,
    weights,
)
from peft import LoraConfig
from tiny_models import tiny_checkpoint

KL, CLIP = 0.5, 0.025
GUIDANCE = 4.0


class ByHand:
    """Flow-GRPO on a plain float64 copy of the transformer."""

    def __init__(self, lora: dict[str, torch.Tensor] | None, targets: list[str], cfg: bool):
        path = tiny_checkpoint()
        self.cfg = cfg
        self.model = QwenImageTransformer2DModel.from_pretrained(path, subfolder="transformer").double()
        self.reference = QwenImageTransformer2DModel.from_pretrained(path, subfolder="transformer").double()
        if lora is not None:
            self.model.requires_grad_(False)
            self.model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets))
            self.model.double()
            for name, parameter in self.parameters().items():
                parameter.data.copy_(lora[name])
        self.optimizer = torch.optim.AdamW(
            self.parameters().values(),
            lr=OPTIM["lr"],
            betas=(0.9, 0.999),
            eps=OPTIM["eps"],
            weight_decay=OPTIM["weight_decay"],
        )
        pipe = QwenImagePipeline.from_pretrained(path, transformer=None, text_encoder=None, vae=None)
        scheduler = pipe.scheduler
        tokens = (SIZE // 16) ** 2  # 8 pixels a latent pixel, 2 x 2 of these a token
        mu = calculate_shift(
            tokens,
            scheduler.config.base_image_seq_len,
            scheduler.config.max_image_seq_len,
            scheduler.config.base_shift,
            scheduler.config.max_shift,
        )
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / STEPS, STEPS), mu=mu)
        self.sigmas = scheduler.sigmas.double()
        self.grid = [[(1, SIZE // 16, SIZE // 16)]]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def velocity(self, model, x, sigma, data, row):
        """One sample, its own text without padding; true CFG keeps the norm of the conditional half."""

        def predict(prefix):
            length = int(data[f"{prefix}prompt_embeds_mask"][row].sum())
            return model(
                hidden_states=x[None],
                timestep=sigma[None],
                img_shapes=self.grid,
                encoder_hidden_states=data[f"{prefix}prompt_embeds"][row, :length].double()[None],
                return_dict=False,
            )[0][0]

        cond = predict("")
        if not self.cfg:
            return cond
        with torch.no_grad():
            uncond = predict("negative_")
        v = uncond + GUIDANCE * (cond - uncond)
        return v * cond.norm(dim=-1, keepdim=True) / v.norm(dim=-1, keepdim=True)

    def step(self, model, data, row, i):
        """Mean of the reverse SDE step i, its diffusion coefficient s, and the log-probability of the stored x'."""
        x, x_next = (data["all_latents"][row, j].double() for j in (i, i + 1))
        sigma, sigma_next = self.sigmas[i], self.sigmas[i + 1]
        dt = sigma_next - sigma
        s = NOISE * torch.sqrt(sigma / (1 - (self.sigmas[1] if sigma == 1 else sigma)))
        v = self.velocity(model, x, sigma, data, row)
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        std = s * torch.sqrt(-dt)
        log_prob = -((x_next - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
        return mean, s, log_prob.mean()

    def train(self, data) -> tuple[float, float]:
        """One optimizer step; the share of clipped ratios and the KL."""
        losses, kls, clipped = [], [], []
        for row in range(len(data["advantages"])):
            for i in range(STEPS - 1):
                mean, s, log_prob = self.step(self.model, data, row, i)
                with torch.no_grad():
                    reference_mean, _, _ = self.step(self.reference, data, row, i)
                advantage = data["advantages"][row, i].double().clamp(-5, 5)
                ratio = torch.exp(log_prob - data["old_log_probs"][row, i].double())
                losses.append(torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)))
                kls.append(((mean - reference_mean) ** 2).mean() / (2 * s**2))
                clipped.append(float(abs(ratio.item() - 1) > CLIP))
        kl = torch.stack(kls).mean()
        self.optimizer.zero_grad()
        (torch.stack(losses).mean() + KL * kl).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters().values(), OPTIM["clip_grad"])
        self.optimizer.step()
        return sum(clipped) / len(clipped), kl.item()


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_two_steps_equal_those_in_float64(lora, cfg):
    engine = make_engine(model_config(tiny_checkpoint(), cfg=cfg, lora=lora))
    engine.keep_reference()
    data = roll_out(engine)
    start = weights(engine)
    hand = ByHand(start if lora else None, engine.adapter.lora_target_modules, cfg)
    for row in range(len(data["advantages"])):
        for i in range(STEPS - 1):
            with torch.no_grad():
                log_prob = hand.step(hand.model, data, row, i)[2].item()
            assert log_prob == pytest.approx(data["old_log_probs"][row, i].item(), abs=2e-6)

    add_reference(engine, data)
    metrics = update(engine, data, loss_function(kl=KL, clip=CLIP))
    by_hand = [hand.train(data) for _ in range(2)]

    for ours, (clipfrac, kl) in zip(metrics, by_hand, strict=True):
        assert ours["pg_clipfrac"] == pytest.approx(clipfrac, abs=1e-6)
        assert ours["kl_loss"] == pytest.approx(kl, rel=1e-4, abs=1e-9)
    assert 0 < by_hand[1][0] < 1 and by_hand[1][1] > 0, "the second step has to see clipping and KL"
    assert metrics[0]["grad_norm"] > OPTIM["clip_grad"], "the clip has to bite"
    ours, theirs = weights(engine), hand.parameters()
    assert ours.keys() == theirs.keys() and moved(ours, start) > 5e-4
    for name in ours:
        torch.testing.assert_close(ours[name].double(), theirs[name].data, atol=1e-5, rtol=0)


def test_a_part_of_the_batch_is_not_the_whole(tmp_path):
    """The comparison above can fail: an update on half of the batch is another one."""
    updates = []
    for rows in (slice(None), slice(0, 2)):
        engine = make_engine(model_config(tiny_checkpoint()))
        update(engine, part(roll_out(engine), rows), loss_function())
        updates.append(weights(engine))
    assert moved(*updates) > 1e-4
