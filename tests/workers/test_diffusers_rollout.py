"""The embedded engine: what is in a batch changes no sample, and nothing is computed twice or kept without need."""

import asyncio
import copy
import dataclasses
import functools
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from tiny_models import tiny_checkpoint

from verl_omni.config import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
)
from verl_omni.pipelines.drawing import equal_parts
from verl_omni.pipelines.qwen_image import QwenImage
from verl_omni.utils.errors import RunError
from verl_omni.workers.engine.lora import add_lora, base_name
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

STEPS = 4
PROMPTS = ["a cat", 'a sign that reads "407", on a wall of old red bricks in the evening light', "two cups by the sea"]
GUARD = 120
LARGE = {"final_latents", "all_latents", "all_timesteps", "rollout_log_probs"}


@functools.cache
def transformer(dtype: torch.dtype = torch.float32):
    return QwenImage.load_module(model_config(), dtype).eval()


def model_config(cfg: bool = False) -> DiffusionModelConfig:
    return DiffusionModelConfig(
        path=str(tiny_checkpoint()),
        pipeline=DiffusionPipelineConfig(
            height=32, width=48, num_inference_steps=STEPS, true_cfg_scale=4.0 if cfg else 1.0, max_sequence_length=128
        ),
        algo=DiffusionRolloutAlgoConfig(sde_type="sde", noise_level=0.7),
    )


def rollout(cfg: bool = False, max_num_seqs: int = 8, vae_tiling: bool = False, **kwargs) -> DiffusersRollout:
    config = DiffusionRolloutConfig(max_num_seqs=max_num_seqs, request_batch_max_wait_ms=5.0, vae_tiling=vae_tiling)
    return DiffusersRollout(config, model_config(cfg), transformer(), torch.device("cpu"), torch.float32, **kwargs)


@functools.cache
def ids(text: str) -> tuple[int, ...]:
    return tuple(QwenImage.tokenize(QwenImage.load_tokenizers(model_config()), text, 128))


def generate(engine: DiffusersRollout, asked: list[tuple[str, int]], burst: bool = True, **params) -> list:
    """(prompt, seed) pairs, all at once; `params` may hold a list with one value for each."""

    async def run():
        calls = []
        for i, (prompt, seed) in enumerate(asked):
            mine = {k: v[i] if isinstance(v, list) else v for k, v in params.items()}
            mine = {"seed": seed, "keep_trajectory": True, "sde_window": (0, STEPS - 1)} | mine
            if burst:
                mine["position"] = (i, len(asked))
            calls.append(engine.generate(list(ids(prompt)), mine, str(i), negative_prompt_ids=list(ids("blurry"))))
        return await asyncio.wait_for(asyncio.gather(*calls), GUARD)

    return asyncio.run(run())


