"""Models of images and text that are asked in words: texts have the probabilities that transformers gives them."""

import re
from pathlib import Path

import pytest
import torch
from e2e_runs import metrics, run_here, settings
from test_texts import batch, requests, rewriter
from tiny_language_model import REWRITER, rewriting, tokenizer_of_texts
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from verl_omni.cli.writer import Writer
from verl_omni.pipelines.causal_lm import writer_of
from verl_omni.pipelines.image_text import IMAGE_TEXT, KINDS, ImageTextLM
from verl_omni.testing.tiny_image_text import image_text_model

OTHERS = [kind for kind in KINDS if kind != "qwen2_5_vl"]


def saved(kind: str, place: Path) -> Path:
    tokenizer = tokenizer_of_texts()
    torch.manual_seed(0)
    model = image_text_model(kind, tokenizer)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / "preprocessor_config.json").write_text("{}")
    return place


@pytest.fixture(scope="module", params=["qwen2_5_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def folder(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory.mktemp(request.param))


def test_texts_are_drawn_and_learned_from_as_transformers_has_their_probabilities(folder, process_group, tmp_path):
    """The rollout's are `generate`'s own scores; the first ratio is 1; after an update all of it is saved."""
    assert writer_of(str(folder)) == (IMAGE_TEXT, ImageTextLM)
    own = rewriter(str(folder))
    outputs = own.rollout.write_batch(requests())
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for output in outputs:
        prompt, text = output.trajectory["text_prompt_ids"], output.trajectory["text_ids"]
        forced = iter(text.tolist())

        def next_one(input_ids, logits, forced=forced):
            return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([next(forced)]), 0.0)

        with torch.no_grad():
            told = model.generate(
                input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=len(text),
                do_sample=False, logits_processor=[next_one], return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        assert torch.equal(told.sequences[0, len(prompt) :], text)
        expected = torch.stack(told.logits, 1)[0].log_softmax(-1).gather(1, text[:, None])[:, 0]
        torch.testing.assert_close(output.trajectory["text_log_probs"], expected, atol=1e-5, rtol=0)
    assert len({len(o.trajectory["text_prompt_ids"]) for o in outputs}) > 1

    before = {name: value.clone() for name, value in own.engine.module.state_dict().items()}
    data = own.with_old(batch(outputs))
    found = own.train(data, first=True)
    assert found["rollout_ratio_max_dev"] < 1e-5 and found["ratio_max_dev"] < 1e-5 and found["grad_norm"] > 0
    after = own.engine.module.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved and not [name for name in moved if re.search("visual|audio_tower", name)]

    own.save(str(tmp_path))
    export = tmp_path / "rewriter/export"
    kept = AutoModelForImageTextToText.from_pretrained(export).state_dict()
    assert kept.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in kept.items())
    assert (export / "preprocessor_config.json").is_file() and AutoTokenizer.from_pretrained(export).vocab_size
    again = Writer(own.config, export, torch.device("cpu"), torch.float32)  # that of `verl-omni sample`
    texts = [[o.response for o in one.rollout.write_batch(requests())] for one in (again, own)]
    assert texts[0] == texts[1] != [o.response for o in outputs]


@pytest.mark.slow
def test_the_thinker_of_a_whole_qwen_omni_is_saved_by_itself(tmp_path):
    """As docs/rewriter.md says."""
    thinker = image_text_model("qwen2_5_omni_thinker", tokenizer_of_texts())
    config = Qwen2_5OmniConfig(thinker_config=thinker.config.to_dict(), enable_audio_output=False)
    omni = Qwen2_5OmniForConditionalGeneration(config)
    omni.thinker.load_state_dict(thinker.state_dict())
    omni.save_pretrained(tmp_path / "omni")
    Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(tmp_path / "omni").save_pretrained(tmp_path / "thinker")
    assert writer_of(str(tmp_path / "thinker")) == (IMAGE_TEXT, ImageTextLM)
    kept = AutoModelForImageTextToText.from_pretrained(tmp_path / "thinker").state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in thinker.state_dict().items())


@pytest.mark.slow
def test_a_run_of_texts_alone(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text("def compute_score(text):\n    return text.count('a') / 10\n")
    without = [one for one in settings(tmp_path / "run") if not one.startswith("actor_rollout_ref.model.path")]
    arguments = [
        *without, *rewriting()[1:], f"{REWRITER}.path={saved('qwen2_5_vl', tmp_path / 'model')}",
        "reward.custom_reward_function.path=reward.py", "trainer.total_training_steps=2",
    ]  # fmt: skip
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    assert all(told[step]["actor/rewriter/first_ratio_max_dev"] < 1e-5 for step in (1, 2))
    AutoModelForImageTextToText.from_pretrained(tmp_path / "run/global_step_2/rewriter/export")
