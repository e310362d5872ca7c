"""What a reward server does with requests that would take all of its memory, or all of its time."""

import base64
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import requests
from raw_http import RawClient
from reward_servers import GUARD, Gate, file_of, mean_scorer, picture, serving, until

from verl_omni.rewards.serving import contract, queues
from verl_omni.rewards.serving.contract import Limits
from verl_omni.rewards.serving.queues import DecodingRoom
from verl_omni.utils import http_door, http_requests, json_bodies
from verl_omni.utils.listening import Connections

PATH = "/v1/score/mean"
SMALL, LARGE = file_of(picture(0)), file_of(picture(0, 20, 20))  # 48 pixels and 400
ROOM = Limits(pixels=400, image_bytes=2000, decoded_bytes=4 * 400 + 2 * 2000)


def post(server, samples, **options) -> requests.Response:
    return requests.post(server.address + PATH, json={"samples": samples}, timeout=GUARD, **options)


def post_each(pool, server, samples) -> list:
    return [pool.submit(post, server, [sample]) for sample in samples]


# ---- memory --------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch):
    """What has been decoded so far."""
    found, decode = [], contract._decoded_picture

    def noted(what, data):
        found.append(what)
        return decode(what, data)

    monkeypatch.setattr(contract, "_decoded_picture", noted)
    return found


def queued(server, count: int) -> bool:
    waiting = f'verl_omni_reward_waiting{{scorer="mean"}} {count}.0'
    return waiting in requests.get(f"{server.address}/metrics", timeout=GUARD).text


def test_images_are_decoded_when_their_turn_has_come(decoded):
    gate = Gate()
    with serving({"mean": gate}, max_batch=2) as server, ThreadPoolExecutor(8) as pool:
        first = post_each(pool, server, [{"image": SMALL}])
        until(lambda: gate.calls)
        rest = post_each(pool, server, [{"frames": [SMALL] * 2}] * 4)
        until(lambda: queued(server, 5))
        assert len(decoded) == 1
        gate.open.set()
        assert [answer.result().status_code for answer in first + rest] == [200] * 5
    assert len(decoded) == 9


def test_a_damaged_file_in_a_batch_is_refused_alone(decoded):
    damaged = base64.b64encode(base64.b64decode(SMALL)[:-60]).decode()
    gate = Gate()
    with serving({"mean": gate}, max_batch=8) as server, ThreadPoolExecutor(8) as pool:
        first = post_each(pool, server, [{"image": SMALL}])
        until(lambda: gate.calls)
        rest = post_each(pool, server, [{"image": SMALL, "ground_truth": 1}, {"image": damaged}])
        until(lambda: queued(server, 3))
        gate.open.set()
        good, bad = (answer.result() for answer in rest)
        assert (first[0].result().status_code, good.status_code, bad.status_code) == (200, 200, 422)
        assert bad.json()["detail"].startswith("the image of sample 0 is damaged")


def test_a_large_sample_is_scored_alone_and_others_do_not_wait_for_all_of_them():
    gate = Gate()
    with serving({"mean": gate}, max_batch=4, limits=ROOM) as server, ThreadPoolExecutor(8) as pool:
        asked = post_each(pool, server, [{"image": SMALL, "ground_truth": "first"}])
        until(lambda: gate.calls)
        for count, name in enumerate("ABC", 2):
            asked += post_each(pool, server, [{"image": LARGE, "ground_truth": name}])
            until(lambda count=count: queued(server, count))
        for count, name in enumerate("ab", 5):
            asked += post_each(pool, server, [{"image": SMALL, "ground_truth": name}])
            until(lambda count=count: queued(server, count))
        gate.open.set()
        assert [answer.result().status_code for answer in asked] == [200] * 6
    assert gate.calls == [["first"], ["A"], ["a", "b"], ["B"], ["C"]]


def test_all_scorers_share_the_room_and_who_came_first_goes_first():
    room, order, threads = DecodingRoom(10), [], []

    def take(name: str, size: int) -> None:
        with room.taken(size):
            order.append(name)

    with room.taken(8):
        threads.append(threading.Thread(target=take, args=("large", 5)))
        threads[0].start()
        until(room._turn.locked)
        threads.append(threading.Thread(target=take, args=("small", 1)))  # there is room for it
        threads[1].start()
        assert order == []
    for thread in threads:
        thread.join(GUARD)
    assert order == ["large", "small"]


