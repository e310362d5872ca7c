"""Qwen2-VL's processor without its video half, which does not even load where torchvision is missing."""

import functools


@functools.cache
def image_text_processor() -> type:
    """A `transformers.Qwen2VLProcessor` for images only. It is saved as, and loads, what it stands for."""
    from transformers import Qwen2VLProcessor
    from transformers.processing_utils import ProcessorMixin

    class ImageTextProcessor(Qwen2VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    ImageTextProcessor.__name__ = Qwen2VLProcessor.__name__
    ImageTextProcessor.__module__ = Qwen2VLProcessor.__module__
    return ImageTextProcessor
