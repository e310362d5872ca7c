"""What the OCR rewards read in drawn scenes, and what their settings change."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image, ImageDraw, ImageFont

from verl_omni.rewards import check_settings
from verl_omni.rewards.images import frames_of
from verl_omni.rewards.scorers import ocr
from verl_omni.rewards.scorers.ocr import SHARE_WRONG, compute_score_ocr, compute_score_ocr_line
from verl_omni.rewards.text_reader import Recogniser, TextReader, read_text, recognisers
from verl_omni.testing.scenes import draw_scene, legible_signs

rapidocr = pytest.importorskip("rapidocr")
MODELS = Path(rapidocr.__file__).parent / "models"


def line(text: str) -> Image.Image:
    image = Image.new("RGB", (20 * len(text), 32), "white")
    font = ImageFont.load_default(size=28)
    ImageDraw.Draw(image).text((image.width / 2, 16), text, fill="black", font=font, anchor="mm")
    return image


# ---- scenes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signs():
    return list(legible_signs(8, seed=1))


@pytest.fixture(scope="module")
def scenes(signs):
    return [draw_scene(sign, seed) for seed, sign in enumerate(signs)]


@pytest.fixture(scope="module")
def readings(scenes):
    return read_text(scenes)


def test_legible_scenes_score_high(signs, readings, monkeypatch):
    monkeypatch.setattr(ocr, "read_text", lambda images, **how: readings)
    answers = compute_score_ocr([None] * len(signs), [sign.text for sign in signs])
    assert np.mean([a["score"] for a in answers]) >= 0.95, answers


def test_what_is_read_in_a_scene_does_not_depend_on_the_others(scenes, readings):
    """In one call crops of all scenes share batches of the recogniser, among them some that are far wider."""
    blank = Image.new("RGB", (64, 64), "gray")
    together = read_text([blank, scenes[3], scenes[0]])
    assert together == ["", readings[3], readings[0]]


def test_crops_of_all_scenes_share_batches_of_one_width(monkeypatch):
    """Scaled to a height of 48, the crops are 32, 34, 320, 64 and 321 wide: they are padded to multiples of 32."""
    reader, batches = TextReader(), []
    session = reader._recogniser.session
    monkeypatch.setattr(reader._recogniser, "session", lambda batch: batches.append(batch.shape) or session(batch))
    shapes = {"first": [(24, 16), (24, 17), (48, 320)], "none": [], "second": [(24, 32), (48, 321)]}
    monkeypatch.setattr(reader, "_crops", lambda name: [np.zeros((*shape, 3), np.uint8) for shape in shapes[name]])
    assert reader.read_scenes(["first", "none", "second"]) == ["", "", ""]
    assert sorted(batches) == [(1, 3, 48, 32), (1, 3, 48, 320), (1, 3, 48, 352), (2, 3, 48, 64)]


# ---- matching ------------------------------------------------------------------------------------------

READ = "OPEN Grand Opening"
# 16 letters are read. "opengrandopening" becomes "grandopening" by taking four away.
MATCHING = [
    ("grand opening", {"words": 0, "exact": 0, "contains": 0, "everything": 4 / 16}),
    ("grand openings", {"words": 1 / 13, "exact": 1, "contains": 5 / 13, "everything": 5 / 16}),
    ("pen", {"words": 1 / 3, "exact": 1, "contains": 0, "everything": 13 / 16}),
    ("Open grand opening", {"words": 0, "exact": 0, "contains": 0, "everything": 0}),
    ("open grand opening sale now", {"words": 7 / 23, "exact": 1, "contains": 7 / 23, "everything": 7 / 23}),
]


@pytest.mark.parametrize(("wanted", "wrong"), MATCHING)
@pytest.mark.parametrize("matching", ["words", "exact", "contains", "everything"])
def test_what_the_ground_truth_is_compared_with(matching, wanted, wrong, monkeypatch):
    monkeypatch.setattr(ocr, "read_text", lambda images, **how: [READ])
    (answer,) = compute_score_ocr([None], [wanted], matching=matching)
    share = wrong[matching]
    assert answer == {"score": pytest.approx(1 - share), "ocr_text": READ, "exact": float(share == 0)}


def test_every_matching_is_one_of_the_settings_choices():
    for matching in SHARE_WRONG:
        check_settings("ocr", {"matching": matching})


# ---- videos --------------------------------------------------------------------------------------------


def test_a_video_is_scored_frame_by_frame():
    """The third frame shows 417 in place of 407: a third is wrong."""
    video = [line("407"), line("407"), line("417"), line("407")]
    still = line("407")
    answers = compute_score_ocr_line([video, still, video[2:3]], ["407", "407", "417"])
    assert [a["score"] for a in answers] == pytest.approx([(3 + 2 / 3) / 4, 1, 1])
    assert [a["exact"] for a in answers] == [0.75, 1.0, 1.0]
    assert [a["ocr_text"] for a in answers] == ["407 | 417 | 407", "407", "417"]


OVER_FRAMES = [
    ({"over_frames": "mean"}, (1 + 0.75 + 0 + 1 + 0.5) / 5, 2 / 5),
    ({"over_frames": "best"}, 1, 1),
    ({"over_frames": "worst"}, 0, 0),
    ({"frame_step": 2}, (1 + 0 + 0.5) / 3, 1 / 3),
    ({"frame_step": 5}, 1, 1),
    ({"frame_step": 3, "over_frames": "worst"}, 1, 1),
]


@pytest.mark.parametrize(("settings", "score", "exact"), OVER_FRAMES)
@pytest.mark.parametrize("reward", [compute_score_ocr, compute_score_ocr_line])
def test_which_frames_count_and_what_they_come_to(reward, settings, score, exact, monkeypatch):
    """Frames are named by what they show."""
    monkeypatch.setattr(ocr, "read_text", lambda images, **how: list(images))
    (answer,) = reward([["exit", "exid", "abcd", "exit", "exad"]], ["Exit"], **settings)
    assert answer["score"] == pytest.approx(score) and answer["exact"] == pytest.approx(exact)


def test_frames_come_as_a_list_or_as_the_first_dimension():
    assert frames_of(line("4")) is None and frames_of(np.zeros((4, 6, 3))) is None
    assert len(frames_of(np.zeros((5, 4, 6, 3)))) == 5 and frames_of((1, 2)) == [1, 2]
    with pytest.raises(ValueError, match="a video has no frames"):
        frames_of([])


# ---- languages -----------------------------------------------------------------------------------------


def test_some_fifty_languages_come_with_rapidocr():
    table, own = recognisers(), MODELS / "PP-OCRv6_rec_small.onnx"
    inside = {language for language, recogniser in table.items() if recogniser.file == own}
    assert {"en", "ch", "japan", "de", "fr", "es", "vi"} <= inside and len(inside) >= 50 and own.is_file()
    assert {"korean", "arabic", "th", "el", "cyrillic", "devanagari", "ka"} <= table.keys() - inside


def test_the_addresses_are_those_that_rapidocr_publishes():
    published = yaml.safe_load((MODELS.parent / "default_models.yaml").read_text())["onnxruntime"]
    korean = published["PP-OCRv5"]["rec"]["korean_PP-OCRv5_rec_mobile"]["model_dir"]
    assert recognisers()["korean"] == Recogniser(MODELS / "korean_PP-OCRv5_rec_mobile.onnx", korean)


def test_a_recogniser_that_is_not_there_is_told_before_a_run_in_one_line(tmp_path, monkeypatch):
    missing = Recogniser(tmp_path / "korean.onnx", "https://example.org/korean.onnx")
    monkeypatch.setattr("verl_omni.rewards.text_reader.recognisers", lambda: {"korean": missing})
    for reward in ("ocr", "ocr_line"):
        with pytest.raises(FileNotFoundError) as error:
            check_settings(reward, {"language": "korean"})
        assert str(error.value) == (
            f"reward.scorers.{reward}.language=korean: rapidocr comes without the recogniser for it; fetch it once: "
            f"curl -Lo {tmp_path}/korean.onnx https://example.org/korean.onnx"
        )
    with pytest.raises(FileNotFoundError, match="fetch it once"):
        compute_score_ocr_line([line("407")], ["407"], language="korean")


def test_an_unknown_language_gets_the_nearest_known_name():
    check_settings("ocr", {"language": "german"})
    with pytest.raises(ValueError, match='unknown reward.scorers.ocr.language "korea": did you mean "korean"'):
        check_settings("ocr", {"language": "korea"})


def test_a_language_is_read_by_its_own_file(tmp_path, monkeypatch):
    """The file that is there under the name of another language is the one that is opened."""
    file = tmp_path / "korean.onnx"
    file.symlink_to(MODELS / "PP-OCRv6_rec_small.onnx")
    monkeypatch.setattr("verl_omni.rewards.text_reader.recognisers", lambda: {"korean": Recogniser(file, "")})
    monkeypatch.setattr("verl_omni.rewards.text_reader._readers", {})
    assert read_text([line("407")], "line", language="korean") == ["407"]
    file.unlink()
    file.write_bytes(b"no model")
    monkeypatch.setattr("verl_omni.rewards.text_reader._readers", {})
    with pytest.raises(Exception, match="korean.onnx"):
        read_text([line("407")], "line", language="korean")
