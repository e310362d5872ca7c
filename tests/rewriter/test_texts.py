"""Texts that are written and replayed: exact probabilities, a random stream a text, no neighbour that matters."""

import asyncio
import dataclasses
import json
import shutil

import pytest
import torch
from hub_mirror import mirror  # noqa: F401
from tiny_language_model import language_model_folder
from transformers import AutoModelForCausalLM

from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
    RewriterConfig,
)
from verl_omni.pipelines.causal_lm import CAUSAL_LM, CausalLM, writer_of
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.utils import hub
from verl_omni.workers.columns import Ragged
from verl_omni.workers.rewriter import Rewriter
from verl_omni.workers.rollout.text_rollout import TextRequest, nucleus

PROMPTS = ["a cat", "a red cat on a green mat", "a small house in blue snow", "xyz"]


def rewriter(path: str | None = None, **settings) -> Rewriter:
    config = RewriterConfig(path=path or str(language_model_folder()), max_new_tokens=8, lr=0.01, **settings)
    actor = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(adv_clip_max=5.0))
    return Rewriter(config, actor, DiffusionRolloutConfig(max_num_seqs=4))


def requests(temperature: float = 1.0) -> list[TextRequest]:
    return [TextRequest(prompt, seed, temperature) for seed, prompt in enumerate(PROMPTS)]


def batch(outputs) -> dict:
    data = {name: Ragged([o.trajectory[name] for o in outputs]) for name in outputs[0].trajectory}
    return data | {"advantages": torch.tensor([[1.0, 1.0], [-0.5, -0.5], [2.0, 2.0], [0.3, 0.3]])[: len(outputs)]}


@pytest.fixture(scope="module")
def writer(process_group):
    return rewriter()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_p": 0.6, "temperature": 1.3}])
def test_training_gives_every_token_the_probability_that_it_was_drawn_with(process_group, settings):
    own = rewriter(**settings)
    outputs = own.rollout.write_batch(requests(settings.get("temperature", 1.0)))
    data = own.with_old(batch(outputs))
    lengths = [len(o.trajectory["text_ids"]) for o in outputs]
    metrics = own.train(data, first=True)
    assert metrics["rollout_ratio_max_dev"] < 1e-5 and metrics["ratio_max_dev"] < 1e-5
    assert metrics["length"] == pytest.approx(sum(lengths) / 4)
    assert metrics["grad_norm"] > 0 and metrics["lr"] == 0.01
    assert own.train(data, first=False)["ratio_max_dev"] > 1e-3  # the weights have moved


def test_one_that_is_named_on_the_hub_writes_the_same(writer, mirror):  # noqa: F811
    name = f"somebody/writer@{mirror.add('somebody/writer', language_model_folder())}"  # as a run's config has it
    hub.model_folder(name)  # as before a run
    found = rewriter(name).rollout.write_batch(requests())
    assert [o.response for o in found] == [o.response for o in writer.rollout.write_batch(requests())]


def test_probabilities_are_those_of_transformers(writer):
    """Of one text alone, in one pass over all of it, without a cache and without our code."""
    model = AutoModelForCausalLM.from_pretrained(language_model_folder(), dtype=torch.float32)
    for output in writer.rollout.write_batch(requests()):
        prompt, text = output.trajectory["text_prompt_ids"], output.trajectory["text_ids"]
        with torch.no_grad():
            logits = model(torch.cat([prompt, text])[None]).logits[0, len(prompt) - 1 : -1]
        expected = torch.distributions.Categorical(logits=logits).log_prob(text)
        torch.testing.assert_close(output.trajectory["text_log_probs"], expected, atol=1e-5, rtol=0)


def test_a_text_alone_is_the_same_text(writer):
    together = writer.rollout.write_batch(requests())
    for request, beside_others in zip(requests(), together, strict=True):
        (alone,) = writer.rollout.write_batch([request])
        assert alone.response == beside_others.response
        for name, value in alone.trajectory.items():
            torch.testing.assert_close(value, beside_others.trajectory[name], atol=1e-5, rtol=0)
    assert len({o.response for o in together}) > 1


def test_a_text_counts_the_same_beside_others(writer):
    """The gradient of four texts is the mean of theirs alone, however long the others are."""
    data = writer.with_old(batch(writer.rollout.write_batch(requests())))
    own = {n: v for n, v in data.items() if n.startswith("text_") or n == "advantages"}

    def gradient(rows: list[int]) -> torch.Tensor:
        part = {n: Ragged([v[i] for i in rows]) if isinstance(v, Ragged) else v[rows] for n, v in own.items()}
        writer.engine.optimizer_zero_grad()
        writer.engine.forward_backward_batch(part, writer.loss)
        return torch.cat([p.grad.flatten() for p in writer.engine.parameters.values()])

    alone = torch.stack([gradient([i]) for i in range(4)]).mean(0)
    torch.testing.assert_close(gradient([0, 1, 2, 3]), alone, atol=1e-6, rtol=1e-4)
    writer.engine.micro_batch_size = 3  # a memory knob only
    torch.testing.assert_close(gradient([0, 1, 2, 3]), alone, atol=1e-6, rtol=1e-4)


