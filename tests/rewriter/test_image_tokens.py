"""GLM-Image's autoregressive model as what learns: tokens are drawn, replayed and drawn by the decoder."""

import json

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from e2e_runs import metrics, run_here, settings
from PIL import Image
from safetensors.torch import load_file
from tiny_language_model import REWRITER
from tiny_models import tiny_checkpoint
from transformers import GlmImageForConditionalGeneration

from verl_omni.cli.painter import Painter
from verl_omni.cli.trained import drawing_settings, find_weights
from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
    RewriterConfig,
)
from verl_omni.pipelines.glm_image.image_tokens import positions
from verl_omni.testing.local_trainer import local_config
from verl_omni.workers.columns import Ragged
from verl_omni.workers.rewriter import Rewriter
from verl_omni.workers.rollout.text_rollout import TextRequest

PROMPTS, SIZE = ["a cat", "a red cat on a green mat"], (32, 64)


def rewriter(**settings) -> Rewriter:
    model = DiffusionModelConfig(path=str(tiny_checkpoint("GlmImagePipeline")))
    config = RewriterConfig(path=f"{model.path}/vision_language_encoder", lr=0.01, **settings)
    actor = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(adv_clip_max=5.0))
    return Rewriter(config, actor, DiffusionRolloutConfig(max_num_seqs=4), model)


def requests(temperature: float = 1.0) -> list[TextRequest]:
    return [TextRequest(prompt, seed, temperature, SIZE) for seed, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def writer(process_group):
    return rewriter(top_p=0.9)


@pytest.fixture(scope="module")
def outputs(writer):
    return writer.rollout.write_batch(requests())


def test_training_gives_every_token_the_probability_that_it_was_drawn_with(writer, outputs, tmp_path):
    before = {name: value.clone() for name, value in writer.engine.module.state_dict().items()}
    data = {name: Ragged([o.trajectory[name] for o in outputs]) for name in outputs[0].trajectory}
    data = writer.with_old(data | {"advantages": torch.tensor([[1.0, 1.0], [-0.5, -0.5]])})
    metrics = writer.train(data, first=True)
    assert metrics["rollout_ratio_max_dev"] < 1e-5 and metrics["ratio_max_dev"] < 1e-5
    assert metrics["grad_norm"] > 0 and metrics["length"] == 11 * 22 + 2
    assert writer.train(data, first=False)["ratio_max_dev"] > 1e-3
    after = writer.engine.module.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved and all(name.startswith(("model.language_model.", "lm_head.")) for name in moved)

    writer.save(str(tmp_path))
    export = tmp_path / "rewriter/export"
    kept = GlmImageForConditionalGeneration.from_pretrained(export)
    assert all(torch.equal(value, after[name]) for name, value in kept.state_dict().items()), "what stays as it was too"
    assert kept.generation_config.top_k == 1, "the folder's own, as it was"
    assert load_file(export / "model.safetensors").keys() == before.keys()


@pytest.mark.slow
def test_probabilities_are_those_of_transformers(outputs):
    """Token by token with a cache, as it counts positions itself, without our code. The nucleus is left out: both
    probabilities are compared on the tokens in it."""
    model = GlmImageForConditionalGeneration.from_pretrained(
        tiny_checkpoint("GlmImagePipeline") / "vision_language_encoder"
    )
    grids = torch.tensor([[1, 1, 2], [1, 11, 22]])
    seen, call = [], model.model.language_model.forward

    def recorded(*args, position_ids=None, **kwargs):
        seen.append(position_ids[:, 0])
        return call(*args, position_ids=position_ids, **kwargs)

    model.model.language_model.forward = recorded
    for output in outputs:
        seen.clear()
        prompt, text = output.trajectory["text_prompt_ids"], output.trajectory["text_ids"]
        forced = iter(text.tolist())

        def next_one(input_ids, logits, forced=forced):
            return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([next(forced)]), 0.0)

        with torch.no_grad():
            told = model.generate(
                input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None], image_grid_thw=grids,
                images_per_sample=torch.tensor([2]), max_new_tokens=len(text), do_sample=False, top_k=50,
                logits_processor=[next_one], return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        assert torch.equal(told.sequences[0, len(prompt) :], text)
        counted = torch.cat(seen, dim=1).T
        assert torch.equal(output.trajectory["text_positions"][: len(counted)], counted)
        log_probs = torch.stack(told.logits, 1)[0].log_softmax(-1)
        nucleus = output.trajectory["text_nucleus"]
        kept = ((nucleus[..., None] >> torch.arange(7, -1, -1)) & 1).flatten(-2).bool()
        expected = log_probs.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, text[:, None])[:, 0]
        torch.testing.assert_close(output.trajectory["text_log_probs"], expected, atol=5e-5, rtol=0)


