"""A rollout server over HTTP: images of validation for whoever asks, in OpenAI's words, and training as it was."""

import asyncio
import base64
import dataclasses
import io
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

import diffusers
import numpy as np
import openai
import pytest
import requests
import torch
from hydra import compose, initialize_config_module
from PIL import Image
from raw_http import RawClient
from tiny_models import tiny_checkpoint

from verl_omni.config import schema
from verl_omni.pipelines.qwen_image import QwenImage
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.utils import http_door
from verl_omni.utils.background import start, wait_for
from verl_omni.utils.errors import RunError
from verl_omni.workers.engine.compile.blocks import compile_blocks
from verl_omni.workers.rollout import image_http
from verl_omni.workers.rollout.diffusers_rollout.server import DiffusersServer

schema.register()
GUARD = 60
PROMPT, OTHER = "a cat on a wall", "two cups by the sea"
ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS = [
    f"{ROLLOUT}.pipeline.height=32",
    f"{ROLLOUT}.pipeline.width=48",
    f"{ROLLOUT}.pipeline.num_inference_steps=3",
    f"{ROLLOUT}.max_num_seqs=4",
    f"{ROLLOUT}.http.port=0",
    "trainer.mode=separate",
    "trainer.device=cpu",
    "data.train_files=prompts.parquet",
]


class Server(DiffusersServer):
    """In this process. Its weights are handed over, and it starts with those of the model's folder, as version 7."""

    def unpack(self, stored):
        return stored, None, True

    def own_weights(self):
        return [(name, p.detach().clone()) for name, p in self.engine.module.named_parameters() if p.requires_grad]


@contextmanager
def serving(*overrides: str, weights: bool = True):
    given = [f"actor_rollout_ref.model.path={tiny_checkpoint()}", *SETTINGS, *overrides]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        server = Server(prepare_config(compose("diffusion_trainer", given)))
    wait_for(server.start())
    server.address = wait_for(server.listen(0))
    if weights:
        wait_for(server.update_weights(server.own_weights(), 7))
    try:
        yield server
    finally:
        wait_for(server.stop())


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def post(server: Server, **fields) -> requests.Response:
    return requests.post(f"{server.address}/v1/images/generations", json=fields, timeout=GUARD)


def pixels(file: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(file)))).astype(int)


def image(server: Server, **fields) -> np.ndarray:
    answer = post(server, **fields)
    assert answer.status_code == 200, answer.text
    (one,) = answer.json()["data"]
    return pixels(one["b64_json"])


def said(answer: requests.Response) -> str:
    assert "\n" not in answer.json()["error"]["message"]
    return answer.json()["error"]["message"]


def until(condition) -> None:
    end = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.01)


# ---- what is drawn -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "call"),
    [
        ({}, {}),
        ({"size": "32x16", "num_inference_steps": 5}, {"width": 32, "height": 16, "num_inference_steps": 5}),
        ({"true_cfg_scale": 4}, {"true_cfg_scale": 4, "negative_prompt": " "}),
        ({"true_cfg_scale": 4, "negative_prompt": OTHER}, {"true_cfg_scale": 4, "negative_prompt": OTHER}),
    ],
    ids=["plain", "size and steps", "guidance", "negative prompt"],
)
def test_openais_client_gets_the_image_of_diffusers_own_pipeline(server, fields, call):
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    (name,) = (model.id for model in client.models.list())
    size = {"size": fields["size"]} if "size" in fields else {}
    more = {key: value for key, value in fields.items() if key != "size"}
    answer = client.images.generate(
        model=name, prompt=PROMPT, n=2, response_format="b64_json", **size, extra_body={"seed": 11, **more}
    )
    assert answer.version == 7 and abs(answer.created - time.time()) < GUARD
    assert [one.seed for one in answer.data] == [11, 12]
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_checkpoint())
    pipe.set_progress_bar_config(disable=True)
    for one in answer.data:
        settings = {"width": 48, "height": 32, "num_inference_steps": 3, "true_cfg_scale": 1} | call
        (expected,) = pipe(PROMPT, generator=torch.Generator().manual_seed(one.seed), **settings).images
        found = pixels(one.b64_json)
        assert found.shape == np.asarray(expected).shape
        assert np.abs(found - np.asarray(expected)).max() <= 1


