"""The live page's server, over HTTP: what it shows of runs, and whom it obeys. test_watch_page.py looks at the page."""

import contextlib
import json
import os
import re
import shutil
import socket
import sys

import psutil
import pytest
from starlette.testclient import TestClient

from verl_omni.cli import watch
from verl_omni.report.assets import WEB
from verl_omni.report.following import Follower
from verl_omni.report.notices import notice
from verl_omni.report.run_state import read_state
from verl_omni.report.watch_server import ASSETS, Gate, watch_app
from verl_omni.report.watched_runs import WatchedFolder
from verl_omni.trainer.progress import Progress, write_progress
from verl_omni.utils.run_files import SAVE, STOP

TOKEN = "the-token"
HERE = {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}
RUNNING = {"stage": "rollout", "step": 3, "total": 9, "over": None, "process": HERE, "time": 0.0}


def client(folder, host="localhost", at="http://localhost:6060") -> TestClient:
    return TestClient(watch_app(WatchedFolder(folder), host, TOKEN), base_url=at)


def bearer(token=TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def say(run_dir, **changes) -> None:
    (run_dir / "progress.json").write_text(json.dumps(RUNNING | changes))


def append(path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


# ---- what it shows -----------------------------------------------------------------------------------------


def test_a_run_is_shown_with_curves_images_and_checkpoints(run_dir):
    say(run_dir, step=6)
    (run_dir / "global_step_3").mkdir()
    (run_dir / "global_step_3/manifest.json").write_text("{}")
    (run_dir / "global_step_5").mkdir()  # without a manifest it is no checkpoint
    append(run_dir / "notices.jsonl", '{"step": 2, "line": "step 2: all rewards are equal"}\n{"step": 3, "li')
    site = client(run_dir)
    (brief,) = site.get("/api/runs").json()["runs"]
    assert brief["name"] == run_dir.name and brief["step"] == 6 and brief["score"] == pytest.approx(0.9)
    assert brief["state"]["word"] == "running" and "rollout of step 6 of 9" in brief["state"]["line"]
    whole = site.get("/api/run", params={"run": run_dir.name}).json()
    reward = whole["charts"]["Learning"][0]
    assert reward["heading"] == "Reward" and reward["series"][0]["points"][3] == [4, 0.7]
    assert [chart["heading"] for chart in whole["charts"]["Time"]] == ["Seconds of each step"]
    assert whole["validations"] == [
        {"step": 0, "score": 0.544}, {"step": 3, "score": 0.75}, {"step": 10, "score": None},
    ]  # fmt: skip
    assert [(one["step"], one["score"]) for one in whole["checkpoints"]] == [(3, 0.75)]
    assert whole["warnings"] == ["step 2: all rewards are equal"]
    rows = site.get("/api/samples", params={"run": run_dir.name, "kind": "validation", "step": 3}).json()
    assert [row["prompt"] for row in rows] == [f'a sign that reads "40{i}"' for i in range(4)]
    picture = site.get("/picture", params={"run": run_dir.name, "file": rows[0]["file"]})
    assert picture.content == (run_dir / "validation/step_3/00000.png").read_bytes()
    assert picture.headers["content-type"] == "image/png"


def test_the_page_has_all_it_needs_and_nothing_of_other_places(run_dir):
    site = client(run_dir)
    page = site.get("/")
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {name for name in named if not name.startswith("data:")} == {f"assets/{name}" for name in ASSETS}
    for name in ASSETS:
        assert site.get(f"/assets/{name}").text == (WEB / name).read_text()
    assert site.get("/assets/watch.html").status_code == site.get("/assets/..%2Freport.py").status_code == 404
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_a_folder_of_runs_and_one_that_has_none_yet(tmp_path, run_dir):
    folder = tmp_path.parent / f"{tmp_path.name}-runs"
    shutil.copytree(run_dir, folder / "project/one")
    (folder / "link").symlink_to(run_dir)  # leads elsewhere
    site = client(folder)
    assert [run["name"] for run in site.get("/api/runs").json()["runs"]] == ["project/one"]
    (folder / "two").mkdir()
    say(folder / "two", step=0, stage="loading of the model")
    names = [run["name"] for run in site.get("/api/runs").json()["runs"]]
    assert sorted(names) == ["project/one", "two"]
    new = site.get("/api/run", params={"run": "two"}).json()
    assert new["charts"] == {"Learning": [], "Time": [], "Memory": []} and new["title"] == "two"
    for name in ("link", "..", "project", ""):
        assert site.get("/api/run", params={"run": name}).status_code == 404
    (tmp_path / "empty").mkdir()
    assert client(tmp_path / "empty").get("/api/runs").json()["runs"] == []


def test_a_damaged_run_is_said_and_hides_no_other(tmp_path, run_dir):
    folder = tmp_path.parent / f"{tmp_path.name}-runs"
    for name in ("bad", "good"):
        shutil.copytree(run_dir, folder / name)
    (folder / "bad/config.yaml").write_text("a: [")
    told = {run["name"]: run for run in client(folder).get("/api/runs").json()["runs"]}
    assert "config.yaml is no YAML" in told["bad"]["error"] and told["good"]["step"] == 6
    (folder / "good/validation/step_3/samples.jsonl").write_text("{\n")
    answer = client(folder).get("/api/samples", params={"run": "good", "kind": "validation", "step": 3})
    assert answer.status_code == 422 and "samples.jsonl, line 1 is no JSON" in answer.json()["error"]


def test_a_file_that_is_being_written(tmp_path):
    """It grows, its last line is written anew or is half there, and a resumed run puts a shorter one in its place."""
    path, line = tmp_path / "metrics.jsonl", '{{"step": {}, "data": {{"x": {}}}}}\n'.format
    follower = Follower(path)

    def seen() -> list[tuple[int, int]]:
        return [(entry["step"], entry["data"]["x"]) for entry in follower.entries()]

    assert seen() == []
    path.write_text(line(1, 1) + line(2, 2))
    assert seen() == [(1, 1), (2, 2)]
    append(path, '{"step": 3, "da')
    assert seen() == [(1, 1), (2, 2)]
    path.write_text(line(1, 1) + line(2, 222) + line(3, 3))  # the same file: more about step 2
    assert seen() == [(1, 1), (2, 222), (3, 3)]
    append(path, "garbage\n")
    assert seen() == [(1, 1), (2, 222), (3, 3)]
    append(path, line(4, 4))
    assert seen() == [(1, 1), (2, 222), (3, 3), (4, 4)] and follower.unreadable == 1
    new = tmp_path / "new"
    new.write_text(line(1, 1) + line(2, 5))
    new.replace(path)
    assert seen() == [(1, 1), (2, 5)] and follower.unreadable == 0
    path.unlink()
    assert seen() == []


@pytest.mark.parametrize(
    ("said", "word", "line"),
    [
        ({}, "running", "rollout of step 3 of 9"),
        ({"step": 0, "stage": "loading of the model"}, "running", "loading of the model"),
        ({"process": HERE | {"began": 1.0}}, "gone", "gone without a word during the rollout of step 3 of 9"),
        ({"process": HERE | {"host": "far away"}}, "running", "on far away"),
        ({"over": 0}, "finished", "finished"),
        ({"over": 130, "words": "stopped after step 3 of 9"}, "stopped", "stopped after step 3 of 9"),
        ({"over": 1, "words": "error: the judge is gone"}, "failed", "error: the judge is gone"),
        ({"over": 1, "last": "error: it hangs"}, "failed", "error: it hangs"),
        ({"process": "nobody"}, "unknown", "cannot be read"),
    ],
)
def test_how_a_run_is(tmp_path, said, word, line):
    say(tmp_path, **said)
    state = read_state(tmp_path)
    assert state.word == word and line in state.line


def test_a_run_of_an_earlier_version_and_a_file_that_is_cut_off(tmp_path):
    assert read_state(tmp_path).word == "unknown"
    (tmp_path / "progress.json").write_text('{"step": 3, "to')
    assert read_state(tmp_path).word == "unknown"


def test_the_log_as_a_terminal_shows_it(run_dir):
    lines = "".join(f"line {i}\n" for i in range(500))
    (run_dir / "run.log").write_bytes(lines.encode() + b"\x1b[36mcolour\x1b[0m\n 10%|\r 50%|\r100%|\ncut \xff")
    text = client(run_dir).get("/api/log", params={"run": run_dir.name}).json()["text"].splitlines()
    assert text[-3:] == ["colour", "100%|", "cut \ufffd"] and len(text) <= 200


# ---- files outside -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["upwards", "absolute", "link", "folder link", "config", "loop", "null", "long"])
def test_only_images_of_the_run_are_served(run_dir, tmp_path_factory, way):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.png").write_bytes(b"secret")
    (run_dir / "validation/link.png").symlink_to(outside / "secret.png")
    (run_dir / "validation/folder").symlink_to(outside)
    (run_dir / "validation/loop.png").symlink_to("loop.png")
    name = {
        "upwards": f"validation/../../{outside.name}/secret.png",
        "absolute": str(outside / "secret.png"),
        "link": "validation/link.png",
        "folder link": "validation/folder/secret.png",
        "config": "config.yaml",
        "loop": "validation/loop.png",
        "null": "validation/\0.png",
        "long": f"validation/{'a' * 5000}.png",
    }[way]
    answer = client(run_dir).get("/picture", params={"run": run_dir.name, "file": name})
    assert answer.status_code == 404 and b"secret" not in answer.content.replace(b"secret.png", b"")


def test_a_log_or_report_that_leads_elsewhere_is_not_read(run_dir, tmp_path_factory):
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("secret")
    for name in ("run.log", "report.html"):
        (run_dir / name).symlink_to(secret)
    site = client(run_dir)
    assert site.get("/api/log", params={"run": run_dir.name}).json() == {"text": ""}
    assert site.get("/report", params={"run": run_dir.name}).status_code == 404


def test_a_report_can_do_nothing_in_the_pages_name(run_dir):
    (run_dir / "report.html").write_text("<script>fetch('/api/wish', {method: 'POST'})</script>")
    policy = client(run_dir).get("/report", params={"run": run_dir.name}).headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts;") and "connect-src" not in policy


# ---- wishes, and whose -------------------------------------------------------------------------------------


def wish(site, what="stop", run=None, **headers):
    run = run or site.get("/api/runs").json()["runs"][0]["name"]
    return site.post("/api/wish", json={"run": run, "what": what}, headers=headers)


@pytest.mark.parametrize(("what", "file"), [("stop", STOP), ("save", SAVE)])
def test_a_wish_is_a_file_in_the_runs_folder(run_dir, what, file):
    say(run_dir)
    site = client(run_dir)
    assert wish(site, what, **bearer()).json() == {"asked": what}
    assert (run_dir / file).is_file() and not (run_dir / ({STOP, SAVE} - {file}).pop()).exists()
    assert wish(site, what, **bearer()).status_code == 200  # twice is once


def test_nobody_is_asked_where_nobody_listens(run_dir):
    say(run_dir, over=0)
    assert wish(client(run_dir), **bearer()).status_code == 409
    assert not (run_dir / STOP).exists()


def test_a_wish_leads_nowhere_else(run_dir, tmp_path_factory):
    """A link in the place of the file is not followed."""
    say(run_dir)
    target = tmp_path_factory.mktemp("outside") / "made"
    (run_dir / STOP).symlink_to(target)
    wish(client(run_dir), **bearer())
    assert not target.exists()


def browser(site, **headers) -> dict[str, str]:
    """The headers of the page itself, opened with the address that was printed: the token is in a cookie then."""
    site.get("/", params={"token": TOKEN})
    assert site.get("/api/runs").json()["may_ask"]
    return headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://localhost:6060", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://localhost:9999"}, 403),  # another server of this machine is the same site, with our cookie
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({}, 401),  # a cookie alone is no wish of the page
    ],
)
def test_other_sites_cannot_use_the_cookie(run_dir, headers, status):
    say(run_dir)
    site = client(run_dir)
    assert wish(site, **browser(site, **headers)).status_code == status
    assert (run_dir / STOP).exists() == (status == 200)


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"Cookie": "watch=the-token"}])
def test_without_the_token_one_may_only_look(run_dir, headers):
    say(run_dir)
    site = client(run_dir)
    assert site.get("/api/runs").json()["may_ask"] is False
    assert wish(site, Origin="http://localhost:6060", **headers).status_code == 401 and not (run_dir / STOP).exists()


