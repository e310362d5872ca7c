"""The language model of "think, then draw": a small Qwen2 that mostly repeats the prompt that it is to rewrite.

    python -m verl_omni.quickstart.language_model --out model

It is one of transformers' own classes, trained from scratch on the training numbers, in a minute or two on a CPU. Three
times of ten it writes a number as digits, of which some are wrong: to find out that this is worth it is left for
reinforcement learning.
"""

import dataclasses
import random
from pathlib import Path

import torch

from verl_omni.quickstart import task
from verl_omni.quickstart.made import made_whole, write_recipe
from verl_omni.testing.tiny_text import language_model, qwen_tokenizer
from verl_omni.utils.options import Parser, at_least

# ChatML, without a system message of its own.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    seed: int = 0
    hidden_size: int = 64
    layers: int = 2
    steps: int = 600
    batch: int = 64
    lr: float = 2e-3
    digits: float = 0.3  # of the answers; all others repeat the prompt
    wrong: float = 0.1  # of the digits


def build_language_model(out: str | Path, recipe: Recipe | None = None) -> Path:
    """Train it into the folder `out`, for `AutoModelForCausalLM.from_pretrained`."""
    out, recipe = Path(out), recipe or Recipe()
    numbers, _ = task.split_numbers()
    tokenizer = qwen_tokenizer(["user assistant\n", *(task.words_prompt(number) for number in numbers)])
    tokenizer.chat_template = TEMPLATE
    with made_whole(out) as folder, torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = language_model(tokenizer, recipe.hidden_size, recipe.layers)
        _train(model, tokenizer, numbers, recipe)
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
        model.to(torch.float16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_recipe(folder, dataclasses.asdict(recipe))
    return out


def written(folder: str | Path, numbers: list[str]) -> list[str]:
    """What it writes for each number, always the likeliest token: by transformers' own `generate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    asked = tokenizer([_asked(tokenizer, number) for number in numbers], return_tensors="pt", padding=True)
    whole = model.generate(**asked, max_new_tokens=16, do_sample=False)
    return tokenizer.batch_decode(whole[:, asked.input_ids.shape[1] :], skip_special_tokens=True)


def _asked(tokenizer, number: str) -> str:
    messages = [{"role": "user", "content": task.words_prompt(number)}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _answer(number: str, recipe: Recipe, rng: random.Random) -> str:
    if rng.random() >= recipe.digits:
        return task.words_prompt(number)
    return task.prompt_for("".join(rng.choice("0123456789") if rng.random() < recipe.wrong else d for d in number))


def _train(model: torch.nn.Module, tokenizer, numbers: list[str], recipe: Recipe) -> None:
    """Next-token prediction, on what it is to write only."""
    asked = [tokenizer(_asked(tokenizer, number)).input_ids for number in numbers]
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr)
    rng = random.Random(recipe.seed)
    model.train()
    for _ in range(recipe.steps):
        chosen = rng.sample(range(len(numbers)), recipe.batch)
        texts = {i: f"{_answer(numbers[i], recipe, rng)}<|im_end|>" for i in chosen}
        answers = {i: tokenizer(text).input_ids for i, text in texts.items()}
        longest = max(len(asked[i]) + len(answers[i]) for i in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        labels, real = torch.full_like(ids, -100), torch.zeros_like(ids)
        for row, i in enumerate(chosen):
            begin, end = len(asked[i]), len(asked[i]) + len(answers[i])
            ids[row, :end] = torch.tensor(asked[i] + answers[i])
            labels[row, begin:end], real[row, :end] = ids[row, begin:end], 1
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=real, labels=labels).loss.backward()
        optimizer.step()
    model.eval()


def main() -> None:
    parser = Parser(description="Train the language model of think-then-draw from scratch.")
    parser.add_argument("--out", required=True, help="folder to write, for AutoModelForCausalLM.from_pretrained")
    parser.add_argument("--steps", type=at_least(1), default=Recipe.steps, help="training steps (%(default)s)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be 1 or more")
    try:
        out = build_language_model(args.out, dataclasses.replace(Recipe(), steps=args.steps))
    except FileExistsError as error:
        parser.error(str(error))
    _, held_out = task.split_numbers()
    texts = written(out, held_out)
    right = sum(text == task.prompt_for(number) for text, number in zip(texts, held_out, strict=True))
    print(f"{out}: of {len(held_out)} numbers that it was not trained on it writes {right} as digits")


if __name__ == "__main__":
    main()