def test_without_a_seed_every_answer_is_another_and_its_seed_gives_it_again(server):
    first, second = (post(server, prompt=PROMPT).json()["data"][0] for _ in range(2))
    assert first["seed"] != second["seed"] and first["b64_json"] != second["b64_json"]
    assert post(server, prompt=PROMPT, seed=first["seed"]).json()["data"][0]["b64_json"] == first["b64_json"]


def test_validation_settings_are_those_of_an_image():
    """Its own steps, noise and size; noise makes another image of a seed than none."""
    val = f"{ROLLOUT}.val_kwargs"
    more = [f"{val}.noise_level=0.9", f"{val}.pipeline.height=64", f"{val}.pipeline.num_inference_steps=4"]
    with serving(*more) as noisy, serving(*more[1:]) as plain:
        one, other = (image(server, prompt=PROMPT, seed=3) for server in (noisy, plain))
        assert one.shape == other.shape == (64, 48, 3) and np.abs(one - other).max() > 1


def test_new_weights_draw_another_image_and_say_their_version(server):
    before, own = image(server, prompt=PROMPT, seed=5), server.own_weights()
    try:
        wait_for(server.update_weights([(name, tensor * 1.05) for name, tensor in own], 8))
        answer = post(server, prompt=PROMPT, seed=5).json()
        assert answer["version"] == 8 and np.abs(pixels(answer["data"][0]["b64_json"]) - before).max() > 1
        assert requests.get(f"{server.address}/health", timeout=GUARD).json() == {"status": "ok", "version": 8}
    finally:
        wait_for(server.update_weights(own, 7))
    assert (image(server, prompt=PROMPT, seed=5) == before).all()


# ---- what is refused -----------------------------------------------------------------------------------

REFUSED = {
    "no prompt": ({}, 422, "there is no prompt"),
    "a number for a prompt": ({"prompt": 3}, 422, "prompt=3: expected a text"),
    "another field": ({"prompt": "", "sead": 3}, 422, 'unknown field "sead": did you mean "seed"?'),
    "a knob of other models": ({"prompt": "", "guidance_scale": 3}, 422, 'unknown field "guidance_scale"'),
    "another model": ({"prompt": "", "model": "gpt-image-1"}, 404, 'unknown model "gpt-image-1"'),
    "an address for an answer": ({"prompt": "", "response_format": "url"}, 422, "b64_json only"),
    "many images": ({"prompt": "", "n": 5}, 413, "n=5: at most 4 images a request (actor_rollout_ref.rollout.http"),
    "no images": ({"prompt": "", "n": 0}, 422, "n=0: expected a whole number, 1 or more"),
    "half an image": ({"prompt": "", "n": 0.5}, 422, "n=0.5: expected a whole number"),
    "yes for a number": ({"prompt": "", "n": True}, 422, "n=True: expected a whole number"),
    "a large seed": ({"prompt": "", "seed": 2**32}, 422, "seed=4294967296: expected a whole number, 0 to 4294967295"),
    "seeds that end": ({"prompt": "", "n": 2, "seed": 2**32 - 1}, 422, "0 to 4294967294"),
    "a word for a size": ({"prompt": "", "size": "large"}, 422, 'such as "512x512"'),
    "a large size": ({"prompt": "", "size": "64x32"}, 413, "at most 1536 pixels (actor_rollout_ref.rollout.http.max"),
    "an odd size": ({"prompt": "", "size": "24x32"}, 422, "size: width=24 is no multiple of 16"),
    "no size": ({"prompt": "", "size": "0x16"}, 422, "width=0: expected 1 or more"),
    "many steps": ({"prompt": "", "num_inference_steps": 101}, 413, "num_inference_steps=101: at most 100"),
    "less than no guidance": ({"prompt": "", "true_cfg_scale": -1}, 422, "true_cfg_scale=-1: expected 1 or more"),
    "a word for guidance": ({"prompt": "", "true_cfg_scale": "4"}, 422, "true_cfg_scale=4: expected a number"),
    "what has no effect": ({"prompt": "", "negative_prompt": "x"}, 422, "no effect without guidance: set true_cfg"),
    "strong guidance": ({"prompt": "", "true_cfg_scale": 1e308}, 422, "true_cfg_scale=1e+308: expected at most 100"),
    "guidance beyond floats": ({"prompt": "", "true_cfg_scale": 10**400}, 422, "00000: expected 1 or more"),
    "steps beyond floats": ({"prompt": "", "num_inference_steps": 10**400}, 413, "00000: at most 100"),
    "images beyond floats": ({"prompt": "", "n": 10**400}, 413, "00000: at most 4 images"),
    "a single step": ({"prompt": "", "num_inference_steps": 1}, 422, "num_inference_steps=1: expected more"),
    "half of a character": ({"prompt": "\ud800"}, 422, "a text has \\ud800, which is half of a character"),
    "half of a name": ({"prompt": "", "\udfff": 1}, 422, "a text has \\udfff"),
    "half of a model's name": ({"prompt": "", "model": "a\ud800"}, 422, "a text has \\ud800"),
    "a long prompt": ({"prompt": "a " * 600}, 422, "more than max_sequence_length=512"),
    "a longer prompt": ({"prompt": "a " * 40_000}, 413, "the request has more than 65536 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_one_line(server, name):
    fields, status, words = REFUSED[name]
    answer = post(server, **fields)
    assert answer.status_code == status and words in said(answer)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'{"prompt": "", "true_cfg_scale": NaN}'])
