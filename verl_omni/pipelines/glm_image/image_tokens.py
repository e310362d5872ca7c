"""What GLM-Image's autoregressive model writes before anything is drawn: a preview's tokens, then the image's.

Upstream draws them for one prompt from the global random numbers. Here samples share forwards, and each has random
numbers of its own, of which the first sample's are upstream's: the same tokens come from the same seed.
"""

from typing import Any

import torch

FACTOR = 32  # pixels a token of the image


def asked(processor: Any, prompt: str) -> list[int]:
    """Ids of the prompt in its template, up to where the size comes."""
    talk = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(talk, tokenize=False)
    return processor.tokenizer(text, add_special_tokens=not text.startswith(processor.bos_token)).input_ids


def target(processor: Any, height: int, width: int) -> tuple[list[int], list[tuple[int, int]]]:
    """(ids after the prompt that say how large, grids of the image and of its preview)."""
    told = processor(text=[""], target_h=height, target_w=width, add_special_tokens=False)
    return told["input_ids"][0], [(rows, columns) for _, rows, columns in told["image_grid_thw"].tolist()]


@torch.no_grad()
def written_tokens(
    model: Any, prompts: list[list[int]], grids: list[tuple[int, int]], codes: int, seeds: list[int]
) -> torch.Tensor:
    """The image's tokens (B, rows * columns), each below `codes`, drawn as the folder's generation_config says."""
    from transformers import GenerationConfig, LogitsProcessorList

    ids, real = left_padded(prompts, model.device)
    image, preview = (rows * columns for rows, columns in grids)
    whole = model.generate(
        input_ids=ids,
        attention_mask=real,
        **as_grids(grids, len(prompts), ids.device),
        logits_processor=LogitsProcessorList([*choices(model.generation_config, codes), Draws(seeds, ids.device)]),
        generation_config=GenerationConfig(  # the token has been drawn already
            max_new_tokens=preview + image, do_sample=False, temperature=1.0, top_k=50, top_p=1.0, pad_token_id=0
        ),
    )
    return whole[:, -image:]


def as_grids(grids: list[tuple[int, int]], samples: int, device: torch.device) -> dict[str, torch.Tensor]:
    """As the model is told of them: the same for each sample."""
    each = torch.tensor([(1, *grid) for grid in grids], device=device)
    return {
        "image_grid_thw": each.repeat(samples, 1),
        "images_per_sample": torch.full((samples,), len(grids), device=device),
    }


def positions(prompt: int, grids: list[tuple[int, int]]) -> torch.Tensor:
    """(tokens, 3): time, row and column of each token of a prompt of so many, of the preview and of the image, as the
    model counts them while it writes: it cannot tell them again from a whole text."""
    counted, at = [torch.arange(prompt)[:, None].expand(prompt, 3)], prompt
    for rows, columns in reversed(grids):
        each = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), torch.arange(rows), torch.arange(columns))
        counted.append(at + each)
        at += max(rows, columns)
    return torch.cat(counted)


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, L) that end in one column, and which of them are there."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    real = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        real[i, longest - len(prompt) :] = 1
    return ids, real


def choices(generation: Any, codes: int) -> list[Any]:
    """Which tokens can be drawn: those of the codebook, for any other has no place in an image, and of these the
    likeliest, as transformers narrows them where it samples."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    def of_the_codebook(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits[:, codes:] = -torch.inf
        return logits

    temperature, top_p = (1.0 if value is None else value for value in (generation.temperature, generation.top_p))
    top_k = 50 if generation.top_k is None else generation.top_k
    chosen: list[Any] = [of_the_codebook]
    if temperature != 1:
        chosen.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chosen.append(TopPLogitsWarper(top_p))
    return chosen


class Draws:
    """A logits processor after which the likeliest token is one that was drawn, each row's from its own seed."""

    def __init__(self, seeds: list[int], device: torch.device):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        each = zip(logits.softmax(-1), self.generators, strict=True)
        drawn = torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in each])
        return torch.full_like(logits, -torch.inf).scatter(1, drawn, 0.0)
