"""The reward `http`: the scores of a server, each once, whatever happens on the way; or one line that says why not."""

import json
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from reward_servers import GUARD, Command, Gate, answering, free_port, mean, mean_scorer, picture, serving, until

from verl_omni.rewards import check_settings, make_scorer
from verl_omni.rewards.serving import client
from verl_omni.rewards.serving.client import RewardServerError, addresses, own_words, seconds
from verl_omni.rewards.serving.replica import Replica


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.2)


def asker(address: str, scorer: str = "mean", **settings):
    settings = {"address": address, "scorer": scorer, "breaker_pause": 0.2, **settings}
    check_settings("http", settings)
    return make_scorer("http", settings)


def batch(count: int, first: int = 0) -> tuple[list, list, list, list]:
    seeds = range(first, first + count)
    return (
        [picture(s) for s in seeds],
        [f"t{s}" for s in seeds],
        [f"p{s}" for s in seeds],
        [{"index": s} for s in seeds],
    )


def score(value: float) -> tuple[int, dict, bytes]:
    return 200, {}, json.dumps({"scores": [{"score": value}]}).encode()


# ---- scores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["png", "tensor"])
def test_scores_are_those_of_the_scorer_itself(encoding):
    samples = batch(20)
    samples[0][3] = [picture(100), picture(101)]  # a video
    with serving({"mean": mean_scorer}) as server:
        ask = asker(server.address, encoding=encoding)
        assert ask(*samples) == mean_scorer(*samples)
        with ThreadPoolExecutor(4) as pool:  # from several threads
            answers = list(pool.map(lambda first: ask(*batch(5, first)), range(0, 40, 5)))
        assert sum(answers, []) == mean_scorer(*batch(40))


def test_a_token_is_read_from_the_environment(monkeypatch):
    with serving({"mean": mean_scorer}, token="sesame") as server:
        monkeypatch.setenv("MY_TOKEN", "sesame")
        assert asker(server.address, token_env="MY_TOKEN")(*batch(1))[0]["score"] == mean(picture(0))
        with pytest.raises(RewardServerError, match="answers 401 this server wants its token"):
            asker(server.address)(*batch(1))
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ValueError, match="token_env=MY_TOKEN: there is no environment variable MY_TOKEN"):
        asker("http://localhost:1", token_env="MY_TOKEN")


def test_a_small_queue_makes_nobody_give_up():
    """Being told to wait is no failed try: one try is enough for many images that find few places."""
    with serving({"mean": mean_scorer}, queue_size=2, max_batch=1) as server:
        assert asker(server.address, retries=0, concurrency=8)(*batch(12)) == mean_scorer(*batch(12))


# ---- what is repeated, and what is not -----------------------------------------------------------------


class Script:
    """Answers one after the other, the last for ever; and what was asked."""

    def __init__(self, *answers):
        self.answers, self.asked, self.times = list(answers), [], []

    def __call__(self, request):
        self.times.append(time.monotonic())
        self.asked.append(request)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_failures_are_repeated_until_there_is_a_score():
    busy = (503, {"Retry-After": "0"}, b'{"detail": "full"}')
    script = Script(
        (500, {}, b"boom"), (502, {}, b""), busy, (200, {}, b"no json"), (200, {}, b'{"scores": []}'), score(3)
    )
    with answering(script) as address:
        assert asker(address, retries=4, breaker_after=9)(*batch(1)) == [{"score": 3}]
        assert len(script.asked) == 6
        assert all(request["body"] == script.asked[0]["body"] for request in script.asked)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            (500, {}, b'{"detail": "the scorer\\n failed"}'),
            "no score after 3 tries; the last: {}: 500 the scorer failed",
        ),
        ((503, {}, b""), "no score after 3 tries; the last: {}: 503 without a word"),
        ((200, {}, b"<html>"), "no score after 3 tries; the last: {}: answered no JSON: b'<html>'"),
        (
            (200, {}, b'{"scores": [{"score": NaN}]}'),
            "no score after 3 tries; the last: {}: answered {{'scores': [{{'sco",
        ),
        ((200, {}, b'{"scores": [{"score": 1}, {"score": 2}]}'), "no score after 3 tries; the last: {}: answered {{"),
    ],
)
def test_after_the_last_try_the_servers_words_are_told(answer, line):
    script = Script(answer)
    with answering(script) as address:
        with pytest.raises(RewardServerError) as error:
            asker(address, retries=2, breaker_after=9)(*batch(1))
    assert str(error.value).startswith(line.format(f"{address}/v1/score/mean")) and "\n" not in str(error.value)
    assert len(script.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 422, 307])
