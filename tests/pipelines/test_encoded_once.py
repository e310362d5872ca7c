"""Text and given images are encoded once: for all samples of a prompt, and images for every text beside them."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from test_architectures import (
    PROMPTS,
    TABLE,
    Architecture,
    as_param,
    config,
    generate,
    picture,
    rollout,
    small_references,
)

__all__ = ["small_references"]  # a fixture: upstream's references are of 1024 x 1024 pixels

TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3")


@contextlib.contextmanager
def counted(pipe) -> Iterator[Counter]:
    """Calls of a pipeline's encoders while it lasts, told by the modules themselves."""
    found, hooks = Counter(), []
    for name in (*TEXT, "image_encoder"):
        if isinstance(module := getattr(pipe, name, None), torch.nn.Module):
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: found.update([name])))
    vae, encode = pipe.vae, pipe.vae.encode
    with mock.patch.object(vae, "encode", side_effect=lambda *a, **k: (found.update(["vae"]), encode(*a, **k))[1]):
        yield found
    for hook in hooks:
        hook.remove()


def slow(row: Architecture) -> Any:
    return pytest.param(row, id=row.name, marks=pytest.mark.slow)


def texts(found: Counter) -> dict[str, int]:
    return {name: count for name, count in found.items() if name in TEXT}


OFTEN = ("QwenImagePipeline", "QwenImageEditPlusPipeline", "FluxKontextPipeline")


@pytest.mark.parametrize("row", [as_param(row) if row.name in OFTEN else slow(row) for row in TABLE])
def test_text_and_images_are_encoded_once(row):
    """For all samples of a prompt; an image for all texts beside it too, as those that a rewriter writes."""
    engine = rollout(config(row, cfg=True))
    halves = 2 if engine.adapter.cfg_scale(engine.model_config) > 1 else 1  # with the negative prompt
    row = dataclasses.replace(row, images=row.images and row.images[:1] * 3)
    with counted(engine.pipe) as found:
        for _ in range(2):
            (output, *_) = generate(row, engine, [PROMPTS[0]] * 3)
    assert texts(found) and set(texts(found).values()) == {halves}
    of_images = ("reference", "frame", "image")
    given = {k for k in output.conditions if any(word in k for word in of_images) and k != "image_tokens"}
    assert found["vae"] == bool(row.images) == bool(given) and found["image_encoder"] in (0, 1)
    assert not any(name.startswith("negative_") for name in given), "both halves have the same"
    if row.images:
        with counted(engine.pipe) as found:
            generate(row, engine, [PROMPTS[1], "a dog", PROMPTS[1]])
        assert found["vae"] == found["image_encoder"] == 0 and set(texts(found).values()) == {2}
        other = dataclasses.replace(row, images=[[picture(8, 8, 9)]])
        with counted(engine.pipe) as found:
            generate(other, engine, PROMPTS[:1])
        assert found["vae"] == 1 and texts(found) == ({"text_encoder": 2} if engine.adapter.tokenizes_images else {})
