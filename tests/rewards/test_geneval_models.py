"""The geneval reward with tiny models of the real classes, against what transformers' own classes give."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessorPil,
    GroundingDinoProcessor,
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2ImageProcessorPil,
    Owlv2Processor,
    SwinConfig,
)

from verl_omni.rewards import check_settings, make_scorer
from verl_omni.rewards.scorers.geneval.tasks import COLOURS
from verl_omni.rewards.scorers.geneval.vision import ColourClassifier, ZeroShotDetector
from verl_omni.testing.tiny_text import clip_tokenizer

NAMES = ["cat", "traffic light"]
LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def clip_configs(tokenizer, image_size: int) -> dict:
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = LAYERS | ids | {"vocab_size": len(tokenizer), "max_position_embeddings": 77}
    vision = LAYERS | {"image_size": image_size, "patch_size": 8}
    return {"text_config": text, "vision_config": vision, "projection_dim": 16}


def spread(model):
    """Weights so wide that answers differ from box to box and from crop to crop."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An OWLv2, a Grounding DINO and a CLIP with random weights."""
    torch.manual_seed(0)
    made = {name: tmp_path_factory.mktemp(name) for name in ("owl", "dino", "clip")}
    tokenizer = clip_tokenizer()

    def save(name, model, processor):
        model.save_pretrained(made[name])
        processor.save_pretrained(made[name])

    owl = spread(Owlv2ForObjectDetection(Owlv2Config(**clip_configs(tokenizer, 64))))
    save("owl", owl, Owlv2Processor(Owlv2ImageProcessorPil(size={"height": 64, "width": 64}), tokenizer))
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    clip = spread(CLIPModel(CLIPConfig(**clip_configs(tokenizer, 32))))
    save("clip", clip, CLIPProcessor(CLIPImageProcessorPil(**sizes), tokenizer))

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *letters, *(f"##{letter}" for letter in letters)]
    bert = BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})
    dino = GroundingDinoForObjectDetection(
        GroundingDinoConfig(
            backbone_config=SwinConfig(
                image_size=64,
                embed_dim=8,
                depths=[1, 1, 1, 1],
                num_heads=[1, 2, 2, 2],
                window_size=4,
                out_features=["stage2", "stage3", "stage4"],
            ),
            text_config=BertConfig(vocab_size=len(pieces), max_position_embeddings=256, **LAYERS),
            d_model=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_queries=20,
        )
    )
    sizes = {"shortest_edge": 64, "longest_edge": 96}
    save("dino", dino, GroundingDinoProcessor(GroundingDinoImageProcessorPil(size=sizes), bert))
    return made


@pytest.fixture(autouse=True)
def resize_without_scipy(monkeypatch):
    """OWLv2's images are resized with torchvision or scipy, and neither has to be here. Pillow will do for tests."""

    def resize(self, image, size, *args, **kwargs):
        planes = [Image.fromarray(plane.astype(np.float32)).resize((size["width"], size["height"])) for plane in image]
        return np.stack([np.array(plane) for plane in planes])

    monkeypatch.setattr(Owlv2ImageProcessorPil, "resize", resize)
    monkeypatch.setattr("verl_omni.rewards.scorers.geneval.vision.importlib.util.find_spec", lambda name: True)


def picture(seed: int = 0, width: int = 80, height: int = 40) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def inside(box, width, height):
    """The part of a box within the image, and whether a pixel of it is left."""
    left, top, right, bottom = np.clip(box, 0, [width, height, width, height]).tolist()
    return (left, top, right, bottom), round(right) > round(left) and round(bottom) > round(top)


def check(seen, scores, labels, boxes, size):
    """Every box that is in the image is reported, with its class and score."""
    expected = []
    for score, label, box in zip(scores, labels, boxes, strict=True):
        part, there = inside(box, *size)
        expected += [(NAMES[label], score, part)] if there else []
    assert len(seen) == len(expected) > 3 and {one.name for one in seen} == set(NAMES)
    for one, (name, score, box) in zip(seen, expected, strict=True):
        assert one.name == name
        assert one.score == pytest.approx(float(score), abs=1e-5) and one.box == pytest.approx(box, abs=1e-3)


