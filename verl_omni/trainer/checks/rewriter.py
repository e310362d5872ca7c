"""Whether a rewriter can write for this run, found before a worker starts."""

import re
from collections.abc import Iterable
from pathlib import Path

from verl_omni.config import RewriterConfig
from verl_omni.config.knob import typed
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.causal_lm import CausalLM, load_tokenizer, tokenize, writer_of
from verl_omni.pipelines.image_text import KINDS
from verl_omni.utils.hub import model_folder
from verl_omni.utils.json_files import read_object
from verl_omni.utils.model_code import refuse_code
from verl_omni.workers.rollout import engine_class
from verl_omni.workers.rollout.vllm_rollout.texts import INSTALL, longest_text, missing, too_long

WHERE = "actor_rollout_ref.rewriter"
VLLM, TRANSFORMERS = f"{WHERE}.rollout=vllm", f"set {WHERE}.rollout=transformers"
# A whole Qwen-Omni speaks too; transformers saves this part of it by itself.
OMNI, THINKER = "qwen2_5_omni", "Qwen2_5OmniThinkerForConditionalGeneration"


def check_rewriter(settings: DiffusionTrainerConfig) -> None:
    rewriter = settings.actor_rollout_ref.rewriter
    if rewriter.path is None:
        return
    folder = _check_folder(rewriter.path)
    _, writer = writer_of(str(folder))
    if writer.drawn_by is not None:
        _check_image_tokens(settings, writer.drawn_by)
    else:
        _check_language_model(folder, rewriter.path)
    if "{prompt}" not in rewriter.template:
        raise ValueError(f'{WHERE}.template="{rewriter.template}": expected a text with {{prompt}} in it')
    if rewriter.format is not None:
        try:
            re.compile(rewriter.format)
        except re.error as error:
            raise ValueError(f'{WHERE}.format="{rewriter.format}" is no regular expression: {error}') from None
    for setting, value, wanted, why in _not_yet(settings):
        if value != wanted:
            raise ValueError(f"{setting}={value}: {why}; set {setting}={typed(wanted)}, or leave {WHERE}.path out")
    _check_what_learns(settings)
    if rewriter.rollout == "vllm":
        _check_vllm(rewriter, writer)


def check_prompts(rewriter: RewriterConfig, prompts: Iterable[str]) -> None:
    """vLLM has room for the longest of them, and says so before a run rather than in the midst of it."""
    if rewriter.path is None or rewriter.rollout != "vllm":
        return
    from transformers import AutoConfig

    folder = str(_check_folder(rewriter.path))
    tokenizer, longest = load_tokenizer(folder), longest_text(rewriter, AutoConfig.from_pretrained(folder))
    for prompt in prompts:
        tokens = len(tokenize(tokenizer, prompt, rewriter.template, rewriter.system))
        if line := too_long(tokens, rewriter, longest):
            raise ValueError(f"{line} (it begins with {prompt[:40]!r})")


def _check_folder(path: str) -> Path:
    setting = f"{WHERE}.path"
    folder = Path(model_folder(path, weights=False, setting=setting)).expanduser()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f'{setting}="{path}" holds no config.json: give the folder of a language model, as transformers\' '
            "`model.save_pretrained(folder)` and `tokenizer.save_pretrained(folder)` write it"
        )
    refuse_code(folder)
    return folder


def _check_image_tokens(settings: DiffusionTrainerConfig, drawn_by: str) -> None:
    """It writes no text: settings of texts say nothing."""
    rewriter, architecture = settings.actor_rollout_ref.rewriter, settings.actor_rollout_ref.model.architecture
    if architecture != drawn_by:
        raise ValueError(
            f'{WHERE}.path="{rewriter.path}" writes tokens of images, which {drawn_by} draws, and the model is a '
            f"{architecture}: give a language model"
        )
    for name in ("max_new_tokens", "system", "template", "format"):
        value = getattr(rewriter, name)
        if value != getattr(RewriterConfig, name):
            raise ValueError(
                f"{WHERE}.{name}={value} has no effect on {rewriter.path}, which writes tokens of images, as many as "
                "their size asks for: leave it out"
            )