def test_positions_are_those_of_the_preview_and_then_of_the_image():
    assert positions(2, [(1, 2), (2, 1)]).tolist() == [
        [0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 3, 2], [4, 4, 4], [4, 4, 5]
    ]  # fmt: skip


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_that_diffusers_writes(process_group):
    """The tiny folder's own settings are to take the likeliest one."""
    pipe = GlmImagePipeline.from_pretrained(tiny_checkpoint("GlmImagePipeline"), transformer=None)
    for output, prompt in zip(rewriter().rollout.write_batch(requests(0.0)), PROMPTS, strict=True):
        expected, *_ = pipe.generate_prior_tokens(prompt, *SIZE)
        each = expected.reshape(2, 4)[::2, ::2].flatten()  # of which the decoder is told four times
        assert output.response == " ".join(str(token) for token in each.tolist())


ALONE = [pytest.param(one, marks=pytest.mark.slow) for one in ("rewriter", "generator")]


@pytest.mark.parametrize("train", ["both", *ALONE])
def test_a_run(tmp_path, monkeypatch, train):
    """Each of the two learns, or stays as it is; before the first update both have drawn what they replay."""
    model = tiny_checkpoint("GlmImagePipeline")
    own = [f"{REWRITER}.path={model}/vision_language_encoder", f"{REWRITER}.train={train}", f"{REWRITER}.lr=0.01"]
    own.append(f"{REWRITER}.val_temperature=1.0")
    few = ["trainer.total_training_steps=1", "actor_rollout_ref.rollout.n=2"]
    run_here(settings(tmp_path / "run", *own, *few, model=model), tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")[1]
    if train != "generator":
        assert told["actor/rewriter/first_ratio_max_dev"] < 1e-5 and told["actor/rewriter/grad_norm"] > 0
        assert told["actor/rewriter/length"] == 16 * 16 + 1
    if train != "rewriter":
        assert told["actor/first_ratio_max_dev"] < 1e-6 and told["actor/grad_norm"] > 0
    files = {
        "transformer/diffusion_pytorch_model.safetensors": ("export", train != "rewriter"),
        "vision_language_encoder/model.safetensors": ("rewriter/export", train != "generator"),
    }
    for name, (place, learns) in files.items():
        before = load_file(model / name)
        exported = tmp_path / "run/global_step_1" / place
        after = load_file(exported / (name if place == "export" else "model.safetensors"))
        assert learns == any(not torch.equal(value.float(), after[key].float()) for key, value in before.items())
    shown = tmp_path / "run/validation/step_1"
    rows = [json.loads(line) for line in (shown / "samples.jsonl").read_text().splitlines()]
    painter = Painter(find_weights(tmp_path / "run"), {}, "cpu")
    drawn = painter.draw([row["prompt"] for row in rows], [row["seed"] for row in rows])
    for one, row in zip(drawn, rows, strict=True):  # from the trained model's tokens, and no text
        theirs = torch.from_numpy(np.array(Image.open(shown / row["image"]))).permute(2, 0, 1)
        assert (one.response.int() - theirs.int()).abs().max() <= 1 and one.told == {}
    if train != "generator":
        before = Painter(find_weights(model), drawing_settings(find_weights(tmp_path / "run")), "cpu")
        (untrained,) = before.draw([rows[0]["prompt"]], [rows[0]["seed"]])
        assert not torch.equal(untrained.response, drawn[0].response)


@pytest.mark.parametrize(
    ("architecture", "override", "said"),
    [
        ("QwenImagePipeline", "train=both", "writes tokens of images, which GlmImagePipeline draws, and the model"),
        ("GlmImagePipeline", "system=hello", "rewriter.system=hello has no effect on"),
        ("GlmImagePipeline", "max_new_tokens=9", "as many as their size asks for: leave it out"),
    ],
)
def test_what_is_refused(tmp_path, architecture, override, said):
    writer = f"{REWRITER}.path={tiny_checkpoint('GlmImagePipeline')}/vision_language_encoder"
    arguments = settings(tmp_path, writer, f"{REWRITER}.{override}", model=tiny_checkpoint(architecture))
    with pytest.raises(ValueError, match=said):
        local_config(arguments)
