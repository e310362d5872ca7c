import pytest


@pytest.fixture(scope="package", autouse=True)
def in_a_process_group(process_group):
    """Every test of this folder builds engines."""


@pytest.fixture(scope="package", autouse=True)
def image_tokens_are_written_once():
    """GLM-Image writes some 260 tokens before it draws. Nobody trains what writes them: the same come each time."""
    from diffusers import GlmImagePipeline

    from verl_omni.pipelines.glm_image import adapter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "written_tokens", remembered(adapter.written_tokens))
        patch.setattr(
            GlmImagePipeline, "generate_prior_tokens", remembered(GlmImagePipeline.generate_prior_tokens, "generator")
        )
        yield


def remembered(function, *beside: str):
    """By what it is asked beside its first argument, which is a model of one tiny checkpoint."""
    answers = {}

    def ask(model, *args, **kwargs):
        key = repr((args, [(name, value) for name, value in kwargs.items() if name not in beside]))
        if key not in answers:
            answers[key] = function(model, *args, **kwargs)
        return answers[key]

    ask.itself = function
    return ask
