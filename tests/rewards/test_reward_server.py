"""The server of scorers: its contract, its limits, its batches, and how it ends."""

import asyncio
import base64
import io
import json
import pickle
import re
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
from jsonschema import Draft202012Validator
from PIL import Image
from reward_servers import GUARD, Command, Gate, file_of, mean, mean_scorer, picture, serving, until
from safetensors.numpy import save

from verl_omni.rewards.serving.contract import Limits, Sample, encode, unpack
from verl_omni.rewards.serving.server import RewardServer
from verl_omni.utils.batcher import Batcher


def post(server: RewardServer, samples, scorer: str = "mean", **options) -> requests.Response:
    return requests.post(f"{server.address}/v1/score/{scorer}", json={"samples": samples}, timeout=GUARD, **options)


def tensor(array: np.ndarray) -> str:
    return base64.b64encode(save({"image": np.ascontiguousarray(array)})).decode()


@pytest.fixture(scope="module")
def server():
    with serving({"mean": mean_scorer, "other": lambda images, *_: [{"score": 1}] * len(images)}) as running:
        yield running


def metric(server: RewardServer, name: str, **options) -> float:
    """Of /metrics; 0 where it was never counted."""
    text = requests.get(f"{server.address}/metrics", timeout=GUARD, **options).text
    return float((re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE) or [0])[0])


# ---- contract ------------------------------------------------------------------------------------------


def test_pictures_of_every_form_are_scored(server):
    image, video = picture(0), [picture(seed) for seed in range(3)]
    pixels = np.asarray(image).transpose(2, 0, 1)
    samples = {
        "png": ({"image": file_of(image)}, mean(image)),
        "jpeg": ({"image": file_of(image, "JPEG")}, None),
        "webp": ({"image": file_of(image, "WEBP", lossless=True)}, mean(image)),
        "gray": ({"image": file_of(image.convert("L"))}, mean(image.convert("L"))),
        "video": ({"frames": [file_of(frame) for frame in video]}, mean(video)),
        "bytes": ({"tensor": tensor(pixels)}, mean(image)),
        "floats": ({"tensor": tensor(pixels.astype(np.float32) / 255)}, mean(image)),
        "video tensor": ({"tensor": tensor(np.stack([np.asarray(f).transpose(2, 0, 1) for f in video]))}, mean(video)),
    }
    lossy = Image.open(io.BytesIO(base64.b64decode(samples["jpeg"][0]["image"])))
    samples["jpeg"] = (samples["jpeg"][0], mean(lossy))
    answer = post(server, [sample for sample, _ in samples.values()])
    assert answer.status_code == 200
    scores = {name: score["score"] for name, score in zip(samples, answer.json()["scores"], strict=True)}
    assert scores == {name: expected for name, (_, expected) in samples.items()}


def test_what_belongs_to_an_image_comes_along(server):
    sample = {"image": file_of(picture(0)), "prompt": "é", "ground_truth": {"a": [1]}, "extra_info": {"index": 7}}
    (answer,) = post(server, [sample]).json()["scores"]
    assert answer == {"score": mean(picture(0)), "truth": {"a": [1]}, "prompt": "é", "index": 7}