def assert_same(one, other) -> None:
    for key in ("final_latents", "all_latents", "rollout_log_probs", "all_timesteps"):
        torch.testing.assert_close(one.trajectory[key], other.trajectory[key], atol=1e-5, rtol=1e-5)
    assert (one.image.int() - other.image.int()).abs().max() <= 1


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
def test_a_mixed_batch_equals_one_by_one(cfg):
    engine = rollout(cfg)
    asked = [(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    for together, pair in zip(generate(engine, asked), asked, strict=True):
        assert_same(together, generate(engine, [pair])[0])


def test_a_seed_gives_the_same_image_whatever_else_is_in_the_batch():
    engine, wanted = rollout(), (PROMPTS[0], 5)
    companies = [[], [(PROMPTS[0], 6)], [(PROMPTS[1], 5), (PROMPTS[2], 1)], [(PROMPTS[1], s) for s in range(6)]]
    found = []
    for company in companies:
        found += [generate(engine, [wanted, *company])[0], generate(engine, [*company, wanted])[-1]]
    for other in found[1:]:
        assert_same(found[0], other)
    images = generate(engine, [(PROMPTS[0], s) for s in range(3)])
    assert all((images[0].image.int() - i.image.int()).abs().max() > 1 for i in images[1:])


def test_windows_at_different_places_share_a_batch():
    engine = rollout()
    asked, windows = [(PROMPTS[0], 1), (PROMPTS[1], 2)], [(0, 2), (1, 3)]
    for i, together in enumerate(generate(engine, asked, sde_window=windows)):
        assert_same(together, generate(engine, [asked[i]], sde_window=windows[i])[0])


def test_a_distinct_prompt_is_encoded_once(monkeypatch):
    encoded = Counter()
    original = QwenImage.encode_prompt.__func__

    def counting(cls, pipe, prompt_ids, *rest):
        encoded[tuple(prompt_ids)] += 1
        return original(cls, pipe, prompt_ids, *rest)

    monkeypatch.setattr(QwenImage, "encode_prompt", classmethod(counting))
    engine = rollout(cfg=True, max_num_seqs=2)
    asked = [(prompt, seed) for seed in range(2) for prompt in PROMPTS[:2]]
    generate(engine, asked)
    generate(engine, asked)
    assert encoded == {ids(PROMPTS[0]): 1, ids(PROMPTS[1]): 1, ids("blurry"): 1}
    for size in (1, 0):
        small = rollout(prompt_cache_size=size)
        generate(small, asked)
        assert len(small._prompts) == size


def test_prompts_are_kept_up_to_so_many_bytes():
    """Features of a long prompt are megabytes: a count alone would bound nothing."""
    engine = rollout()
    generate(engine, [(PROMPTS[0], 0)])
    one = engine._prompt_bytes
    assert one == sum(value.nbytes for features in engine._prompts.values() for value in features.values()) > 0
    engine._prompt_cache_bytes = one  # room for the first alone
    generate(engine, [(PROMPTS[0], 0)])
    assert len(engine._prompts) == 1
    generate(engine, [(PROMPTS[1], 0), (PROMPTS[2], 0)])
    held = sum(value.nbytes for features in engine._prompts.values() for value in features.values())
    assert engine._prompt_bytes == held <= one


@pytest.mark.parametrize(("cfg", "halves"), [(False, 1), (True, 2)], ids=["plain", "cfg"])
def test_requests_share_forwards_up_to_max_num_seqs(cfg, halves):
    engine, sizes = rollout(cfg, max_num_seqs=3), []
    hook = transformer().register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    try:
        generate(engine, [(PROMPTS[i % 3], i) for i in range(7)])
        assert sizes == [3] * STEPS * halves * 2 + [1] * STEPS * halves
        sizes.clear()
        generate(engine, [(PROMPTS[0], i) for i in range(3)], burst=False)
        assert sizes == [3] * STEPS * halves
    finally:
        hook.remove()


def test_requests_of_different_kinds_do_not_share_a_forward():
    engine = rollout()
    outputs = generate(engine, [(PROMPTS[0], 1), (PROMPTS[0], 1)], burst=False, height=[32, 64])
    assert [o.image.shape for o in outputs] == [(3, 32, 48), (3, 64, 48)]
    assert_same(outputs[0], generate(engine, [(PROMPTS[0], 1)])[0])


def test_only_the_window_is_stored_in_float32():
    engine = rollout()
    (whole,) = generate(engine, [(PROMPTS[0], 3)], sde_window=(0, STEPS - 1))
    (output,) = generate(engine, [(PROMPTS[0], 3)], sde_window=(1, 3))
    assert set(output.trajectory) == LARGE | {"size", "noise_level"}
    tokens = (32 // 16) * (48 // 16)
    assert output.trajectory["all_latents"].shape == (3, tokens, 16)
    assert torch.equal(output.trajectory["all_timesteps"], whole.trajectory["all_timesteps"][1:3])
    assert output.trajectory["rollout_log_probs"].shape == (2,)
    assert all(output.trajectory[name].dtype == torch.float32 for name in LARGE)
    # Before the window and after it the path is the ODE's: the first step equals that of a rollout without noise.
    (ode,) = generate(engine, [(PROMPTS[0], 3)], sde_window=(1, 3), noise_level=0.0)
    assert torch.equal(output.trajectory["all_latents"][0], ode.trajectory["all_latents"][0])
    assert not torch.equal(output.trajectory["all_latents"][1], ode.trajectory["all_latents"][1])
    assert not ode.trajectory["rollout_log_probs"].any()


def test_latents_are_float32_even_if_the_model_is_not():
    config = DiffusionRolloutConfig()
    module = transformer(torch.bfloat16)
    engine = DiffusersRollout(config, model_config(), module, torch.device("cpu"), torch.bfloat16)
    original = QwenImage.forward.__func__

    class Casting(QwenImage):
        """Without FSDP nobody else casts the inputs."""

        @classmethod
        def forward(cls, module, inputs):
            return original(cls, module, inputs | {"hidden_states": inputs["hidden_states"].to(module.dtype)})

    engine.adapter = Casting
    (output,) = generate(engine, [(PROMPTS[0], 3)])
    assert all(output.trajectory[name].dtype == torch.float32 for name in LARGE)
    stored = output.trajectory["all_latents"]
    assert not torch.equal(stored, stored.bfloat16().float())


def test_without_a_trajectory_only_the_image_comes_back():
    (output,) = generate(rollout(), [(PROMPTS[0], 0)], keep_trajectory=False)
    assert output.trajectory == {} and output.conditions == {}
    assert output.image.shape == (3, 32, 48) and output.image.dtype == torch.uint8


def test_one_start_for_a_group_and_noise_of_its_own_for_each():
    outputs = generate(rollout(), [(PROMPTS[0], s) for s in range(3)], init_seed=99)
    stored = [o.trajectory["all_latents"] for o in outputs]
    assert torch.equal(stored[0][0], stored[1][0]) and torch.equal(stored[0][0], stored[2][0])
    assert not torch.allclose(stored[0][1], stored[1][1]) and not torch.allclose(stored[1][1], stored[2][1])


def test_guidance_without_a_negative_prompt_is_an_error_for_the_caller():
    engine = rollout(cfg=True)
    with pytest.raises(ValueError, match="no negative_prompt_ids"):
        asyncio.run(asyncio.wait_for(engine.generate(list(ids("a cat")), {"seed": 0}, "0"), GUARD))


@pytest.mark.parametrize(("total", "size"), [(1, 1), (16, 16), (17, 9), (24, 12), (32, 16), (48, 16)])
def test_images_are_decoded_in_equal_parts(total, size):
    assert equal_parts(total, most=16) == size


def test_an_image_is_decoded_in_tiles():
    whole, tiled = rollout(), rollout(vae_tiling=True)
    vae, sizes = tiled.pipe.vae, []
    vae.tile_sample_min_height = vae.tile_sample_min_width = 16  # of images of 32 x 48
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = 8
    vae.decoder.register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape[-2:])))
    one, other = (generate(engine, [("a cat", 1)])[0] for engine in (whole, tiled))
    assert len(sizes) > 1 and max(sizes) <= (2, 2)  # 8 pixels a latent
    torch.testing.assert_close(one.trajectory["final_latents"], other.trajectory["final_latents"])
    assert one.image.shape == other.image.shape
    # Diffusers' own tiles of the same latents.
    whole.pipe.vae.enable_tiling(16, 16, 8, 8)
    latents = one.trajectory["final_latents"][None]
    expected = whole.adapter.decode_latents(whole.pipe, latents, model_config())[0]
    assert ((expected * 255).round() - other.image).abs().max() <= 1


