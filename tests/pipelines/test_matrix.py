"""Model and algorithm are independent choices: every policy-gradient algorithm takes a step on every architecture."""

import asyncio
import contextlib
import dataclasses
import math

import pytest
import torch
from test_architectures import (
    PROMPTS,
    SEQUENCE,
    TABLE,
    as_batch,
    as_param,
    config,
    rollout,
    shrink_references,
    training_engine,
)

from verl_omni.algorithms.registry import resolve_algorithm_defaults
from verl_omni.config import DiffusionActorConfig, DiffusionLossConfig, DiffusionRolloutAlgoConfig
from verl_omni.pipelines.schedulers.windows import sde_window
from verl_omni.workers.engine.noise_levels import NoiseLevels
from verl_omni.workers.engine.reverse_steps import ReverseSteps
from verl_omni.workers.losses import build_loss_function

ALGORITHMS = {
    "flow_grpo": {},
    "flow_grpo fast": {"sde_window_size": 1, "sde_window_per_group": True},
    "mix_grpo": {},
    "dance_grpo": {},
    "grpo_guard": {},
    "flow_dppo": {},
    "tempflow_grpo": {},
    "flash_grpo": {},
    "opd": {},
}
FORWARD = ["dpo", "diffusion_nft", "awm", "dgpo", "crd", "opd_forward"]
REWARD_GRADIENT = ["draft"]

SELDOM = {"FluxKontextPipeline", "WanImageToVideoPipeline-TI2V", "LongCatAudioDiTPipeline"}  # here too
ROWS = [as_param(dataclasses.replace(row, seldom=row.seldom or row.name in SELDOM)) for row in TABLE]


