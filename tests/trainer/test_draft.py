"""Direct reward gradients: up the gradient of the reward itself, and a line where there is none."""

import asyncio
import contextlib
import json
import shutil

import pytest
import torch
from composed import composed
from e2e_runs import metrics, run_here, settings
from refusals import refused
from tiny_models import tiny_checkpoint
from tiny_scorers import clip_folder

from verl_omni.pipelines.z_image.adapter import LAST_STEP_IS_IDLE
from verl_omni.rewards import check_settings, register_reward
from verl_omni.rewards.choice import read_choices
from verl_omni.rewards.differentiable import check_differentiable, differentiable, reward_of_pixels, told_by_name
from verl_omni.rewards.reward_function import RewardFunction
from verl_omni.rewards.scoring import as_reward_function
from verl_omni.testing.local_trainer import local_config
from verl_omni.trainer.checks.reward_trial import try_gradient
from verl_omni.trainer.failures import users_mistake

DRAFT = "actor_rollout_ref.model.algorithm=draft"
EXTRA = "actor_rollout_ref.actor.diffusion_loss.extra"
OWN = "reward.custom_reward_function.path"
BRIGHTNESS = """
from verl_omni.rewards.differentiable import differentiable

@differentiable
def compute_score(pixels, *, wanted=1.0):
    return 1 - (pixels.mean(dim=(1, 2, 3)) - wanted).abs()
"""
# A prompt says how high its image is, and so do the pixels: an image that has another one's prompt is found out.
HEIGHTS = """
from verl_omni.rewards.differentiable import differentiable

@differentiable
def compute_score(pixels, prompts, ground_truths, extra_infos):
    told = [(prompt, truth, info["note"]) for prompt, truth, info in zip(prompts, ground_truths, extra_infos)]
    height = pixels.shape[2]
    assert told == [(f"{height} high", str(height), -height)] * len(pixels), told
    return pixels.mean(dim=(1, 2, 3))
"""
PLAIN = """
def compute_score(image):
    return 0.5
"""


ROW = {"data_source": "mine", "prompt": "a cat", "reward_model": {"ground_truth": "one"}, "extra_info": {}}


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "brightness.py").write_text(BRIGHTNESS)
    (tmp_path / "plain.py").write_text(PLAIN)
    return f"{OWN}={tmp_path / 'brightness.py'}"


def run(folder, reward, monkeypatch, *overrides: str) -> list[dict[str, float]]:
    given = settings(
        folder / "run", DRAFT, reward, "actor_rollout_ref.actor.optim.lr=0.003", "data.val_files=null",
        "trainer.save_freq=0", "trainer.total_training_steps=4", *overrides, model=tiny_checkpoint(),
    )  # fmt: skip
    run_here(given, folder, monkeypatch)
    return [told for step, told in sorted(metrics(folder / "run").items()) if step]


def test_the_reward_climbs(reward, tmp_path, monkeypatch, process_group):
    told = run(tmp_path, reward, monkeypatch)
    rewards = [step["critic/rewards/mean"] for step in told]
    assert rewards[-1] > rewards[0] + 0.01 and told[0]["actor/grad_norm"] > 0
    # Noised again by as little as the last step's level and taken back in one step, an image is nearly itself.
    assert told[0]["actor/predicted_reward"] == pytest.approx(rewards[0], abs=0.1)


def test_it_goes_on_bit_for_bit(reward, tmp_path, monkeypatch, process_group):
    more = ("trainer.save_freq=1", "trainer.total_training_steps=2", "actor_rollout_ref.model.lora_rank=4")
    told = run(tmp_path, reward, monkeypatch, *more)
    shutil.rmtree(tmp_path / "run/global_step_2")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("1")
    assert run(tmp_path, reward, monkeypatch, *more) == told and told[0] != told[1]


def test_the_reward_climbs_through_several_steps(reward, tmp_path, monkeypatch, process_group):
    """Which start at the level that so many steps of the rollout follow: images are noised by more, and change more."""
    told = run(tmp_path, reward, monkeypatch, f"{EXTRA}.steps=2")
    rewards = [step["critic/rewards/mean"] for step in told]
    assert rewards[-1] > rewards[0] + 0.01 and told[0]["actor/grad_norm"] > 0


def test_the_reference_holds_a_lora_back(reward, tmp_path, monkeypatch, process_group):
    one_update = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    few = ["actor_rollout_ref.model.lora_rank=4", "trainer.total_training_steps=2"]
    told = run(tmp_path, reward, monkeypatch, f"{EXTRA}.kl_beta=1.0", one_update, *few)
    assert told[0]["actor/kl_loss"] == 0 and told[-1]["actor/kl_loss"] > 0