@pytest.mark.parametrize("size", [(80, 40), (40, 80), (64, 64)])
def test_owlv2_reports_boxes_of_the_padded_square_in_pixels(folders, size):
    """It sees the image in the corner of a square; a box has the class of its highest logit."""
    image = picture(1, *size)
    model, processor = (cls.from_pretrained(folders["owl"]) for cls in (Owlv2ForObjectDetection, Owlv2Processor))
    inputs = processor(text=[[f"a photo of a {name}" for name in NAMES]], images=image, return_tensors="pt")
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    logits, (x, y, w, h) = outputs.logits[0].double().numpy(), outputs.pred_boxes[0].double().numpy().T
    boxes = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 1) * max(size)
    seen = ZeroShotDetector(str(folders["owl"]))(image, NAMES)
    check(seen, 1 / (1 + np.exp(-logits.max(1))), logits.argmax(1), boxes, size)


@pytest.mark.parametrize("size", [(80, 40), (40, 80)])
def test_grounding_dino_reports_the_mean_over_the_tokens_of_a_class(folders, size):
    """[CLS] c a t . t r a f f i c l i g h t . [SEP]: to this tokenizer each letter is a token."""
    image = picture(2, *size)
    model = GroundingDinoForObjectDetection.from_pretrained(folders["dino"]).eval()
    processor = GroundingDinoProcessor.from_pretrained(folders["dino"])
    inputs = processor(text="cat. traffic light.", images=image, return_tensors="pt")
    assert inputs["input_ids"].shape == (1, 1 + 3 + 1 + 12 + 1 + 1)
    with torch.no_grad():
        outputs = model(**inputs)
    tokens = 1 / (1 + np.exp(-outputs.logits[0].double().numpy()))
    scores = np.stack([tokens[:, 1:4].mean(1), tokens[:, 5:17].mean(1)], 1)
    (own,) = processor.post_process_grounded_object_detection(outputs, threshold=-1, target_sizes=[size[::-1]])
    seen = ZeroShotDetector(str(folders["dino"]))(image, NAMES)
    check(seen, scores.max(1), scores.argmax(1), own["boxes"].numpy(), size)


def test_clip_names_the_colour_nearest_to_the_crop(folders):
    """By the embeddings that CLIPModel itself gives, which have length 1: those of three sentences are averaged."""
    image = picture(3, 10, 1).resize((80, 40), Image.Resampling.NEAREST)  # ten stripes, each of a colour
    boxes = [(0.4, 0.0, 30.6, 40.0), (20.0, 5.0, 80.0, 35.0), (50.0, 10.0, 52.0, 12.0)]
    boxes += [(float(x), 0.0, float(x + 8), 40.0) for x in range(0, 80, 8)]
    model, processor = CLIPModel.from_pretrained(folders["clip"]).eval(), CLIPProcessor.from_pretrained(folders["clip"])
    crops = [image.crop((round(a), round(b), round(c), round(d))) for a, b, c, d in boxes]
    directions = []
    for colour in COLOURS:
        said = [f"a photo of a {colour} bowl", f"a photo of a {colour}-colored bowl", f"a photo of a {colour} object"]
        with torch.no_grad():
            outputs = model(**processor(text=said, images=crops, padding=True, return_tensors="pt"))
        mean = outputs.text_embeds.double().numpy().mean(0)
        directions.append(mean / np.linalg.norm(mean))
    best = (outputs.image_embeds.double().numpy() @ np.stack(directions).T).argmax(1)
    classifier = ColourClassifier(str(folders["clip"]))
    expected = [COLOURS[i] for i in best]
    assert classifier(image, boxes, "bowl") == expected and len(set(expected)) > 1
    assert classifier(image, boxes[1:2], "bowl") == expected[1:2]  # from what it remembers of the class


# ---- the reward ----------------------------------------------------------------------------------------

TASK = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}]}