def test_what_the_server_refuses_is_not_asked_again(status):
    script = Script((status, {}, b'{"detail": "not like this"}'))
    with answering(script) as address:
        with pytest.raises(RewardServerError, match=f"{address}/v1/score/mean answers {status} not like this$"):
            asker(address)(*batch(1))
    assert len(script.asked) == 1


def test_a_scorers_own_words_arrive():
    def picky(images, *_):
        raise ValueError("this image is too blue")

    with serving({"picky": picky}) as server:
        with pytest.raises(RewardServerError, match="answers 422 sample 0: this image is too blue$"):
            asker(server.address, "picky")(*batch(3))
        with pytest.raises(RewardServerError, match='404 unknown scorer "pick": did you mean "picky"'):
            asker(server.address, "pick")(*batch(1))


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_obeyed(status):
    script = Script((status, {"Retry-After": "1"}, b"{}"), score(1))
    with answering(script) as address:
        assert asker(address, retries=0)(*batch(1)) == [{"score": 1}]
    assert script.times[1] - script.times[0] >= 1
    script = Script((status, {"Retry-After": "3600"}, b'{"error": {"message": "quota"}}'))
    with answering(script) as address:
        with pytest.raises(
            RewardServerError, match=f"{status} quota, and asks to wait 3600 s, which is more than time"
        ):
            asker(address)(*batch(1))


def test_a_server_that_stays_busy_is_given_up():
    with answering(Script((503, {"Retry-After": "0"}, b'{"detail": "full"}'))) as address:
        with pytest.raises(RewardServerError, match="no score after 2 tries; the last: .*: 503 full"):
            asker(address, retries=1, timeout=2)(*batch(1))


def test_an_answer_that_does_not_come():
    gate = Gate()
    with serving({"mean": gate}) as server:
        with pytest.raises(RewardServerError, match="no score after 2 tries; the last: .*: no answer within 0.3 s"):
            asker(server.address, retries=1, timeout=0.3)(*batch(1))
        gate.open.set()


def test_nobody_there():
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RewardServerError, match=f"no score after one try; the last: {address}.*Cannot connect to host"):
        asker(address, retries=0)(*batch(2))


# ---- servers that come and go --------------------------------------------------------------------------


def flaky(images, ground_truths, prompts, extra_infos):
    if random.random() < 0.2:
        raise RuntimeError("one in five")
    return mean_scorer(images, ground_truths, prompts, extra_infos)


def test_a_server_that_restarts_in_the_middle():
    port, scored = free_port(), threading.Event()

    def counted(*samples):
        if samples[3][-1]["index"] >= 20:
            scored.set()
        return flaky(*samples)

    with ThreadPoolExecutor(1) as pool:
        ask = asker(f"http://127.0.0.1:{port}", concurrency=4, retries=20)
        with serving({"mean": counted}, port=port, max_batch=2):
            answers = pool.submit(ask, *batch(60))
            assert scored.wait(GUARD)
        assert not answers.done()
        with serving({"mean": flaky}, port=port):
            assert answers.result(GUARD) == mean_scorer(*batch(60))


SCORERS = """
import numpy as np
from verl_omni.rewards import register_reward

@register_reward("red")
def red(images, ground_truths, prompts, extra_infos):
    return [{"score": np.asarray(image)[..., 0].mean()} for image in images]
"""


def test_a_server_that_is_killed_and_started_again(tmp_path):
    samples = batch(100)
    expected = [{"score": float(np.asarray(image)[..., 0].mean())} for image in samples[0]]
    server = Command(tmp_path, SCORERS, "red", "--port", "0", "--max-batch", "1")
    ask = asker(server.address, "red", concurrency=2, retries=200, breaker_after=2)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask, *samples)
        until(lambda: ask.client.replicas[0].in_flight)
        server.process.send_signal(signal.SIGKILL)
        server.end()
        assert not answers.done()
        again = Command(tmp_path, SCORERS, "red", "--port", str(server.port))
        assert answers.result(GUARD) == expected
    again.process.terminate()
    assert again.end() == 0