@pytest.fixture(scope="module", params=ROWS)
def trained(request):
    """One tiny model with LoRA for all algorithms of a row."""
    shrink_references()
    return request.param, training_engine(
        config(request.param, cfg=True, noise=0.7, lora_rank=4 * request.param.lora),
        lr=1e-2 if request.param.lora else 1e-4,  # step after step: far from where it began, rounding grows
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step(trained, algorithm):
    row, engine = trained
    name = algorithm.split()[0]
    algo, loss = resolve_algorithm_defaults(
        name, DiffusionRolloutAlgoConfig(**ALGORITHMS[algorithm]), DiffusionLossConfig(loss_mode=None)
    )
    engine.model_config = dataclasses.replace(engine.model_config, algo=algo)
    engine.replay, engine.rows_per_unit = ReverseSteps(engine), 1
    steps = engine.adapter.num_steps(engine.model_config)
    data = as_batch(sample(row, rollout(engine.model_config, engine.module), algo, steps))
    length = data["all_timesteps"].shape[1]
    assert length == (algo.sde_window_size or steps - 1)

    data["old_log_probs"] = data["rollout_log_probs"]
    data["advantages"] = torch.tensor([[1.0], [-1.0]]).expand(2, length)
    if name == "opd":
        data["teacher_prev_sample_mean"] = data["old_prev_sample_mean"] + 0.1
    before = {k: p.detach().clone() for k, p in engine.parameters.items()}
    with engine.train_mode(), counted_rows(engine) as trained_rows:
        metrics = engine.train_batch(data, build_loss_function(DiffusionActorConfig(diffusion_loss=loss)))["metrics"]
    assert sum(trained_rows) == 2 * length  # one forward with a gradient for each image and step of its window
    assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    assert metrics.get("ratio_max_dev", 0.0) <= 1e-6
    assert any(not torch.equal(before[k], p) for k, p in engine.parameters.items())


@pytest.mark.parametrize("name", FORWARD)
def test_a_step_on_the_forward_process(trained, name, monkeypatch):
    """Two images of one group, noised alike, at two levels, and a pair; the second step's weights have moved."""
    row, engine = trained
    algo, loss = resolve_algorithm_defaults(name, DiffusionRolloutAlgoConfig(), DiffusionLossConfig(loss_mode=None))
    engine.model_config = dataclasses.replace(engine.model_config, algo=algo)
    engine.replay = NoiseLevels(engine)
    drawn = as_batch(sample(row, rollout(engine.model_config, engine.module), algo, steps=0))
    advantages = torch.tensor([1.0, -1.0])
    data = drawn | {
        "sigma": torch.tensor([[0.3, 0.8]]).expand(2, 2),
        "noise_seed": torch.tensor([[5, 6]]).expand(2, 2),
        "advantages": advantages,
        "preference": advantages,
        "group": torch.zeros(2, dtype=torch.long),
        "group_share": torch.full((2,), 0.5),
        "centre": torch.full((2, 1), 0.5),
        "targets": advantages[:, None],
    }
    function = build_loss_function(DiffusionActorConfig(diffusion_loss=loss))
    monkeypatch.setattr(engine, "rows_per_unit", function.loss_fn.rows_per_unit)
    # The steps of other algorithms have taken the weights so far from the reference that a group may count for nothing.
    data = engine.before_update(data, {"old_velocity": "current", "ref_velocity": "current"})
    data["teacher_velocity"] = data["old_velocity"] + 0.1
    for unmoved in (True, False):
        function.unmoved = unmoved
        with engine.train_mode():
            metrics = engine.train_batch(data, function)["metrics"]
        # After so large a step a ratio may be out of its bounds, where nothing pulls any more.
        assert math.isfinite(metrics["grad_norm"]) and (metrics["grad_norm"] > 0 or not unmoved)
        assert "ratio_max_dev" not in metrics or (metrics["ratio_max_dev"] <= 1e-6) == unmoved


@pytest.mark.parametrize("name", REWARD_GRADIENT)
def test_a_step_up_the_gradient_of_a_reward(trained, name):
    """Of every model that makes images: through its VAE and its own way to lay latents out."""
    row, engine = trained
    algo, loss = resolve_algorithm_defaults(name, DiffusionRolloutAlgoConfig(), DiffusionLossConfig(loss_mode=None))
    engine.model_config = dataclasses.replace(engine.model_config, algo=algo)
    if engine.adapter.makes(engine.model_config) != "image":
        pytest.skip("refused: tests/trainer/test_draft.py")
    engine.replay, engine.rows_per_unit = NoiseLevels(engine), 1
    drawer = rollout(engine.model_config, engine.module)
    drawn = as_batch(sample(row, drawer, algo, steps=0))
    data = drawn | {"sigma": torch.full((2, 1), 0.3), "noise_seed": torch.tensor([[5], [6]]), "told": torch.arange(2)}
    data = engine.before_update(data, {})
    engine.replay.told = PROMPTS

    def score(pixels, told):
        assert told == PROMPTS
        return pixels.mean(dim=(1, 2, 3))

    engine.replay.reward_of = drawer.with_reward(score)
    function = build_loss_function(DiffusionActorConfig(diffusion_loss=loss))
    before = {k: p.detach().clone() for k, p in engine.parameters.items()}
    with engine.train_mode():
        metrics = engine.train_batch(data, function)["metrics"]
    assert 0 < metrics["predicted_reward"] < 1 and math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    assert any(not torch.equal(before[k], p) for k, p in engine.parameters.items())


@contextlib.contextmanager
def counted_rows(engine):
    """How many rows each call of a transformer has while gradients are on."""
    rows = []

    def count(module, args, kwargs):
        if torch.is_grad_enabled():
            rows.append(len(next(iter([*args, *kwargs.values()]))))

    hooks = [part.register_forward_pre_hook(count, with_kwargs=True) for part in engine.parts.values()]
    yield rows
    for hook in hooks:
        hook.remove()


def sample(row, engine, algo, steps):
    """Two samples, each in the window of its group."""
    tokenizers = engine.adapter.load_tokenizers(engine.model_config)

    def ids(text: str, i: int) -> list[int]:
        return engine.adapter.tokenize(tokenizers, text, SEQUENCE, row.images and row.images[i])

    def away(i: int) -> list[int]:
        return engine.adapter.tokenize_negative(tokenizers, row.negative, SEQUENCE, row.images and row.images[i])

    async def run():
        calls = []
        for i, prompt in enumerate(PROMPTS):
            window = sde_window(algo, steps, training_step=0, seed=0, group=i) if steps else range(0)
            params = {
                "seed": i,
                "keep_trajectory": True,
                "keep_means": True,
                "sde_window": (window.start, window.stop),
                "position": (i, len(PROMPTS)),
            }
            images = row.images and row.images[i]
            calls.append(
                engine.generate(ids(prompt, i), params, str(i), image_data=images, negative_prompt_ids=away(i))
            )
        return await asyncio.gather(*calls)

    return asyncio.run(run())