def test_answers_name_the_weights_that_made_them():
    """Weights that come while a batch is being drawn wait for its end; a part of them is an error."""
    engine = rollout()
    engine.module = copy.deepcopy(engine.module)
    new = {name: parameter.detach() * 1.5 for name, parameter in engine.module.named_parameters()}
    started, checked = threading.Event(), threading.Event()
    decode = engine._decode

    def slow(*args):
        started.set()
        assert not checked.wait(0.3), "the weights changed in the middle of a batch"
        return decode(*args)

    engine._decode = slow
    with ThreadPoolExecutor(1) as thread:
        pushed = thread.submit(lambda: (started.wait(GUARD), engine.update_weights(new.items(), 5), checked.set()))
        (old,) = generate(engine, [(PROMPTS[0], 1)])
        pushed.result(GUARD)
    engine._decode = decode
    (after,) = generate(engine, [(PROMPTS[0], 1)])
    assert (old.version, after.version) == (0, 5)
    assert not torch.equal(old.trajectory["final_latents"], after.trajectory["final_latents"])
    missing = list(new.items())[1:]
    with pytest.raises(KeyError, match=f"1 of {len(new)} weights did not arrive"):
        engine.update_weights(missing, 6)
    assert engine.version == 5


def test_frozen_weights_that_are_not_the_folders_wait_for_their_adapter():
    config = dataclasses.replace(model_config(), lora_rank=4, lora_alpha=8)
    trained, drawing = (QwenImage.load_module(config, torch.float32).eval() for _ in range(2))
    for module in (trained, drawing):
        add_lora({"transformer": module}, config, QwenImage)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter * 1.1 + 0.01)
    named = [(base_name(name), parameter) for name, parameter in trained.named_parameters()]
    frozen, adapter = ([(n, p.detach()) for n, p in named if p.requires_grad is grad] for grad in (False, True))
    peft_config = trained.peft_config["default"].to_dict()
    engine = DiffusersRollout(DiffusionRolloutConfig(), config, drawing, torch.device("cpu"), torch.float32)
    (before,) = generate(engine, [(PROMPTS[0], 1)])
    engine.update_weights(frozen, 1, peft_config, base_sync_done=False)
    (between,) = generate(engine, [(PROMPTS[0], 1)])
    assert between.version == 0 and torch.equal(between.image, before.image)
    engine.update_weights(adapter, 1, peft_config)
    (after,) = generate(engine, [(PROMPTS[0], 1)])
    engine.module = trained
    (expected,) = generate(engine, [(PROMPTS[0], 1)])
    assert after.version == 1
    assert_same(after, expected)
    assert not torch.equal(after.trajectory["final_latents"], before.trajectory["final_latents"])
    with pytest.raises(ValueError, match="rank 4 with alpha 16, and the rollout's model has rank 4 with alpha 8"):
        engine.update_weights(adapter, 2, peft_config | {"lora_alpha": 16})