@pytest.mark.parametrize("detector", ["owl", "dino"])
def test_the_reward_from_image_to_answer(folders, detector):
    """Random models see a cat anywhere: with a threshold of 0 there is one, with 1 there is none."""
    models = {"detector": str(folders[detector]), "classifier": str(folders["clip"])}
    image = picture(4)
    (best, *_) = sorted(ZeroShotDetector(models["detector"])(image, ["cat"]), key=lambda one: -one.score)
    (colour,) = ColourClassifier(models["classifier"])(image, [best.box], "cat")
    others = [c for c in COLOURS if c != colour]
    right = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": colour}]}
    wrong = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": others[0]}]}
    scorer = make_scorer("geneval", models | {"threshold": 0.0, "max_objects": 1})
    answers = scorer([image] * 2, ["", json.dumps(wrong)], ["a photo"] * 2, [right, {"index": 1}])
    assert answers == [
        {"score": 1.0, "correct": 1.0, "tag": "colors", "reason": ""},
        {"score": 0.0, "correct": 0.0, "tag": "colors", "reason": f"expected {others[0]} cat>=1, found {colour}"},
    ]
    scorer = make_scorer("geneval", models | {"threshold": 0.0, "max_objects": 1, "score": "graded"})
    assert [a["score"] for a in scorer([image] * 2, ["", ""], ["", ""], [right, wrong])] == [1.0, 0.5]
    scorer = make_scorer("geneval", models | {"threshold": 1.0})
    assert scorer([image], [None], [""], [right])[0]["reason"] == "expected cat>=1, found 0"


def test_a_video_and_a_row_without_metadata_are_refused(folders):
    scorer = make_scorer("geneval", {"detector": str(folders["dino"]), "classifier": str(folders["clip"])})
    with pytest.raises(ValueError, match="looks at still images, and it was given a video"):
        scorer([[picture(), picture()]], [None], [""], [TASK])
    with pytest.raises(ValueError, match="needs the metadata of a prompt"):
        scorer([picture()], ["a cat"], ["a cat"], [{"index": 0}])


# ---- what cannot be loaded -----------------------------------------------------------------------------


def refused(**settings) -> str:
    with pytest.raises((ValueError, ImportError)) as error:
        make_scorer("geneval", settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_loaded_gets_one_line(folders, tmp_path):
    good = {"detector": str(folders["dino"]), "classifier": str(folders["clip"])}
    said = refused(**good | {"detector": str(tmp_path / "none")})
    assert f'reward.scorers.geneval.detector="{tmp_path}/none": expected a folder or a name on the hub' in said
    said = refused(**good | {"detector": str(folders["clip"])})
    assert 'geneval.detector="' in said and 'unknown kind of model "clip": known: grounding-dino, owlv2' in said
    said = refused(**good | {"classifier": str(folders["owl"])})
    assert 'geneval.classifier="' in said and 'unknown kind of model "owlv2": known: clip' in said
    assert 'geneval.device=gpu: expected "cuda", "cuda:<number>" or "cpu"' in refused(**good, device="gpu")


def test_weights_that_are_not_there_are_not_made_up(folders, tmp_path):
    for file in folders["clip"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    said = refused(detector=str(folders["dino"]), classifier=str(tmp_path))
    assert said.endswith("it has no visual_projection.weight")


def test_owlv2_without_what_prepares_its_images_is_told_when_it_is_loaded(folders, monkeypatch):
    monkeypatch.setattr("verl_omni.rewards.scorers.geneval.vision.importlib.util.find_spec", lambda name: None)
    said = refused(detector=str(folders["owl"]), classifier=str(folders["clip"]))
    assert "prepared with torchvision or scipy: pip install scipy" in said
    make_scorer("geneval", {"detector": str(folders["dino"]), "classifier": str(folders["clip"])})


def test_settings_are_checked():
    check_settings("geneval", {"detector": "some/folder", "score": "graded", "counting_threshold": 0.9})
    with pytest.raises(ValueError, match='unknown reward.scorers.geneval.score "grade": did you mean "graded"'):
        check_settings("geneval", {"score": "grade"})
    with pytest.raises(ValueError, match="geneval.threshold=1.5: expected 0 or more, at most 1"):
        check_settings("geneval", {"threshold": 1.5})