@pytest.mark.parametrize("host", ["evil.example:6060", "localhost.evil.example", "127.0.0.1.evil.example", ""])
def test_a_rebound_name_is_refused_even_a_look(run_dir, host):
    """A page of evil.example whose name now leads to this machine is of the same origin as ours, but for its name."""
    site = client(run_dir)
    for path in ("/", "/api/runs", f"/picture?run={run_dir.name}&file=validation/step_0/00000.png"):
        assert site.get(path, headers={"Host": host}).status_code == 421
    assert wish(site, run=run_dir.name, Host=host, **bearer()).status_code == 421


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1:6060", "[::1]:6060", "LOCALHOST"])
def test_a_forwarded_port_is_not(run_dir, host):
    assert client(run_dir).get("/api/runs", headers={"Host": host}).status_code == 200


def test_other_machines_need_the_token_for_all(run_dir):
    say(run_dir)
    site = client(run_dir, host="0.0.0.0", at="http://node7:6060")
    for path in ("/", "/api/runs", "/assets/watch.js", f"/api/log?run={run_dir.name}"):
        assert site.get(path).status_code == 401
    assert site.get("/", params={"token": "wrong"}).status_code == 401
    opened = site.get("/", params={"token": TOKEN})
    assert "HttpOnly; SameSite=Strict" in opened.headers["set-cookie"]
    assert site.get("/api/runs").json()["may_ask"]  # with the cookie
    assert wish(site, Origin="http://node7:6060").status_code == 200


