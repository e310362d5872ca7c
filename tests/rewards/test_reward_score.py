import importlib.util
import io
import random
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from verl_omni.rewards import (
    check_package,
    check_settings,
    default_compute_score_image,
    get_reward_fn,
    register_reward,
)
from verl_omni.rewards.images import to_rgb_array
from verl_omni.rewards.scorers.ocr import (
    _squeeze,
    compute_score_ocr,
    compute_score_ocr_line,
    edit_distance,
    normalised_edit_distance,
    share_wrong_in_words,
)
from verl_omni.rewards.text_reader import get_reader, read_text

needs_rapidocr = pytest.mark.skipif(importlib.util.find_spec("rapidocr") is None, reason="rapidocr is not installed")


def line(text: str, width: int = 32, height: int = 16, size: int = 13) -> Image.Image:
    image = Image.new("RGB", (width, height), (230, 225, 220))
    font = ImageFont.load_default(size=size)
    ImageDraw.Draw(image).text((width / 2, height / 2), text, fill=(20, 20, 60), font=font, anchor="mm")
    return image


def street() -> Image.Image:
    """A scene of 512 x 512 with a small bright word at the top and a sign further down."""
    image = Image.linear_gradient("L").resize((512, 512)).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.text((200, 60), "OPEN", fill="yellow", font=ImageFont.load_default(size=70))
    draw.rectangle((60, 300, 420, 400), fill="white")
    draw.text((80, 310), "Grand Opening", fill="darkred", font=ImageFont.load_default(size=48))
    return image


def test_edit_distance_on_known_pairs():
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance("flaw", "lawn") == 2
    assert normalised_edit_distance("", "") == 0.0
    assert normalised_edit_distance("407", "407") == 0.0
    assert normalised_edit_distance("407", "417") == pytest.approx(1 / 3)
    assert normalised_edit_distance("4078", "407") == pytest.approx(1 / 4)
    assert normalised_edit_distance("407", "") == 1.0


