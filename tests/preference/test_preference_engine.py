"""The engine's update against diffusers' own transformer and the written-out losses; and what must not change it."""

import pytest
import torch
from loss_cases import awm_row, dpo_pair, nft_row
from preference_cases import (
    LEVELS,
    LOSSES,
    actor_config,
    assert_same,
    loss_function,
    make_batch,
    make_engine,
    moved,
    update,
    weights,
)
from tiny_models import tiny_checkpoint

from verl_omni.algorithms.forward_process import anchor_policies

QWEN, SD3 = "QwenImagePipeline", "StableDiffusion3Pipeline"


def plain_velocity(architecture: str, transformer, x_t, sigma, data, row):
    """One sample through diffusers' transformer, in the words of its pipeline."""
    text = data["prompt_embeds"][row : row + 1]
    if architecture == SD3:
        return transformer(
            x_t[None],
            encoder_hidden_states=text,
            pooled_projections=data["pooled_prompt_embeds"][row : row + 1],
            timestep=sigma[None] * 1000,
        ).sample[0]
    real = data["prompt_embeds_mask"][row].bool()
    return transformer(
        x_t[None], encoder_hidden_states=text[:, real], timestep=sigma[None], img_shapes=[[(1, 2, 2)]]
    ).sample[0]


def load_transformer(architecture: str, state: dict[str, torch.Tensor] | None = None):
    import diffusers

    name = {QWEN: "QwenImageTransformer2DModel", SD3: "SD3Transformer2DModel"}[architecture]
    transformer = getattr(diffusers, name).from_pretrained(tiny_checkpoint(architecture), subfolder="transformer")
    if state is not None:
        transformer.load_state_dict(state, strict=False)  # buffers stay
    return transformer