def test_bad_bodies_are_refused(server, body):
    answer = requests.post(f"{server.address}/v1/images/generations", data=body, timeout=GUARD)
    assert answer.status_code == 422 and said(answer)


def test_whole_characters_beyond_the_first_plane_are_drawn(server):
    body = b'{"prompt": "\\ud83d\\ude00", "seed": 1}'  # as JSON in ASCII says it
    answer = requests.post(f"{server.address}/v1/images/generations", data=body, timeout=GUARD)
    assert answer.status_code == 200, answer.text


def test_what_is_no_number_is_no_image(server):
    """For a guest, and for a run."""
    own = server.own_weights()
    name = next(name for name, _ in own if name.endswith("proj_out.weight"))
    try:
        broken = [(n, torch.full_like(t, torch.nan) if n == name else t) for n, t in own]
        wait_for(server.update_weights(broken, 9))
        answer = post(server, prompt=PROMPT, n=2)
        assert answer.status_code == 500 and "2 of 2 images have NaN or infinite values" in said(answer)
        with pytest.raises(RunError, match="4 of 4 images have NaN or infinite values"):
            wait_for(burst(server))
    finally:
        wait_for(server.update_weights(own, 7))
    assert post(server, prompt=PROMPT).status_code == 200


def test_a_request_has_no_more_images_than_a_forward():
    with serving(f"{ROLLOUT}.max_num_seqs=2") as small:
        assert "at most 2 images" in said(post(small, prompt=PROMPT, n=3))
        assert len(post(small, prompt=PROMPT, n=2).json()["data"]) == 2


def test_larger_images_where_they_are_allowed():
    with serving(f"{ROLLOUT}.http.max_pixels=4096") as large:
        assert image(large, prompt=PROMPT, size="64x64").shape == (64, 64, 3)


def test_a_token_is_asked_for(tmp_path):
    (tmp_path / "token").write_text("sesame\n")
    with serving(f"{ROLLOUT}.http.token_file={tmp_path}/token") as server:
        assert post(server, prompt=PROMPT).status_code == 401
        assert requests.get(f"{server.address}/v1/models", timeout=GUARD).status_code == 401
        assert requests.get(f"{server.address}/health", timeout=GUARD).status_code == 200
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="sesame", max_retries=0)
        assert client.images.generate(prompt=PROMPT).version == 7


