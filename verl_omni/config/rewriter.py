"""Knobs of the rewriter: a language model that writes the prompt which the generator draws."""

from dataclasses import dataclass

from verl_omni.config.knob import MOST_PROMPTS, MOST_TOKENS, knob

REWRITER = "actor_rollout_ref.rewriter.path"


@dataclass
class RewriterConfig:
    path: str | None = knob(
        None,
        "folder of a language model (transformers' AutoModelForCausalLM, or Qwen-VL, asked in words), or its name on "
        "the Hugging Face hub, that "
        "rewrites each prompt before it is drawn, or GLM-Image's vision_language_encoder, which writes tokens of the "
        "image; null: prompts are drawn as they are",
        needs="algorithm.trainer_type=policy_gradient",
    )
    train: str = knob(
        "both",
        "what learns from the reward: both, the rewriter (the generator stays as it is) or the generator",
        choices=("both", "rewriter", "generator"),
        needs=REWRITER,
    )
    rollout: str = knob(
        "transformers",
        "what writes: transformers, with the weights as they are trained, or vllm, with a copy beside them",
        choices=("transformers", "vllm"),
        needs=REWRITER,
    )
    loss: str = knob(
        "grpo",
        "grpo (each token has a ratio of its own) or gspo (one ratio for the whole text)",
        choices=("grpo", "gspo"),
        needs=REWRITER,
    )
    clip_ratio: float | None = knob(
        None,
        "clip range: ratios are kept within 1 -/+ this; null: the loss's own, 0.2 of grpo, of gspo 3e-4 below 1 and "
        "4e-4 above",
        above=0,
        needs=REWRITER,
    )
    lr: float = knob(
        1e-6,
        "learning rate of the rewriter; all else of its optimizer is as in actor.optim",
        above=0,
        needs=REWRITER,
        may_change=True,
    )
    micro_batch_size_per_gpu: int = knob(
        8,
        "texts in one forward and backward: a memory knob only",
        least=1,
        most=MOST_PROMPTS,
        needs=REWRITER,
        may_change=True,
    )
    max_new_tokens: int = knob(
        128, "a text ends after so many tokens, if it has not before", least=1, most=MOST_TOKENS, needs=REWRITER
    )
    temperature: float = knob(1.0, "temperature of the texts that are trained on", above=0, needs=REWRITER)
    top_p: float = knob(
        1.0,
        "each token is one of the likeliest, which have this probability together; 1: any token",
        above=0,
        most=1,
        needs=REWRITER,
    )
    val_temperature: float = knob(
        0.0, "temperature in validation; 0: always the likeliest token", least=0, needs=REWRITER, may_change=True
    )
    system: str | None = knob(None, "system message before each prompt; null: none of our own", needs=REWRITER)
    template: str = knob("{prompt}", "what the rewriter is asked; {prompt} stands for the prompt", needs=REWRITER)
    format: str | None = knob(
        None,
        "regular expression that a whole text should match; of one with a group (?P<prompt>...) that part is drawn",
        needs=REWRITER,
    )
    format_reward: float = knob(
        1.0, "added to the reward of a text that matches", needs="actor_rollout_ref.rewriter.format"
    )