def test_each_image_is_scored_with_what_belongs_to_it(tmp_path, monkeypatch, process_group):
    """When it is drawn, and when it is trained: in shuffled mini-batches, and micro-batches of parts of them."""
    (tmp_path / "heights.py").write_text(HEIGHTS)
    rows = [{"prompt": f"{h} high", "ground_truth": str(h), "note": -h, "height": h} for h in (32, 48, 64, 80)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = (
        f"data.train_files={tmp_path / 'prompts.jsonl'}",
        "data.train_batch_size=4",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
    )
    told = run(tmp_path, f"{OWN}={tmp_path / 'heights.py'}", monkeypatch, *more)
    assert told[-1]["actor/grad_norm"] > 0 and not told[-1].get("reward/failed")


def test_the_score_of_image_and_prompt_climbs(tmp_path, monkeypatch, process_group):
    """The same model scores in the rollout and in the update: what one step predicts is nearly the image itself."""
    clip_folder(tmp_path)
    reward = f"reward.scorers=[{{name: clip_score, model: {tmp_path}, device: cpu}}]"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a red fox"}\n{"prompt": "two cats, in the snow"}')
    more = (f"data.train_files={tmp_path / 'prompts.jsonl'}", "trainer.total_training_steps=16")
    told = run(tmp_path, reward, monkeypatch, *more)
    rewards = [step["critic/rewards/mean"] for step in told]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.05
    assert told[0]["actor/predicted_reward"] == pytest.approx(rewards[0], abs=0.1)


def test_a_function_is_told_what_it_asks_for():
    rows = [{"prompt": "a", "ground_truth": "2"}, {"prompt": "bcd", "ground_truth": "4"}]
    rows = [row | {"data_source": "mine", "extra_info": {}} for row in rows]
    pixels = torch.full((2, 3, 4, 4), 0.5)

    def many(pixels, prompts, *, times=1):
        return times * pixels.mean(dim=(1, 2, 3)) * torch.tensor([float(len(prompt)) for prompt in prompts])

    def one(pixels, prompt, ground_truth="1", *, times=1):
        assert len(pixels) == 1
        return times * pixels.mean() * len(prompt) * int(ground_truth)

    assert told_by_name(many, {"times": 2})(pixels, rows).tolist() == [1.0, 3.0]
    assert told_by_name(one, {"times": 2})(pixels, rows).tolist() == [2.0, 12.0]
    for function, names in ((many, ["solution_images", "prompts", "times"]),
                            (one, ["solution_image", "prompt", "ground_truth", "times"])):  # fmt: skip
        reward = RewardFunction(differentiable(function), "mine", {"times": 2})
        assert reward.wanted == names and reward.batched == (function is many)
    assert differentiable(many)(list(pixels), prompts=["a", "bcd"]) == [0.5, 1.5]
    assert differentiable(one)(pixels[0], prompt="bcd", ground_truth="4") == 6.0


def test_rewards_with_a_name_of_ones_own_are_added_up():
    """A function, and a class that is told no device."""

    @register_reward("test_letters")
    @differentiable
    def letters(pixels, prompts, *, times: int = 1):
        return times * pixels.mean(dim=(1, 2, 3)) * torch.tensor([float(len(prompt)) for prompt in prompts])

    @register_reward("test_level")
    class Level:
        def __init__(self, *, level: float = 0.0):
            self.level = level

        def __call__(self, images):
            raise AssertionError("asked for a score without a gradient")

        def of_pixels(self, pixels):
            return pixels.mean(dim=(1, 2, 3)) - self.level

    named = "reward.scorers=[{name: test_letters, times: 2, weight: 3}, {name: test_level, level: 0.25}]"
    score = reward_of_pixels(composed(DRAFT, named).reward, "cpu")
    told = [{"prompt": "a"}, {"prompt": "bc"}]
    assert score(torch.full((2, 3, 4, 4), 0.5), told).tolist() == [3 * 1.0 + 0.25, 3 * 2.0 + 0.25]
    check_settings("test_letters", {"times": 2})
    with pytest.raises(ValueError, match="times=two: expected int"):
        check_settings("test_letters", {"times": "two"})
    asked = as_reward_function(None, read_choices([{"name": "test_letters", "times": 2}])["test_letters"])
    images = [torch.full((3, 4, 4), 0.5), torch.full((3, 2, 2), 0.25)]
    rows = [{"response": image} | row for image, row in zip(images, told, strict=True)]
    assert [answer["score"] for answer in asyncio.run(asked.score(rows))] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda pixels, prompt, ground_truths: 0, "asks for prompt, of one image, and ground_truths, of many"),
        (lambda pixels, image: 0, "asks for image: it has pixels, and may ask for data_sources, prompts"),
        (lambda pixels, reward_router_address: 0, "asks for reward_router_address: it has pixels"),
    ],
)
def test_what_a_function_of_pixels_is_not_told_is_refused(function, said):
    with pytest.raises(ValueError, match=said) as caught:
        differentiable(function)
    assert users_mistake(caught.value)