def test_a_port_that_is_taken_is_one_line(server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = rf"http.port: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another$"
        with pytest.raises(RunError, match=words):
            wait_for(server.listen(port))


# ---- who waits -----------------------------------------------------------------------------------------


def test_before_the_weights_have_come():
    with serving(weights=False) as early:
        assert requests.get(f"{early.address}/health", timeout=GUARD).json() == {"status": "ok", "version": None}
        answer = post(early, prompt=PROMPT)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1") and "have not come" in said(answer)
        wait_for(early.update_weights(early.own_weights(), 1))
        assert post(early, prompt=PROMPT).json()["version"] == 1


@pytest.fixture
def drawn(server, monkeypatch):
    """The seeds of every batch that the engine draws."""
    batches, draw_batch = [], server.engine.draw_batch

    def noted(requests):
        batches.append([request.params["seed"] for request in requests])
        return draw_batch(requests)

    monkeypatch.setattr(server.engine, "draw_batch", noted)
    return batches


@contextmanager
def paused(server: Server):
    wait_for(server.pause())
    try:
        yield
    finally:
        wait_for(server.resume())


def waiting(server: Server) -> int:
    return len(server.engine.batcher._waiting)


def test_requests_wait_while_the_engine_pauses_and_who_has_gone_is_not_drawn(server, drawn):
    with ThreadPoolExecutor(2) as pool:
        with paused(server):
            first = pool.submit(post, server, prompt=PROMPT, seed=1, n=2)
            until(lambda: len(server.engine.batcher._running) == 2)  # in the engine's hands
            with pytest.raises(requests.Timeout):
                requests.post(
                    f"{server.address}/v1/images/generations", json={"prompt": PROMPT, "seed": 50, "n": 2}, timeout=3
                )
            until(lambda: server._http._taken == 1)
            last = pool.submit(post, server, prompt=PROMPT, seed=9)
            until(lambda: server._http._taken == 2 and waiting(server))
            assert not first.done() and not last.done() and drawn == []
        assert [answer.result().status_code for answer in (first, last)] == [200, 200]
    assert drawn == [[1, 2], [9]]


def test_who_comes_when_too_many_wait_is_told_to_come_back(server, monkeypatch):
    monkeypatch.setattr(image_http, "PLACES", 2)
    with ThreadPoolExecutor(2) as pool:
        with paused(server):
            waits = [pool.submit(post, server, prompt=PROMPT) for _ in range(2)]
            until(lambda: server._http._taken == 2)
            answer = post(server, prompt=PROMPT)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1") and "2 requests wait" in said(answer)
        assert [one.result().status_code for one in waits] == [200, 200]
    assert post(server, prompt=PROMPT).status_code == 200


def test_who_is_slow_to_ask_keeps_nobody_waiting(server, monkeypatch):
    monkeypatch.setattr(image_http, "PLACES", 1)
    with ExitStack() as slow:
        for _ in range(2):
            slow.enter_context(RawClient(server.address)).begin("/v1/images/generations", 100).send(b"{")
        assert post(server, prompt=PROMPT).status_code == 200


def test_connections_have_a_limit(monkeypatch):
    monkeypatch.setattr(http_door, "PATIENCE_SECONDS", 1000)
    limits = [f"{ROLLOUT}.http.max_connections=3", f"{ROLLOUT}.http.max_connections_per_address=2"]
    with serving(*limits, weights=False) as server, ExitStack() as clients:
        for source in ("127.0.0.2", "127.0.0.2", "127.0.0.3"):
            clients.enter_context(RawClient(server.address, source)).send(b"POST")
        for source in ("127.0.0.2", "127.0.0.3"):
            with RawClient(server.address, source) as refused:
                assert b" 503 " in refused.answer()


def test_headers_that_do_not_come_are_cut_off(server, monkeypatch):
    monkeypatch.setitem(http_door.SECONDS, "headers", 0.05)
    with RawClient(server.address) as slow:
        assert slow.send(b"POST / HTTP/1.1\r\n").answer() == b""


def test_an_engine_that_fails_fails_one_request(server, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(server.engine, "draw_batch", lambda requests: 1 / 0)
        answer = post(server, prompt=PROMPT)
        assert (answer.status_code, said(answer)) == (500, "ZeroDivisionError: division by zero")
    assert post(server, prompt=PROMPT).status_code == 200
    with monkeypatch.context() as broken:  # or a codec
        broken.setattr(image_http, "as_json", lambda response: 1 / 0)
        answer = post(server, prompt=PROMPT)
        assert (answer.status_code, said(answer)) == (500, "ZeroDivisionError: division by zero")


# ---- training ------------------------------------------------------------------------------------------


async def burst(server: Server) -> list:
    """As a training step asks: ten samples, four a forward."""
    tokenizers = QwenImage.load_tokenizers(server.model_config)
    shared = dataclasses.asdict(server.config.pipeline) | {"noise_level": 0.7, "sde_type": "sde", "sde_window": (0, 2)}
    ids = [QwenImage.tokenize(tokenizers, prompt, 512) for prompt in (PROMPT, OTHER)]
    calls = [
        server.generate(
            prompt_ids=ids[i % 2],
            sampling_params=shared | {"seed": i, "position": (i, 10, "step"), "keep_trajectory": True},
            request_id=str(i),
        )
        for i in range(10)
    ]
    return await asyncio.gather(*calls)


def test_batches_of_training_are_the_same_with_guests_between_them(server, drawn):
    """Bit for bit, and a guest does not wait for the end of a step: it comes after the batch that it met."""
    alone = wait_for(burst(server))
    assert drawn == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    drawn.clear()
    with ThreadPoolExecutor(4) as pool:
        with paused(server):
            met = start(burst(server))
            until(lambda: waiting(server) == 6)
            guests = [pool.submit(post, server, prompt=PROMPT, seed=100 + i) for i in range(4)]
            until(lambda: waiting(server) == 10)
        assert [guest.result().status_code for guest in guests] == [200] * 4
    together = met.result(GUARD)
    training = [batch for batch in drawn if batch[0] < 100]
    assert training == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch[0] >= 100 for batch in drawn] == [False, True, False, True, False, True, True]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.response, other.response)
        assert all(torch.equal(one.trajectory[key], other.trajectory[key]) for key in one.trajectory)