@pytest.mark.parametrize("body", [b"[]", b'{"what": "stop"}', b'{"run": "x", "what": "rm"}', b"[" * 4000, b"x" * 5000])
def test_what_is_no_wish_is_said(run_dir, body):
    answer = client(run_dir).post("/api/wish", content=body, headers=bearer())
    assert answer.status_code in (413, 422) and "expected" in answer.json()["error"]


def test_two_pages_of_one_machine_do_not_take_each_others_cookie(run_dir):
    one, two = (watch_app(WatchedFolder(run_dir), "localhost", TOKEN) for _ in range(2))
    assert isinstance(one, Gate) and one.cookie != two.cookie


# ---- the command -------------------------------------------------------------------------------------------


def command(monkeypatch, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["verl-omni watch", *arguments])
    with pytest.raises(SystemExit) as end:
        watch.main()
    return str(end.value.code)


def test_the_command_says_what_is_wrong(tmp_path, monkeypatch):
    assert command(monkeypatch, str(tmp_path / "nothing")).endswith(
        "nothing is no folder: name a run's folder, or the one that runs are written to (outputs)"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = command(monkeypatch, str(tmp_path), "--port", port)
    assert said.startswith(f"error: cannot listen on localhost port {port}: ") and said.endswith("another with --port")


def test_the_command_prints_the_address_and_how_to_come_from_elsewhere(run_dir, monkeypatch, capsys):
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: [one.close() for one in sockets])
    monkeypatch.setattr(sys, "argv", ["verl-omni watch", str(run_dir), "--port", "0"])
    watch.main()
    said = capsys.readouterr().out
    port = re.search(r"http://localhost:(\d+)/\?token=\S{20,}\n", said)[1]
    assert f"ssh -N -L {port}:localhost:{port} " in said and "(1 run)" in said


def test_a_full_disk_ends_no_run_for_what_is_only_to_be_looked_at(tmp_path, capsys, monkeypatch):
    (tmp_path / "notices.jsonl").symlink_to("/dev/full")
    notice(tmp_path, "all rewards are equal", step=3)
    (tmp_path / "progress.tmp").symlink_to("/dev/full")
    write_progress(Progress(run_dir=str(tmp_path)), None)
    said = capsys.readouterr()
    assert said.out == "step 3: all rewards are equal\n" and said.err.count("No space left on device") == 2
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        write_progress(Progress(run_dir=str(tmp_path)), None)
        with contextlib.suppress(OSError):
            full.close()