def test_edit_distance_agrees_with_its_recursive_definition():
    def by_definition(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(
            by_definition(a[1:], b) + 1, by_definition(a, b[1:]) + 1, by_definition(a[1:], b[1:]) + (a[0] != b[0])
        )

    generator = random.Random(0)
    for _ in range(50):
        a, b = ("".join(generator.choices("ab1", k=generator.randint(0, 5))) for _ in range(2))
        assert edit_distance(a, b) == by_definition(a, b)


def test_every_form_of_an_image_becomes_the_same_array():
    pil = line("407")
    expected = np.array(pil)
    as_float = expected.astype(np.float32) / 255
    chw = torch.from_numpy(as_float).permute(2, 0, 1)
    as_bytes = torch.from_numpy(expected).permute(2, 0, 1)
    for form in (pil, expected, as_float, chw, chw.double(), as_bytes):
        assert np.array_equal(to_rgb_array(form), expected)
    assert abs(to_rgb_array(chw.bfloat16()).astype(int) - expected).max() <= 1
    assert np.array_equal(to_rgb_array(chw * 3 - 1), (expected.astype(int) * 3 - 255).clip(0, 255))
    assert to_rgb_array(chw[:1]).shape == expected.shape


def test_images_that_cannot_be_scored_are_refused():
    with pytest.raises(ValueError, match="diverged"):
        to_rgb_array(torch.full((3, 16, 32), float("nan")))
    with pytest.raises(ValueError, match=r"shape \(16, 32, 5\)"):
        to_rgb_array(np.zeros((16, 32, 5)))
    with pytest.raises(TypeError, match="these are int64"):
        to_rgb_array(torch.zeros(3, 16, 32, dtype=torch.int64))
    with pytest.raises(TypeError, match="str"):
        to_rgb_array("sign.png")


@needs_rapidocr
def test_reads_lines_of_several_sizes_in_the_order_given():
    texts = ["407", "HELLO World", "000", "Bakery 12", "981"]
    images = [line(t) if len(t) == 3 else line(t, width=40 * len(t) // 2, height=32, size=28) for t in texts]
    assert read_text(images, "line") == texts


@needs_rapidocr
def test_what_is_read_does_not_depend_on_the_other_images():
    noise = torch.Generator().manual_seed(0)
    images = [torch.rand(3, 16, 32, generator=noise) for _ in range(3)]
    images += [np.array(line(f"{n}")) for n in (120, 555, 903)] + [line("a much longer line", 300, 32, 28)]
    assert read_text(images, "line") == [read_text([image], "line")[0] for image in images]


@needs_rapidocr
def test_full_mode_finds_text_in_a_scene_and_line_mode_does_not():
    assert read_text([street()], mode="full") == ["OPEN Grand Opening"]
    assert read_text([street()], mode="line") != ["OPEN Grand Opening"]
    assert read_text([Image.new("RGB", (64, 64), "gray")], mode="full") == [""]


@needs_rapidocr
def test_score_is_one_minus_the_distance_ignoring_case_and_spaces():
    images = [line("407"), line("407"), line("HELLO World", 220, 32, 28), Image.new("RGB", (32, 16), "white")]
    results = compute_score_ocr_line(images, ["407", "417", "hello  WORLD", "123"])
    assert [r["score"] for r in results] == pytest.approx([1, 2 / 3, 1, 0])
    assert [r["exact"] for r in results] == [1.0, 0.0, 1.0, 0.0]
    assert [r["ocr_text"] for r in results] == ["407", "407", "HELLO World", ""]


@needs_rapidocr
def test_other_text_in_a_scene_costs_nothing():
    wanted = ["grand opening", "Grand Openings", "zzzz", "pen", "OPEN"]
    results = compute_score_ocr([street()] * 5, wanted)
    # "grandopening" lacks an "s"; "pen" is no word of its own there, and "open" has a letter more.
    assert [r["score"] for r in results] == pytest.approx([1, 1 - 1 / 13, 0, 1 - 1 / 3, 1])
    assert results[0]["exact"] == 1.0 and results[3]["exact"] == 0.0
    # As published: "opengrandopening" becomes "grandopenings" by taking "open" away and adding an "s".
    published = [r["score"] for r in compute_score_ocr([street()] * 5, wanted, matching="contains")]
    assert published == pytest.approx([1, 1 - 5 / 13, 0, 1, 1])


WORDS = [
    ("EST.1987 Bus 42", "est. 1987", 0),  # the recogniser dropped a space
    ("EST.1987 Bus 42", "1987", 0),
    ("Tel 555-0199 $5.99", "5", 1),  # a part of a number is another number
    ("盛大开业", "开业", 0),  # words without spaces between them
    ("concatenate", "cat", 1),
    ("don't walk", "DON'T", 0),
    ("", "walk", 1),
    ("wlak this way", "walk this", 2 / 8),
    ("this way walk", "walk this", 4 / 8),  # the order counts
]


@pytest.mark.parametrize(("reading", "wanted", "wrong"), WORDS)
def test_the_nearest_run_of_whole_words_counts(reading, wanted, wrong):
    assert share_wrong_in_words(reading, _squeeze(wanted)) == pytest.approx(wrong)


def test_the_nearest_run_is_that_of_trying_all():
    generator = random.Random(0)
    for _ in range(100):
        words = ["".join(generator.choices("abc", k=generator.randint(1, 4))) for _ in range(generator.randint(0, 5))]
        wanted = "".join(generator.choices("abc", k=generator.randint(1, 6)))
        runs = ["".join(words[i:j]) for i in range(len(words) + 1) for j in range(i, len(words) + 1)]
        least = min(edit_distance(run, wanted) for run in runs)
        assert share_wrong_in_words(" ".join(words), wanted) == least / len(wanted)


def test_bad_arguments_get_one_clear_line():
    with pytest.raises(ValueError, match="2 images but 1 ground truths"):
        compute_score_ocr([line("1"), line("2")], ["1"])
    with pytest.raises(ValueError, match="image 1 is ' '"):
        compute_score_ocr([line("1"), line("2")], ["1", " "])
    with pytest.raises(ValueError, match="image 0 is None"):
        compute_score_ocr([line("1")], [None])
    with pytest.raises(ValueError, match='"line" or "full"'):
        read_text([line("1")], mode="page")
    with pytest.raises(ValueError, match='unknown matching "word": did you mean "words"'):
        compute_score_ocr([line("1")], ["1"], matching="word")


def test_without_rapidocr_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    monkeypatch.setattr("verl_omni.rewards.text_reader._readers", {})
    with pytest.raises(ImportError, match=r"pip install 'verl-omni\[rewards\]'"):
        read_text([line("407")], "line")


def test_a_missing_package_is_told_before_a_run_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for reward in ("ocr", "ocr_line"):
        with pytest.raises(
            ModuleNotFoundError, match=rf"\"{reward}\" needs rapidocr: pip install 'verl-omni\[rewards\]'"
        ):
            check_package(reward)
    check_package("jpeg_compressibility")


@needs_rapidocr
def test_the_reader_is_created_once():
    assert get_reader() is get_reader()


@needs_rapidocr
def test_default_reward_is_chosen_by_data_source():
    result = default_compute_score_image("ocr_line", line("407"), "407", extra_info={"split": "val", "index": 3})
    assert result == {"score": 1.0, "ocr_text": "407", "exact": 1.0}
    assert default_compute_score_image("ocr", street(), "open")["score"] == 1.0
    assert default_compute_score_image("ocr", street(), "pen", matching="contains")["score"] == 1.0


def test_unknown_data_source_gets_the_nearest_known_name():
    with pytest.raises(ValueError, match='"orc": did you mean "ocr"'):
        default_compute_score_image("orc", line("407"), "407")


SETTINGS = {
    "unknown reward": ("orc", {}, 'unknown reward (data_source) "orc": did you mean "ocr"'),
    "unknown setting": ("ocr", {"threads": 2}, 'unknown setting of reward.scorers.ocr "threads": did you mean "num_t'),
    "setting of another": ("ocr_line", {"matching": "words"}, 'unknown setting of reward.scorers.ocr_line "matching"'),
    "too few": ("ocr", {"num_threads": 0}, "reward.scorers.ocr.num_threads=0: expected 1 or more"),
    "too many": ("jpeg_compressibility", {"quality": 96}, "quality=96: expected 1 or more, at most 95"),
    "other type": ("ocr", {"num_threads": "two"}, "num_threads=two: expected int, not str"),
    "no int": ("ocr", {"num_threads": True}, "expected int, not bool"),
    "choice": ("ocr", {"matching": "word"}, 'unknown reward.scorers.ocr.matching "word": did you mean "words"'),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_checked_by_the_rewards_signature(name):
    reward, settings, said = SETTINGS[name]
    with pytest.raises(ValueError) as error:
        check_settings(reward, settings)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_good_settings_pass():
    check_settings("ocr", {"num_threads": 4, "matching": "contains"})
    check_settings("ocr_line", {})


def test_jpeg_rewards_are_the_size_of_the_file_and_its_opposite():
    file = io.BytesIO()
    street().save(file, "JPEG", quality=95)
    kilobytes = len(file.getvalue()) / 1000
    assert default_compute_score_image("jpeg_incompressibility", street(), "")["score"] == kilobytes
    assert default_compute_score_image("jpeg_compressibility", street(), "")["score"] == -kilobytes


def test_a_user_registers_a_reward_by_name():
    @register_reward("test_brightness")
    def brightness(images, ground_truths, prompts, extra_infos):
        return [
            {"score": to_rgb_array(image).mean() / 255, "seen": (truth, prompt, info["index"])}
            for image, truth, prompt, info in zip(images, ground_truths, prompts, extra_infos, strict=True)
        ]

    assert get_reward_fn("test_brightness") is brightness
    white = Image.new("RGB", (4, 4), "white")
    result = default_compute_score_image("test_brightness", white, "t", extra_info={"prompt": "p", "index": 5})
    assert result == {"score": 1.0, "seen": ("t", "p", 5)}
    with pytest.raises(ValueError, match="already registered"):
        register_reward("test_brightness")(lambda *_: [])