@pytest.fixture
def dead():
    """The address of a server that closes every connection, and how many there were."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections = []

    def close_all():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(1)
            connection.close()

    threading.Thread(target=close_all, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_replica_that_fails_is_left_alone(dead):
    address, connections = dead
    with serving({"mean": mean_scorer}) as server:
        ask = asker(f"{address}, {server.address}", concurrency=1, retries=1, breaker_after=3, breaker_pause=300)
        assert ask(*batch(10)) == mean_scorer(*batch(10))
    assert len(connections) == 3


def test_a_replica_that_is_back_is_asked_again():
    port = free_port()
    with serving({"mean": mean_scorer}) as server:
        ask = asker(f"http://127.0.0.1:{port}, {server.address}", breaker_after=1, concurrency=1)
        ask(*batch(2))
        assert ask.client.replicas[0].broken
        with serving({"mean": mean_scorer}, port=port):
            time.sleep(0.2)  # the breaker's pause
            ask(*batch(2))
            assert not ask.client.replicas[0].broken


def test_after_the_pause_one_request_tries():
    replica = Replica("http://a", breaker_after=2, breaker_pause=0.05)
    replica.failed("one")
    assert replica.may_be_asked()
    replica.failed("two")
    assert not replica.may_be_asked()
    until(replica.may_be_asked)
    replica.trying = True  # as while a request is on its way
    assert not replica.may_be_asked()
    replica.trying = False
    replica.failed("three")
    assert not replica.may_be_asked(), "one failure opens it again"
    until(replica.may_be_asked)
    replica.answered()
    replica.failed("four")
    assert replica.may_be_asked(), "a whole count again"


def test_a_server_that_is_down_is_waited_for_and_then_given_up():
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RewardServerError, match=f"{address} was down for 1 s, the last: ClientConnectorError: Cannot"):
        asker(address, retries=3, timeout=1.0, breaker_after=2, breaker_pause=0.05)(*batch(3))


def test_the_others_wait_for_the_one_that_tries():
    """While one request tries a server that was down, and takes long, the others spend no try."""
    port, gate = free_port(), Gate()
    with ThreadPoolExecutor(1) as pool:
        ask = asker(f"http://127.0.0.1:{port}", retries=3, breaker_after=1, breaker_pause=0.05)
        ask.client.replicas[0].failures, ask.client.replicas[0].words = 1, "was down"
        with serving({"mean": gate}, port=port):
            answers = pool.submit(ask, *batch(6))
            until(lambda: gate.calls)
            time.sleep(0.5)  # more than the pauses of 4 tries
            asked = list(gate.calls)
            gate.open.set()
            assert [len(call) for call in asked] == [1]
            assert answers.result(GUARD) == mean_scorer(*batch(6))


def test_the_least_loaded_replica_is_asked():
    gate, counted = Gate(), []

    def free(*samples):
        counted.extend(samples[1])
        return mean_scorer(*samples)

    with serving({"mean": gate}) as slow, serving({"mean": free}) as quick, ThreadPoolExecutor(1) as pool:
        answers = pool.submit(asker(f"{slow.address},{quick.address}", concurrency=4), *batch(20))
        until(lambda: len(counted) == 18)
        gate.open.set()
        assert answers.result(GUARD) == mean_scorer(*batch(20))
        assert sum(map(len, gate.calls)) == 2


# ---- words ---------------------------------------------------------------------------------------------


def test_addresses():
    assert addresses("http://a:1/, https://b/x  http://c") == ["http://a:1", "https://b/x", "http://c"]
    for text, said in {
        "localhost:8000": 'address="localhost:8000": expected http://host:port',
        "": "address is empty",
        "http://me:secret@host": "address holds a password",
    }.items():
        with pytest.raises(ValueError, match=said) as error:
            addresses(text)
        assert "secret" not in str(error.value)


def test_retry_after_is_a_number_or_a_date():
    assert [seconds(text) for text in (None, "soon", "nan", "-1")] == [None] * 4
    assert seconds("1.5") == 1.5 and seconds("30") == 30
    assert seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert seconds("Fri, 31 Dec 2125 23:59:59 GMT") > 1e9


def test_own_words():
    assert own_words(b'{"detail": "a\\nb"}') == "a b"
    assert own_words(b'{"error": {"message": "model not found", "code": 404}}') == "model not found"
    assert own_words(b'{"object": "error", "message": "too long"}') == "too long"
    assert own_words(b"<h1>Bad  Gateway</h1>") == "<h1>Bad Gateway</h1>"
    assert own_words(b"[1]") == "[1]" and own_words(b"{}") == "{}" and own_words(b"") == "without a word"