def test_what_was_decoded_is_given_back(monkeypatch):
    given = []
    monkeypatch.setattr(queues, "give_back_memory", lambda: given.append(1))
    monkeypatch.setattr(queues, "WORTH_GIVING_BACK", 4 * 400)
    with serving({"mean": mean_scorer}) as server:
        post(server, [{"image": SMALL}])
        assert given == []
        post(server, [{"image": LARGE}])
        assert given == [1]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"pixels": 2**28}, "--max-decoded-bytes 536870912: expected 1140850688 or more"),
        ({"request_bytes": 2**30}, "--max-waiting-bytes 536870912: expected --max-request-bytes (1073741824) or more"),
    ],
)
def test_limits_that_leave_no_room_for_one_request(limits, said):
    with pytest.raises(ValueError) as error:
        Limits(**limits)
    assert said in str(error.value)


# ---- JSON ----------------------------------------------------------------------------------------------


def test_many_values_are_refused_before_all_of_them_are_here():
    with serving({"mean": mean_scorer}) as server, RawClient(server.address) as client:
        client.begin(PATH, 100_000_000).send(b'{"samples": [').send(b"[]," * (json_bodies.MOST_MARKS // 2 + 1))
        answer = client.answer()
        assert b" 413 " in answer and b"more than 524288 values" in answer


@pytest.mark.parametrize("deep", ['{"a":' * 40 + "1" + "}" * 40, "[" * 40 + "]" * 40], ids=["objects", "lists"])
def test_deep_values_are_refused(deep):
    with serving({"mean": mean_scorer}) as server:
        body = f'{{"samples": [{{"image": "{SMALL}", "ground_truth": {deep}}}]}}'
        answer = requests.post(server.address + PATH, data=body, timeout=GUARD)
        assert answer.status_code == 422 and "nested more than 32 deep" in answer.json()["detail"]


@pytest.mark.parametrize("field", ["prompt", "ground_truth", "\\udead"])
def test_half_of_a_character_is_refused(field):
    """It could be in no answer: neither a scorer's nor a refusal's."""
    with serving({"mean": mean_scorer}) as server:
        body = f'{{"samples": [{{"image": "{SMALL}", "{field}": "\\ud800"}}]}}'
        answer = requests.post(server.address + PATH, data=body, timeout=GUARD)
        assert answer.status_code == 422 and "which is half of a character" in answer.json()["detail"]


def test_brackets_in_a_text_are_not_deep():
    text = '"[\\"{' * 100
    with serving({"mean": mean_scorer}) as server:
        answer = post(server, [{"image": SMALL, "prompt": text}])
        assert answer.status_code == 200 and answer.json()["scores"][0]["prompt"] == text


# ---- who is slow ---------------------------------------------------------------------------------------


def test_bodies_that_do_not_come_take_no_places():
    with serving({"mean": mean_scorer}, queue_size=2) as server, ExitStack() as clients:
        for _ in range(3):
            clients.enter_context(RawClient(server.address)).begin(PATH, 1000).send(b'{"samples"')
        assert post(server, [{"image": SMALL}]).status_code == 200


def test_bodies_share_bytes_and_who_is_slow_makes_room(monkeypatch):
    limits = Limits(request_bytes=5000, waiting_bytes=6000)
    monkeypatch.setattr(http_requests, "PATIENCE_SECONDS", 1000)
    with serving({"mean": mean_scorer}, limits=limits) as server, RawClient(server.address) as slow:
        slow.begin(PATH, 5000).send(b" " * 4900)
        sample = {"image": SMALL, "prompt": "x" * 1500}
        until(lambda: post(server, [sample]).status_code == 503)  # as soon as the slow one is here
        answer = post(server, [sample])
        assert answer.headers["Retry-After"] == "1" and "are here already" in answer.json()["detail"]
        monkeypatch.setattr(http_requests, "PATIENCE_SECONDS", 0)
        assert post(server, [sample]).status_code == 200
        assert b"made room for others" in slow.answer()


@pytest.mark.parametrize("token", ["Authorization: Bearer wrong", "X-Nothing: 1"])
def test_without_the_token_no_body_is_waited_for(token):
    with serving({"mean": mean_scorer}, token="sesame") as server, RawClient(server.address) as client:
        assert b" 401 " in client.begin(PATH, 1000, token).answer()


@pytest.mark.parametrize("said", [b"", b"POST / HTTP/1.1\r\nX-A: 1\r\n"], ids=["nothing", "half of its headers"])
def test_headers_that_do_not_come_are_cut_off(monkeypatch, said):
    monkeypatch.setitem(http_door.SECONDS, "headers", 0.05)
    with serving({"mean": mean_scorer}) as server, RawClient(server.address) as slow:
        assert slow.send(said).answer() == b""


def test_a_second_request_has_no_more_time_than_the_first(monkeypatch):
    with serving({"mean": mean_scorer}) as server, RawClient(server.address) as slow:
        assert b" 200 " in slow.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").answer()
        monkeypatch.setitem(http_door.SECONDS, "headers", 0.05)
        assert slow.send(b"GET /health HTTP/1.1\r\n").answer() == b""


def test_bodies_that_do_not_come_are_cut_off(monkeypatch):
    """Also one that is not read: the token is missing."""
    monkeypatch.setitem(http_door.SECONDS, "body", 0.05)
    with serving({"mean": mean_scorer}, token="sesame") as server, RawClient(server.address) as slow:
        slow.begin(PATH, 1000)
        assert b" 401 " in slow.answer() and slow.answer() == b""


def test_a_late_body_is_told_so(monkeypatch):
    monkeypatch.setattr(http_requests, "BODY_SECONDS", 0.05)
    with serving({"mean": mean_scorer}) as server, RawClient(server.address) as slow:
        answer = slow.begin(PATH, 1000).send(b"{").answer()
        assert b" 408 " in answer and b"did not arrive within 0.05 s" in answer


@pytest.mark.parametrize("connections", [Connections(3, 100), Connections(100, 3)], ids=["in all", "of one address"])
def test_too_many_connections(monkeypatch, caplog, connections):
    """Who comes then takes the place of who has been slow, or is told to come back."""
    monkeypatch.setattr(http_door, "PATIENCE_SECONDS", 1000)
    http_door.seldom._seen.clear()
    with serving({"mean": mean_scorer}, connections=connections) as server, ExitStack() as clients:
        slow = [clients.enter_context(RawClient(server.address, "127.0.0.2")).send(b"POST") for _ in range(3)]
        with RawClient(server.address, "127.0.0.2") as fourth:
            answer = fourth.answer()
        assert b" 503 " in answer and b"Retry-After: 1" in answer and b"too many connections" in answer
        if connections.most == 100:
            assert requests.get(f"{server.address}/health", timeout=GUARD).status_code == 200
        monkeypatch.setattr(http_door, "PATIENCE_SECONDS", 0)
        with RawClient(server.address, "127.0.0.2") as fifth:
            assert b" 200 " in fifth.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").answer()
        assert slow[0].answer() == b""
        said = [record.getMessage() for record in caplog.records if record.name == http_door.__name__]
    assert said == [
        "a connection from 127.0.0.2 was refused: 3 are open",
        "a connection from 127.0.0.2 made room: 3 are open",
    ]


def test_who_waits_for_a_score_is_not_cut_off(monkeypatch):
    monkeypatch.setattr(http_door, "PATIENCE_SECONDS", 0)
    gate = Gate()
    with serving({"mean": gate}, connections=Connections(1, 1)) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server, [{"image": SMALL}])
        until(lambda: gate.calls)
        with RawClient(server.address) as second:
            assert b" 503 " in second.answer()
        gate.open.set()
        assert asked.result().status_code == 200


def test_there_are_no_more_connections_than_file_handles(monkeypatch, caplog):
    monkeypatch.setattr(http_door.resource, "getrlimit", lambda _: (300, 300))
    monkeypatch.setattr(http_door.os, "listdir", lambda _: ["0"] * 20)
    http_door.seldom._seen.clear()
    with caplog.at_level(logging.WARNING):
        assert http_door.Door(Connections()).most == 300 - 20 - 128 - 32
    assert "there are file handles for 120 connections, not for 512: raise `ulimit -n`" in caplog.text


@pytest.mark.parametrize(
    ("host", "house"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "::ffff:10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_one_owner_of_many_addresses_counts_once(host, house):
    assert http_door.house_of(host) == house