def test_a_function_of_pixels_scores_images_as_any_other(tmp_path):
    function = RewardFunction(differentiable(lambda pixels, *, wanted=1.0: pixels.amax((1, 2, 3)) - wanted), "mine")
    assert function.batched and function.wanted == ["solution_images", "wanted"]
    score = function.function([torch.full((3, 2, 2), 0.25), torch.full((3, 4, 2), 0.5)], wanted=0.25)
    assert score == [0.0, 0.25]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "follows one reward for all prompts: name it"),
        (
            ["reward.scorers=[{name: jpeg_incompressibility}]"],
            "no gradient.*in 8 bits.*take aesthetic, clip_score, hpsv2, image_reward, pickscore, siglip_score, .*or a",
        ),
        (["reward.custom_reward_function.path=plain.py"], "has no gradient.*give it the decorator"),
        (
            ["reward.scorers=[{name: motion}, {name: aesthetic, gate: {by: motion, at_least: 1}}]"],
            "aesthetic.gate has no gradient",
        ),
    ],
)
def test_a_reward_without_a_gradient_is_refused_in_one_line(given, said, reward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = composed(DRAFT, *given)
    with pytest.raises(ValueError, match=said) as caught:
        check_differentiable(config.reward)
    assert users_mistake(caught.value)


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("pixels.mean(dim=(1, 2, 3)).detach()", "constants to torch"),
        ("pixels.round().mean(dim=(1, 2, 3))", "it is 0 for every pixel"),
        ("torch.tensor([image.mean() for image in pixels.numpy()])", "Can't call numpy"),
        ("(pixels.mean(dim=(1, 2, 3)) - 0.85).relu()", None),  # flat for all but the brightest
        ("1 / 0", None),  # what fails is told by the trial of rewards
        ("pixels.mean(dim=(1, 2, 3)) * (prompts == ['a cat'] and ground_truths == ['one'])", None),
        ("pixels.mean(dim=(1, 2, 3)) * (prompts == ['a dog'])", "it is 0 for every pixel"),
    ],
)
def test_scores_that_do_not_move_with_the_pixels_are_refused(score, said, tmp_path):
    function = BRIGHTNESS.split("    return")[0].replace("pixels,", "pixels, prompts, ground_truths,")
    (tmp_path / "mine.py").write_text(f"{function}    import torch\n    return {score}\n")
    config = composed(DRAFT, f"{OWN}={tmp_path / 'mine.py'}")
    function = RewardFunction.of(config.reward.custom_reward_function, 60)
    with pytest.raises(ValueError, match=f"no gradient.*{said}") if said else contextlib.nullcontext():
        try_gradient(config, function, ROW)


def test_a_run_asks_for_the_gradient_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="follows one reward for all prompts"):
        local_config(settings(tmp_path / "run", DRAFT))


def test_what_it_cannot_do_is_refused_in_one_line(reward):
    assert "use trainer.mode=colocated" in refused(DRAFT, reward, "trainer.mode=separate")
    offline = "algorithm.sample_source=offline"
    assert "cached pairs have none" in refused(DRAFT, reward, offline)
    video = {"architecture": "WanPipeline"}
    assert "follows the rewards of images, and WanPipeline makes video" in refused(DRAFT, reward, **video)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([f"+{EXTRA}.steps=11"], "extra.steps=11: a rollout has 10 steps; use 10 or fewer"),
        ([f"+{EXTRA}.steps=1.5"], "extra.steps=1.5: expected a whole number"),
        ([f"+{EXTRA}.steps=true"], "extra.steps=True: expected a whole number"),
        ([f"+{EXTRA}.steps=0"], "extra.steps=0: expected 1 or more"),
        ([f"+{EXTRA}.steps=2", "algorithm.timestep_distribution=uniform"], "use last or rollout"),
        ([f"+{EXTRA}.steps=8", "algorithm.timesteps_per_sample=4"], "3 of the rollout's 10 levels have so many steps"),
    ],
)
def test_steps_that_no_level_has_after_it_are_refused_in_one_line(given, said, reward):
    assert said in refused(DRAFT, reward, "actor_rollout_ref.rollout.pipeline.num_inference_steps=10", *given)


def test_steps_are_counted_as_the_model_takes_them(reward):
    """Of those that are asked for, Z-Image takes one less with an old diffusers."""
    steps = 4 - int(LAST_STEP_IS_IDLE)
    given = ("actor_rollout_ref.rollout.pipeline.num_inference_steps=4", f"+{EXTRA}.steps=5")
    assert f"a rollout has {steps} steps" in refused(DRAFT, reward, *given, architecture="ZImagePipeline")