def _check_language_model(folder: Path, path: str) -> None:
    """Of a kind whose texts have been compared with transformers' own, with a tokenizer."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    setting, kind = f"{WHERE}.path", read_object(folder / "config.json").get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in KINDS:
        known = f"a language model (AutoModelForCausalLM) or one of {', '.join(KINDS)}"
        if kind == OMNI:
            why = f"of which the thinker writes text: give a folder of it alone, as `{THINKER}.save_pretrained` writes"
        elif kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            why = f"a model of images and text that is not supported: give {known}"
        else:
            why = f"which transformers has no AutoModelForCausalLM of: give {known}"
        raise ValueError(f'{setting}="{path}" is a {kind!s:.60}, {why}')
    if not (folder / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f'{setting}="{path}" holds no tokenizer: `tokenizer.save_pretrained(folder)` writes it')


def _check_vllm(rewriter: RewriterConfig, writer: type[CausalLM]) -> None:
    if writer is not CausalLM:
        raise ValueError(f"{VLLM} writes with models of text alone, and {rewriter.path} is another: {TRANSFORMERS}")
    if rewriter.top_p != 1:
        raise ValueError(
            f"{WHERE}.top_p={rewriter.top_p}: training has to know the words that each was chosen from, which vLLM "
            f"does not tell; leave top_p out, or {TRANSFORMERS}"
        )
    what = missing()
    if what is not None:
        raise ValueError(f"{VLLM}: {what}; type {INSTALL}, or {TRANSFORMERS}")


def _check_what_learns(settings: DiffusionTrainerConfig) -> None:
    """Passes over a generator that does not learn would be for nothing, and so is how a rewriter would learn."""
    rewriter, actor = settings.actor_rollout_ref.rewriter, settings.actor_rollout_ref.actor
    if rewriter.train == "rewriter":
        asked = {"use_kl_loss": actor.use_kl_loss, "ema_decay": actor.ema_decay, "teacher.path": actor.teacher.path}
        for name, value in asked.items():
            if value:
                raise ValueError(
                    f"actor_rollout_ref.actor.{name}={value} has no effect with {WHERE}.train=rewriter, where the "
                    "generator stays as it is: leave it out"
                )
        if actor.old_log_probs == "recompute":
            raise ValueError(
                f"actor_rollout_ref.actor.old_log_probs=recompute is a pass over the generator, which stays as it is "
                f"with {WHERE}.train=rewriter: leave it out, or set train, which is one over the texts"
            )
    if rewriter.train == "generator":
        for name in ("loss", "clip_ratio"):  # a recipe's learning rate waits for the day when it learns again
            value = getattr(rewriter, name)
            if value != getattr(RewriterConfig, name):
                raise ValueError(
                    f"{WHERE}.{name}={value} has no effect with {WHERE}.train=generator, where the rewriter stays as "
                    "it is: leave it out"
                )


def _not_yet(settings: DiffusionTrainerConfig) -> list[tuple[str, object, object, str]]:
    """(setting, its value, the only one that goes with a rewriter, why)."""
    arr, correction = settings.actor_rollout_ref, settings.algorithm.rollout_correction
    copies = engine_class(arr.rollout.name).has_a_copy
    own = "a rewriter writes in the training workers"
    return [
        ("trainer.mode", settings.trainer.mode, "colocated", own),
        ("actor_rollout_ref.rollout.name", arr.rollout.name, "diffusers" if copies else arr.rollout.name, own),
        ("actor_rollout_ref.actor.strategy", arr.actor.strategy, "fsdp2", "a rewriter is trained by FSDP2"),
        (
            "actor_rollout_ref.actor.checkpoint.async_save",
            arr.actor.checkpoint.async_save,
            False,
            "two models are not written while training goes on",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
            arr.actor.fsdp_config.ulysses_sequence_parallel_size,
            1,
            "a text is not shared between ranks",
        ),
        (
            "actor_rollout_ref.rollout.algo.branches",
            arr.rollout.algo.branches,
            None,
            "images that part from one state have one prompt, and a rewriter writes one for each",
        ),
        ("actor_rollout_ref.rollout.pool.size", arr.rollout.pool.size, None, "a pool would be written twice"),
        *(
            (f"algorithm.rollout_correction.{name}", getattr(correction, name), None, "it weighs denoising steps alone")
            for name in ("rollout_is", "rollout_rs")
        ),
    ]