def test_the_contract_as_a_schema(server):
    """What the client sends and the server answers is what /openapi.json says; what it refuses is not."""
    told = requests.get(f"{server.address}/openapi.json", timeout=GUARD).json()
    assert {"/health", "/metrics", "/v1/scorers", "/v1/score/{scorer}"} == told["paths"].keys()
    score = told["paths"]["/v1/score/{scorer}"]["post"]
    request = Draft202012Validator(score["requestBody"]["content"]["application/json"]["schema"])
    video = [picture(seed) for seed in range(2)]
    for image, encoding in ((picture(0), "png"), (picture(0), "tensor"), (video, "png"), (video, "tensor")):
        request.validate(json.loads(encode(Sample(image, {"a": 1}, "a cat", {"index": 1}), encoding)))
    file = file_of(picture(0))
    for sample in ({"prompt": "a"}, {"image": file, "frames": [file]}, {"image": file, "promt": ""}, {"frames": []}):
        assert not request.is_valid({"samples": [sample]}) and post(server, [sample]).status_code == 422
    assert not request.is_valid({"samples": []}) and post(server, []).status_code == 422

    good, bad = post(server, [{"image": file}]), post(server, [{"image": file}], "maen")
    for answer in (good, bad):
        said = score["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
        Draft202012Validator(said).validate(answer.json())
    assert {"401", "404", "408", "413", "422", "500", "503"} <= score["responses"].keys()
    assert requests.get(f"{server.address}/docs", timeout=GUARD).status_code == 404


def test_names_and_health(server):
    assert requests.get(f"{server.address}/health", timeout=GUARD).json() == {"status": "ok"}
    assert requests.get(f"{server.address}/v1/scorers", timeout=GUARD).json() == {"scorers": ["mean", "other"]}
    answer = post(server, [], "maen")
    assert answer.status_code == 404
    assert answer.json()["detail"] == 'unknown scorer "maen": did you mean "mean"? known: mean, other'


def test_what_the_client_writes_the_server_reads():
    told = {"prompt": "a sign", "ground_truth": "text", "extra_info": {"n": np.int64(3), "box": np.arange(2)}}
    for image in (picture(1), [picture(1), picture(2)]):
        for encoding in ("png", "tensor"):
            (packed,) = unpack(encode(Sample(image, **told), encoding), Limits())
            sample = packed.open()
            assert (sample.prompt, sample.ground_truth) == ("a sign", "text")
            assert sample.extra_info == {"n": 3, "box": [0, 1]}
            assert np.array_equal(np.asarray(sample.image), np.asarray(image))
    with pytest.raises(TypeError, match="cannot be sent as JSON"):
        encode(Sample(picture(1), extra_info={"file": object()}))


# ---- what is refused -----------------------------------------------------------------------------------


def bomb(side: int) -> str:
    """A PNG of a few kilobytes that says it has side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" * 1_000_000))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")).decode()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


GOOD = file_of(picture(0))
NAN = np.full((3, 2, 2), np.nan, np.float32)
REFUSED = {
    "no base64": ({"image": "?"}, 422, "the image of sample 0 is not base64"),
    "no text": ({"image": 3}, 422, "must be a file in base64"),
    "a gif": ({"image": file_of(picture(0), "GIF")}, 422, "no PNG, JPEG, WEBP file"),
    "half a file": ({"image": in_base64(base64.b64decode(GOOD)[:-60])}, 422, "the image of sample 0 is damaged"),
    "a pickle": ({"image": in_base64(pickle.dumps([1]))}, 422, "no PNG, JPEG, WEBP file"),
    "a pickle for a tensor": ({"tensor": in_base64(pickle.dumps(NAN))}, 422, "no safetensors file"),
    "an animation": (
        {"image": file_of(picture(0), "WEBP", save_all=True, append_images=[picture(1)])},
        422,
        "send a video as frames",
    ),
    "NaN": ({"tensor": tensor(NAN)}, 422, "NaN or infinite pixels"),
    "a flat tensor": ({"tensor": tensor(np.zeros((4, 4), np.uint8))}, 422, "shape (4, 4): expected (channels"),
    "five channels": ({"tensor": tensor(np.zeros((5, 4, 4), np.uint8))}, 422, "1 or 3 channels"),
    "no frames": ({"frames": []}, 422, "one or more files"),
    "a bad frame": ({"frames": [GOOD, "?"]}, 422, "frame 1 of sample 0 is not base64"),
    "nothing to see": ({"prompt": "a"}, 422, "sample 0 has no picture"),
    "two things to see": ({"image": GOOD, "frames": [GOOD]}, 422, "has image and frames: expected one of"),
    "another field": ({"image": GOOD, "prompts": "a"}, 422, 'unknown field "prompts": did you mean "prompt"?'),
    "no prompt": ({"image": GOOD, "prompt": 3}, 422, "prompt must be a text"),
    "a bomb": ({"image": bomb(12_000)}, 413, "more than 67108864 pixels"),
    "a bomb that PIL refuses": ({"image": bomb(60_000)}, 413, "the image of sample 0 has too many pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_samples_are_refused(server, name):
    sample, status, said = REFUSED[name]
    answer = post(server, [sample])
    assert (answer.status_code, answer.json()["detail"].count("\n")) == (status, 0)
    assert said in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"samples": 3}', b'{"samples": []}', b"[" * 100_000, b"\xff"])
def test_bad_bodies_are_refused(server, body):
    answer = requests.post(f"{server.address}/v1/score/mean", data=body, timeout=GUARD)
    assert answer.status_code == 422 and "samples" in answer.json()["detail"]


def test_sizes_have_limits():
    image = picture(0)  # 48 pixels
    limits = Limits(request_bytes=5000, image_bytes=len(base64.b64decode(GOOD)), pixels=100)
    with serving({"mean": mean_scorer}, limits=limits, queue_size=3) as server:
        assert post(server, [{"image": GOOD}] * 2).status_code == 200
        longer = file_of(picture(0, 6, 9))
        assert "--max-image-bytes" in post(server, [{"image": longer}]).json()["detail"]
        for samples in ([{"image": GOOD}] * 3, [{"frames": [GOOD] * 3}]):
            answer = post(server, samples)
            assert answer.status_code == 413 and "raise --max-pixels" in answer.json()["detail"]
        tiny = file_of(Image.new("RGB", (1, 1)))
        answer = post(server, [{"image": tiny}] * 4)
        assert answer.status_code == 413 and "the queue has 3 places" in answer.json()["detail"]
        large = json.dumps({"samples": [{"image": GOOD, "prompt": "x" * 5000}]}).encode()
        for body in (large, iter([large[:100], large[100:]])):  # with its length, and in chunks without
            answer = requests.post(f"{server.address}/v1/score/mean", data=body, timeout=GUARD)
            assert answer.status_code == 413 and "--max-request-bytes" in answer.json()["detail"]
        assert post(server, [{"image": file_of(image)}]).json()["scores"][0]["score"] == mean(image)


def test_a_token_is_asked_for():
    with serving({"mean": mean_scorer}, token="sésame") as server:
        sample = [{"image": GOOD}]
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésame".encode()}):
            assert post(server, sample, headers=headers).status_code == 401
            for page in ("v1/scorers", "metrics"):
                assert requests.get(f"{server.address}/{page}", headers=headers, timeout=GUARD).status_code == 401
        assert post(server, sample, headers={"Authorization": "Bearer sésame".encode()}).status_code == 200
        assert requests.get(f"{server.address}/health", timeout=GUARD).status_code == 200


# ---- the queue -----------------------------------------------------------------------------------------


def ask_one_by_one(server: RewardServer, truths: list[str]) -> list[requests.Response]:
    """A request for each ground truth, all at once."""
    with ThreadPoolExecutor(len(truths)) as pool:
        return list(pool.map(lambda t: post(server, [{"image": GOOD, "ground_truth": t}]), truths))


@pytest.fixture
def queued(monkeypatch):
    """What stands in the queues: a sample counts as waiting from before it is read, which is too early for a batch."""
    found, submit = [], Batcher.submit

    async def counted(self, item, *position):
        answer = asyncio.ensure_future(submit(self, item, *position))
        await asyncio.sleep(0)
        found.append(item)
        return await answer

    monkeypatch.setattr(Batcher, "submit", counted)
    return found


def test_requests_share_batches(queued):
    gate = Gate()
    with serving({"mean": gate}, max_batch=4) as server, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask_one_by_one, server, ["first"])
        until(lambda: gate.calls == [["first"]])
        rest = pool.submit(ask_one_by_one, server, list("abcdef"))
        until(lambda: len(queued) == 7)
        assert metric(server, 'verl_omni_reward_waiting{scorer="mean"}') == 7
        gate.open.set()
        assert [a.json()["scores"][0]["truth"] for a in first.result() + rest.result()] == ["first", *"abcdef"]
        assert [len(call) for call in gate.calls] == [1, 4, 2]
        assert sorted(sum(gate.calls[1:], [])) == list("abcdef")
        assert metric(server, 'verl_omni_reward_requests_total{scorer="mean",status="200"}') == 7
        assert metric(server, 'verl_omni_reward_batch_size_sum{scorer="mean"}') == 7
        assert metric(server, 'verl_omni_reward_batch_size_count{scorer="mean"}') == 3
        assert metric(server, 'verl_omni_reward_waiting{scorer="mean"}') == 0


def test_a_full_queue_says_when_to_come_back():
    gate = Gate()
    with serving({"mean": gate, "free": mean_scorer}, queue_size=3) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask_one_by_one, server, list("abc"))
        until(lambda: metric(server, 'verl_omni_reward_waiting{scorer="mean"}') == 3)
        refused = post(server, [{"image": GOOD}])
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["detail"] == "the queue of mean is full: 3 of 3 places are taken"
        assert post(server, [{"image": GOOD}], "free").status_code == 200
        gate.open.set()
        assert [answer.status_code for answer in waiting.result()] == [200] * 3
        assert post(server, [{"image": GOOD}]).status_code == 200


def faulty(images, ground_truths, prompts, extra_infos):
    if "value" in ground_truths:
        raise ValueError("the ground truth is no text\nof one line")
    if "crash" in ground_truths:
        raise RuntimeError("CUDA out of memory")
    if "exit" in ground_truths:
        raise SystemExit(3)
    if "few" in ground_truths:
        return []
    odd = {"nan": float("nan"), "text": "good", "none": None, "numpy": np.float32(0.5), "object": 1.0}
    answers = [{"score": odd.get(truth, 1.0)} for truth in ground_truths]
    if "object" in ground_truths:
        answers[ground_truths.index("object")]["detail"] = object()
    return answers


FAULTS = {
    "value": (422, "sample 0: the ground truth is no text of one line"),
    "crash": (500, "sample 0: the scorer mean failed: RuntimeError: CUDA out of memory"),
    "exit": (500, "sample 0: the scorer mean failed: SystemExit: 3"),
    "few": (500, "returned 0 for 1 images: expected a list with one dict for each"),
    "nan": (500, 'returned nan: expected a dict with a finite number under "score"'),
    "text": (500, "returned 'good': expected"),
    "none": (500, "returned None: expected"),
    "object": (500, "cannot be sent as JSON"),
}


def test_a_sample_that_fails_fails_alone(queued):
    gate = Gate()

    def scorer(*batch):
        gate(*batch)
        return faulty(*batch)

    with serving({"mean": scorer}, max_batch=32) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask_one_by_one, server, ["first"])
        until(lambda: gate.calls)
        truths = ["a", *FAULTS, "numpy", "b"]
        rest = pool.submit(ask_one_by_one, server, truths)
        until(lambda: len(queued) == 1 + len(truths))
        gate.open.set()
        assert first.result()[0].status_code == 200
        answers = dict(zip(truths, rest.result(), strict=True))
        assert sorted(gate.calls[1]) == sorted(truths), "they were one batch"
        for truth, (status, said) in FAULTS.items():
            assert answers[truth].status_code == status and said in answers[truth].json()["detail"]
        for truth, score in {"a": 1.0, "numpy": 0.5, "b": 1.0}.items():
            assert answers[truth].json() == {"scores": [{"score": score}]}


def test_who_has_gone_is_not_scored():
    gate = Gate()
    with serving({"mean": gate}) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask_one_by_one, server, ["first"])
        until(lambda: gate.calls)
        with pytest.raises(requests.Timeout):
            requests.post(
                f"{server.address}/v1/score/mean",
                json={"samples": [{"image": GOOD, "ground_truth": "gone"}]},
                timeout=3,  # by then it is queued
            )
        until(lambda: metric(server, 'verl_omni_reward_requests_total{scorer="mean",status="499"}') == 1)
        gate.open.set()
        first.result()
        assert post(server, [{"image": GOOD, "ground_truth": "last"}]).status_code == 200
        assert gate.calls == [["first"], ["last"]]


# ---- its end -------------------------------------------------------------------------------------------

SCORERS = """
import pathlib, time
from verl_omni.rewards import register_reward

@register_reward("slow")
def slow(images, ground_truths, prompts, extra_infos, *, seconds: float = 0.0):
    pathlib.Path(__file__).with_name("began").touch()
    time.sleep(seconds)
    return [{"score": image.getpixel((0, 0))[0]} for image in images]
"""


def test_what_was_asked_is_answered_and_nothing_new_is_taken():
    gate = Gate()
    server = RewardServer()
    server.listen()
    finished = []
    thread = threading.Thread(target=lambda: finished.append(server.run({"mean": gate}, max_batch=1)))
    thread.start()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_one_by_one, server, list("abc"))
        until(lambda: metric(server, 'verl_omni_reward_waiting{scorer="mean"}') == 3)
        server.stop()

        def refused() -> bool:
            try:
                requests.get(f"{server.address}/health", timeout=GUARD)
            except requests.ConnectionError:
                return True
            return False

        until(refused)
        gate.open.set()
        assert [a.json()["scores"][0]["truth"] for a in asked.result()] == list("abc")
    thread.join(GUARD)
    assert finished == [True]


@pytest.mark.parametrize(
    ("grace", "code", "said"), [("60", 0, ""), ("1", 1, "error: --grace 1 s were over before all")]
)
def test_the_command_ends_on_sigterm(tmp_path, grace, code, said):
    seconds = 1.5 if code == 0 else 300
    settings = ["--port", "0", "--set", f"slow.seconds={seconds}", "--grace", grace]
    server = Command(tmp_path, SCORERS, "slow", *settings)
    image = {"image": file_of(Image.new("RGB", (2, 2), (7, 0, 0)))}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server, [image], "slow")
        until((tmp_path / "began").exists)
        server.process.terminate()
        assert server.end() == code and said in server.said
        if code == 0:
            assert asked.result().json() == {"scores": [{"score": 7.0}]}
        else:
            assert asked.result().status_code == 503 and "was stopped before" in asked.result().json()["detail"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jpeg_compressibility", "--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in: name a token"),
        (["jpeg_compressibility", "--token-env", "NO_SUCH"], "token_env=NO_SUCH: there is no environment variable"),
        (["jpeg_compressibility", "--set", "ocr.num_threads=1"], 'unknown scorer of this server "ocr"'),
        (["jpeg_compressibility", "--set", "quality=1"], "--set quality=1: expected SCORER.KEY=VALUE"),
        (["jpeg_compressibility", "--set", "jpeg_compressibility.quality=96"], "quality=96: expected 1 or more"),
        (["jpeg_compressibility", "--external-lib", "no_such_lib"], '--external-lib="no_such_lib" cannot be imported'),
        (["jpeg_compressibility", "--port", "{taken}"], "cannot listen on 127.0.0.1 port {taken}: Address already in"),
        (["jpeg"], 'unknown reward (data_source) "jpeg"'),
    ],
)
def test_bad_options(server, monkeypatch, arguments, said):
    from verl_omni.cli import serve_reward

    *arguments, said = (text.format(taken=server.address.rpartition(":")[2]) for text in [*arguments, said])
    monkeypatch.setattr("sys.argv", ["verl-omni serve-reward", *arguments])
    with pytest.raises(SystemExit) as end:
        serve_reward.main()
    assert str(end.value).startswith("error: ") and said in str(end.value) and "\n" not in str(end.value)
