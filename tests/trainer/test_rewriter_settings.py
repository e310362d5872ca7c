"""What a rewriter cannot do is refused in one line, before a worker starts."""

import dataclasses
import json
import re
from importlib.util import spec_from_file_location

import pytest
from refusals import refused
from tiny_language_model import REWRITER, rewriting, tokenizer_of_texts
from tiny_models import tiny_checkpoint
from transformers import AutoConfig

from verl_omni.config import RewriterConfig
from verl_omni.pipelines.causal_lm import load_tokenizer, tokenize
from verl_omni.testing.tiny_image_text import image_text_model
from verl_omni.trainer.checks.rewriter import check_prompts
from verl_omni.workers.rollout.vllm_rollout import texts

OWN = rewriting()[:1]
OLD = "actor_rollout_ref.actor.old_log_probs=recompute"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{REWRITER}.path=nowhere"], "rewriter.path=.nowhere. holds no config.json"),
        ([f"{REWRITER}.path={tiny_checkpoint() / 'transformer'}"], "has no AutoModelForCausalLM of"),
        ([f"{REWRITER}.lr=0.1"], "rewriter.lr=0.1 has no effect with actor_rollout_ref.rewriter.path=null"),
        ([*OWN, "trainer.mode=separate"], "trainer.mode=separate: a rewriter writes in the training workers"),
        ([*OWN, "trainer.mode=fully_async"], "trainer.mode=fully_async: a rewriter writes in the training workers"),
        ([*OWN, "actor_rollout_ref.model.algorithm=diffusion_nft"], "has no effect with algorithm.trainer_type=direct"),
        ([*OWN, "actor_rollout_ref.rollout.algo.branches=2"], "branches=2: images that part from one state"),
        ([*OWN, f"{REWRITER}.template=hello"], "expected a text with {prompt} in it"),
        ([*OWN, f"{REWRITER}.format='(a'"], "is no regular expression"),
        ([*OWN, f"{REWRITER}.format_reward=2"], "has no effect with actor_rollout_ref.rewriter.format=null"),
        ([*OWN, f"{REWRITER}.train=rewriter", "actor_rollout_ref.actor.use_kl_loss=true"], "use_kl_loss=True has no"),
        ([*OWN, "actor_rollout_ref.model.path=null", f"{REWRITER}.train=generator"], "there is no generator, as"),
        ([*OWN, f"{REWRITER}.train=rewriter", OLD], "recompute is a pass over the generator, which stays as it is"),
        ([*OWN, "actor_rollout_ref.model.path=null", OLD], "recompute is a pass over the generator"),
        ([*OWN, f"{REWRITER}.train=generator", f"{REWRITER}.clip_ratio=0.1"], "clip_ratio=0.1 has no effect"),
        ([*OWN, f"{REWRITER}.train=generator", f"{REWRITER}.loss=gspo"], "loss=gspo has no effect with"),
        ([*OWN, f"{REWRITER}.top_p=1.5"], "expected above 0, at most 1"),
        ([*OWN, f"{REWRITER}.rollout=vllm", f"{REWRITER}.top_p=0.9"], "top_p=0.9: training has to know the words"),
        ([f"{REWRITER}.rollout=vllm"], "rewriter.rollout=vllm has no effect with actor_rollout_ref.rewriter.path=null"),
    ],
)
def test_refused(overrides, expected):
    assert re.search(expected, refused(*overrides))


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (None, "rollout=vllm: vllm is not installed here; type make vllm-texts .* or set .*rollout=transformers"),
        ("__init__.py", "rollout=vllm: vllm is installed here without its kernels for the CPU; type make vllm-texts"),
    ],
)
def test_without_vllm_or_its_kernels(tmp_path, monkeypatch, there, expected):
    if there is not None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / there).touch()
    found = None if there is None else spec_from_file_location("vllm", tmp_path / "vllm" / there)
    monkeypatch.setattr(texts, "find_spec", lambda name: found)
    assert re.search(expected, refused(*OWN, f"{REWRITER}.rollout=vllm"))


def test_vllm_writes_with_models_of_text_alone(tmp_path):
    model, tokenizer = image_text_model("qwen2_vl", tokenizer_of_texts()), tokenizer_of_texts()
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    line = refused(f"{REWRITER}.path={tmp_path}", f"{REWRITER}.rollout=vllm")
    assert re.search("rollout=vllm writes with models of text alone, and .* is another: set .*=transformers", line)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llava", "is a llava, a model of images and text that is not supported: give .* or one of qwen2_vl, qwen"),
        ("qwen2_5_omni", "of which the thinker writes text: give a folder of it alone, as `Qwen2_5OmniThinker"),
        ("clip", "is a clip, which transformers has no AutoModelForCausalLM of: give a language model"),
    ],
)
def test_models_that_write_no_text_here(tmp_path, kind, expected):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert re.search(expected, refused(f"{REWRITER}.path={tmp_path}"))


def test_prompts_that_vllm_has_no_room_for():
    """Whatever the diffusion model would take."""
    config = RewriterConfig(path=OWN[0].partition("=")[2], rollout="vllm", max_new_tokens=8)
    most = texts.longest_text(config, AutoConfig.from_pretrained(config.path))
    tokens = len(tokenize(load_tokenizer(config.path), "7 " * 100, config.template, config.system))
    assert tokens + 8 < most
    check_prompts(config, ["7 " * 100, "a cat"])
    with pytest.raises(ValueError, match=rf"is longer than the {most} that there is room for; .*begins with '7 7 "):
        check_prompts(config, ["a cat", "7 " * most])
    check_prompts(dataclasses.replace(config, rollout="transformers"), ["7 " * most])