def written_out(loss: str, m: dict, d: dict) -> torch.Tensor:
    rows = len(d["sigma"])
    if loss == "dpo":
        return torch.stack([dpo_pair(m, d, pair, 5.0) for pair in range(rows // 2)]).mean()
    if loss == "diffusion_nft":
        return torch.stack([nft_row(m, d, i, 0.5, 5.0, 0.1) for i in range(rows)]).mean()
    if loss == "dgpo":
        group = torch.arange(rows) // 2  # a pair at one noise level
        errors = {k: ((v - (d["noise"] - d["clean_latents"])) ** 2).flatten(1).mean(1) for k, v in (d | m).items()
                  if k.endswith("velocity")}  # fmt: skip
        terms = 20.0 / 2 * d["advantages"] * (errors["velocity"] - errors["ref_velocity"]).detach()
        s = torch.stack([terms[group == g].sum() for g in group])
        return (s.sigmoid() * d["advantages"] * errors["velocity"]).mean()
    if loss == "crd":
        gain = -((m["velocity"] - (d["noise"] - d["clean_latents"])) ** 2).flatten(1).mean(1)
        gain = (gain - gain.detach()).unflatten(0, (-1, 2))  # the policy itself samples: its rewards are 0
        a = d["advantages"].unflatten(0, (-1, 2))
        sides = [(3.0 * gain - (a - ((sign * a / 0.7).softmax(1) * a).sum(1, keepdim=True))) ** 2 for sign in (1, -1)]
        return (sides[0] + sides[1]).mean() / 2
    return torch.stack([awm_row(m, d, i, "t", 0.2, 0.2, 0.1, 0.2) for i in range(rows)]).mean()


@pytest.mark.parametrize("architecture", [QWEN, SD3])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_the_formula_on_diffusers_own_transformer(architecture, loss):
    engine = make_engine(tiny_checkpoint(architecture), loss)
    data = make_batch(engine)
    prepared = engine.before_update(data, anchor_policies(loss, actor_config(loss)))
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(engine.with_sums(prepared, loss_function(loss)), loss_function(loss))
    now, start = load_transformer(architecture, weights(engine)), load_transformer(architecture)
    policies = {"velocity": now, "ref_velocity": start}
    if loss == "diffusion_nft":
        policies["old_velocity"] = start  # the old policy samples, and has not moved
    if loss in ("dgpo", "crd"):
        policies["old_velocity"] = now
    if loss == "awm":
        policies |= {"old_velocity": now, "ema_velocity": start}  # the policy itself samples

    rows = {"sigma": [], "noise": [], "clean_latents": [], "advantages": [], "preference": []}
    found = {name: [] for name in policies}
    for unit in range(3):
        for level in range(LEVELS):
            for row in (2 * unit, 2 * unit + 1):
                seed = int(data["noise_seed"][row, level])
                x0, t = data["clean_latents"][row], data["sigma"][row, level]
                noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(seed))
                for name, transformer in policies.items():
                    with torch.set_grad_enabled(name == "velocity"):
                        x_t = (1 - t) * x0 + t * noise
                        found[name].append(plain_velocity(architecture, transformer, x_t, t, data, row))
                values = (t, noise, x0, data["advantages"][row], data["preference"][row])
                for key, value in zip(rows, values, strict=True):
                    rows[key].append(value)
    velocities = {name: torch.stack(v) for name, v in found.items()}
    d = {key: torch.stack(v) for key, v in rows.items()} | {k: v for k, v in velocities.items() if k != "velocity"}
    written_out(loss, {"velocity": velocities["velocity"]}, d).backward()

    expected = {n: p.grad for n, p in now.named_parameters() if p.grad is not None}
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    for name, parameter in engine.parameters.items():
        if name in expected:
            scale = expected[name].abs().max().clamp_min(1.0)
            torch.testing.assert_close(parameter.grad / scale, expected[name] / scale, atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("loss", LOSSES)
def test_any_micro_batch_size_gives_the_same_update(loss, lora):
    found = []
    for size in (1000, 7, 2):
        engine = make_engine(tiny_checkpoint(), loss, lora, micro_batch=size)
        before = weights(engine)
        metrics = update(engine, make_batch(engine), loss)
        assert moved(before, weights(engine)) > 1e-3
        found.append((weights(engine), metrics))
    for other, metrics in found[1:]:
        assert_same(found[0][0], other)
        for one, two in zip(found[0][1], metrics, strict=True):
            assert one == pytest.approx(two, rel=1e-4, abs=1e-5)


def test_fillers_change_nothing():
    """A rank that has no unit of its own repeats one with share 0."""
    found = []
    for filled in (False, True):
        engine = make_engine(tiny_checkpoint(), "diffusion_nft", micro_batch=5)
        data = make_batch(engine)
        data["share"] = torch.full((6,), 1 / 6, dtype=torch.float64)
        if filled:
            data = {k: torch.cat([v, v[:1]]) for k, v in data.items()}
            data["share"][-1] = 0
        found.append((update(engine, data, "diffusion_nft"), weights(engine)))
    assert_same(found[0][1], found[1][1], atol=1e-6)
    for one, two in zip(found[0][0], found[1][0], strict=True):
        assert one == pytest.approx(two, rel=1e-5, abs=1e-6)


def test_pairs_stay_whole_in_micro_batches_of_any_size():
    engine = make_engine(tiny_checkpoint(), "dpo", micro_batch=3)
    data = engine.before_update(make_batch(engine), {})
    for part in engine.replay.split(data, engine.micro_batch_size):
        micro_batch = engine.replay.take(data, part)
        assert micro_batch["preference"].tolist() == [1.0, -1.0] * (len(micro_batch["preference"]) // 2)
        assert torch.equal(micro_batch["sigma"][::2], micro_batch["sigma"][1::2])
        assert torch.equal(micro_batch["noise"][::2], micro_batch["noise"][1::2])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_old_policy_follows_at_its_pace_and_neither_it_nor_the_reference_is_trained(lora):
    engine = make_engine(tiny_checkpoint(), "diffusion_nft", lora)
    data = make_batch(engine)
    anchors = {"old_velocity": "old", "ref_velocity": "reference", "now": "current"}
    before = engine.before_update(data, anchors)
    update(engine, data, "diffusion_nft")
    after = engine.before_update(data, anchors)
    assert torch.equal(before["old_velocity"], after["old_velocity"])
    torch.testing.assert_close(before["ref_velocity"], after["ref_velocity"], atol=1e-6, rtol=0)
    assert not torch.allclose(before["now"], after["now"])
    current, old = weights(engine), {k: v.clone() for k, v in engine.policies.copies["old"].items()}
    engine.policies.blend("old", 0.75)
    for name, held in engine.policies.copies["old"].items():
        torch.testing.assert_close(held, 0.75 * old[name] + 0.25 * current[name], atol=1e-6, rtol=1e-5)
    engine.policies.blend("old", 1.0)  # never follows: it stays what it is
    engine.policies.blend("old", 0.0)  # a plain copy: sampling is on-policy
    copied = engine.before_update(data, anchors)
    assert torch.equal(copied["old_velocity"], copied["now"])


def test_lora_needs_no_second_model():
    engine = make_engine(tiny_checkpoint(), "diffusion_nft", lora=True)
    held = sum(t.numel() for copy in engine.policies.copies.values() for t in copy.values())
    model = sum(p.numel() for p in engine.module.parameters())
    assert set(engine.policies.copies) == {"old"} and 0 < held < model / 4


def test_guidance_of_the_rollout_is_not_trained():
    """DPO and AWM may sample with guidance; what is trained is the model's own velocity."""
    engine = make_engine(tiny_checkpoint(SD3), "dpo")
    assert engine.adapter.cfg_scale(engine.replay.model_config) <= 1
    guided = make_engine(tiny_checkpoint(SD3), "dpo")
    guided.model_config.pipeline.guidance_scale = 7.0
    assert guided.adapter.cfg_scale(guided.adapter.unguided(guided.model_config)) <= 1
    assert guided.model_config.pipeline.guidance_scale == 7.0


@pytest.mark.parametrize("loss", ["diffusion_nft", "awm"])
def test_the_old_velocity_is_of_the_policy_that_drew_each_sample(loss):
    """Two versions in one batch, and the weights that learn are a third. Against the same rows, each version alone."""
    engine = make_engine(tiny_checkpoint(), loss)
    anchors = anchor_policies(loss, actor_config(loss))
    policy, data, alone = anchors["old_velocity"], make_batch(engine), {}
    for version in (4, 5):
        engine.remember_policy(policy, version, most=2)
        alone[version] = engine.before_update(data, anchors)["old_velocity"]
        update(engine, make_batch(engine), loss)
        if policy == "old":
            engine.move_old(0.5)
    drawn_by = torch.tensor([4, 5, 5, 4, 5, 4])
    found = engine.before_update(data | {"drawn_by": drawn_by}, anchors, versions=(4, 5))["old_velocity"]
    for row, version in enumerate(drawn_by.tolist()):
        assert torch.equal(found[row], alone[version][row])
        assert not torch.equal(found[row], alone[9 - version][row])
    engine.remember_policy(policy, 6, most=2)
    with pytest.raises(KeyError), engine.policy("current after 4" if policy == "current" else "old after 4"):
        pass
    assert not any(name.endswith("after 6") for name in engine.policies.state_dict()), "no checkpoint needs them"