def test_a_paused_engine_begins_nothing_and_a_stopped_one_says_so():
    engine = rollout()
    engine.pause()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(generate, engine, [(PROMPTS[0], 1)])
        time.sleep(0.3)
        assert not answer.done()
        engine.resume()
        assert len(answer.result(GUARD)) == 1
    engine.stop()
    with pytest.raises(RuntimeError, match="has been stopped"):
        generate(engine, [(PROMPTS[0], 1)])


def test_a_batch_that_nobody_waits_for_ends_before_its_next_step():
    engine, steps, reached, seen = rollout(), [], threading.Event(), threading.Event()
    predict = engine.module.forward

    def counted(*args, **kwargs):
        steps.append(1)
        if len(steps) == 2:
            reached.set()
            assert seen.wait(GUARD)
        return predict(*args, **kwargs)

    async def leave(stay: int):
        asked = [(list(ids(PROMPTS[0])), {"seed": i, "position": (i, 2)}, str(i)) for i in range(2)]
        calls = [asyncio.create_task(engine.generate(*one)) for one in asked]
        await asyncio.to_thread(reached.wait, GUARD)
        for call in calls[stay:]:
            call.cancel()
        await asyncio.wait(calls[stay:], timeout=GUARD)
        seen.set()
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), GUARD)
        await asyncio.to_thread(engine.pause)  # until the batch has ended
        engine.resume()
        return answers

    with mock.patch.object(engine.module, "forward", counted):
        assert all(isinstance(answer, asyncio.CancelledError) for answer in asyncio.run(leave(stay=0)))
        assert len(steps) == 2 < STEPS
        steps.clear(), reached.clear(), seen.clear()
        first, second = asyncio.run(leave(stay=1))
    assert len(steps) == STEPS and isinstance(second, asyncio.CancelledError)
    (alone,) = generate(engine, [(PROMPTS[0], 0)], keep_trajectory=False, sde_window=None)
    assert (first.image.int() - alone.image.int()).abs().max() <= 1


@pytest.mark.parametrize("of", ["transformer", "vae"])
def test_nan_is_never_drawn(of):
    """It would become a black image, which would be scored and learned from."""
    engine = rollout()
    engine.module = copy.deepcopy(engine.module)  # others draw with it
    broken = engine.module if of == "transformer" else engine.pipe.vae.decoder
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises(RunError, match="1 of 1 images have NaN or infinite values: the model has diverged"):
        generate(engine, [(PROMPTS[0], 0)])