def test_a_rollout_begins_when_a_guest_has_been_drawn(server, monkeypatch):
    """What the engine forgets before a rollout is not taken from under a sample that is being drawn."""
    drawing, go_on, forgot, draw_batch = threading.Event(), threading.Event(), [], server.engine.draw_batch

    def held(requests):
        drawing.set()
        assert go_on.wait(GUARD)
        return draw_batch(requests)

    monkeypatch.setattr(server.engine, "draw_batch", held)
    monkeypatch.setattr(server.engine, "forget_rollout", lambda: forgot.append(go_on.is_set()))
    with ThreadPoolExecutor(1) as pool:
        guest = pool.submit(post, server, prompt=PROMPT)
        assert drawing.wait(GUARD)
        beginning = start(server.begin())
        wait([beginning], timeout=0.3)
        go_on.set()
        beginning.result(GUARD)
        assert guest.result().status_code == 200
    assert forgot == [True]


def test_nothing_is_compiled_for_a_guest(server):
    """A second size would make dynamo compile anew, and go on with graphs for any size: training's are for its own."""
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_blocks({"transformer": server.engine.module}, backend=keep)
    try:
        image(server, prompt=PROMPT, size="16x16")
        assert graphs == []
        wait_for(burst(server))
        of_training = len(graphs)
        assert of_training > 0
        image(server, prompt=PROMPT, size="32x32", n=1)
        assert len(graphs) == of_training
    finally:
        for block in server.engine.module.transformer_blocks:
            del block.forward
        torch._dynamo.reset()


def test_the_answer_is_json_that_any_client_reads(server):
    answer = post(server, prompt=PROMPT, seed=1)
    assert answer.headers["content-type"] == "application/json"
    assert set(json.loads(answer.text)) == {"created", "version", "data"}