def test_a_seed_is_a_text_and_draws_follow_the_probabilities(writer):
    """4,000 first tokens, a seed each, against the model's own distribution."""
    many = [TextRequest("a cat", seed, 1.0) for seed in range(4000)]
    short = dataclasses.replace(writer.config, max_new_tokens=1)
    writer.rollout.config = short
    found = writer.rollout.write_batch(many)
    again = writer.rollout.write_batch(many[:3])
    assert [o.response for o in again] == [o.response for o in found[:3]]
    tokens = torch.tensor([o.trajectory["text_ids"][0] for o in found])
    model = AutoModelForCausalLM.from_pretrained(language_model_folder(), dtype=torch.float32)
    with torch.no_grad():
        p = model(found[0].trajectory["text_prompt_ids"][None]).logits[0, -1].softmax(0)
    share = torch.bincount(tokens, minlength=len(p)) / len(tokens)
    assert ((share - p).abs() < 5 * (p * (1 - p) / len(tokens)).sqrt() + 1e-3).all()
    writer.rollout.config = writer.config


def test_the_likeliest_token_is_transformers_own_choice(writer):
    model = AutoModelForCausalLM.from_pretrained(language_model_folder(), dtype=torch.float32)
    for output in writer.rollout.write_batch(requests(temperature=0.0)):
        prompt, text = output.trajectory["text_prompt_ids"], output.trajectory["text_ids"]
        with torch.no_grad():
            logits = model(torch.cat([prompt, text])[None]).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == text.tolist()


def test_the_chat_template_is_used(writer):
    tokenizer = writer.rollout.tokenizer
    own = dataclasses.replace(writer.config, template="Improve: {prompt}", system="You paint.")
    writer.rollout.config = own
    (output,) = writer.rollout.write_batch(requests()[:1])
    asked = tokenizer.decode(output.trajectory["text_prompt_ids"])
    assert asked == (
        "<|im_start|>system\nYou paint.<|im_end|>\n<|im_start|>user\nImprove: a cat<|im_end|>\n<|im_start|>assistant\n"
    )
    writer.rollout.config = writer.config


def test_nucleus():
    p = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    assert nucleus(p.log(), 0.5).tolist() == [[False, True, False, False]]
    assert nucleus(p.log(), 0.6).tolist() == [[False, True, False, True]]
    assert nucleus(p.log(), 0.95).tolist() == [[True, True, True, True]]


def test_requests_of_a_burst_are_one_batch(writer):
    sizes, work = [], writer.rollout.batcher.work

    def counted(items):
        sizes.append(len(items))
        return work(items)

    writer.rollout.batcher.work = counted

    async def ask():
        return await asyncio.gather(
            *(writer.rollout.write("a cat", seed, 1.0, (seed, 6, "burst")) for seed in reversed(range(6)))
        )

    texts = asyncio.run(ask())
    assert sizes == [4, 2] and len({t.response for t in texts}) > 1


def test_generation_settings_that_transformers_would_not_write_are_kept_as_they_are(tmp_path):
    folder = shutil.copytree(language_model_folder(), tmp_path / "own")
    odd = '{"eos_token_id": 1, "temperature": 0.6, "top_p": 0.9}'  # without do_sample
    (folder / "generation_config.json").write_text(odd)
    model_config = DiffusionModelConfig(path=str(folder), architecture=CAUSAL_LM)
    model = CausalLM.load_module(model_config, torch.float32)
    CausalLM.write_part(model_config, model, model.state_dict(), str(tmp_path / "export/rewriter"))
    assert (tmp_path / "export/generation_config.json").read_text() == odd
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")


def test_a_writer_says_itself_which_folders_are_its_own(tmp_path, monkeypatch):
    class Mine(CausalLM):
        model_types = ("my_type",)
        drawn_by = "MyPipeline"

    adapters = DiffusionModelBase.registry.adapters
    monkeypatch.setattr(DiffusionModelBase.registry, "adapters", dict(adapters))
    monkeypatch.setattr("verl_omni.utils.registry.registrations", {})  # no worker is to import this file
    DiffusionModelBase.register("MyWriter")(Mine)
    found = {}
    for kind in ("my_type", "glm_image", "llama"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        architecture, adapter = writer_of(str(tmp_path))
        found[kind] = (architecture, adapter.drawn_by)
    assert found == {
        "my_type": ("MyWriter", "MyPipeline"),
        "glm_image": ("GlmImageForConditionalGeneration", "GlmImagePipeline"),
        "llama": (CAUSAL_LM, None),
    }
