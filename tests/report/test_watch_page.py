"""The live page in a real browser: it draws what the server tells, and its buttons reach the run.

    pip install playwright && CHROMIUM=/usr/bin/chromium pytest tests/report/test_watch_page.py

Without CHROMIUM it is the one that `playwright install chromium` brings.
"""

import json
import os
import shutil
import socket
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch
import uvicorn

from verl_omni.agent_loop.outputs import written
from verl_omni.report.report import write_report
from verl_omni.report.watch_server import watch_app
from verl_omni.report.watched_runs import WatchedFolder
from verl_omni.utils.run_files import SAVE

playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright: see the top of this file")
HERE = {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}
RUNNING = {"stage": "rollout", "step": 6, "total": 9, "over": None, "process": HERE}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def address(run_dir):
    with served(run_dir) as address:
        yield address


@contextmanager
def served(folder):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(watch_app(WatchedFolder(folder), "localhost", "t"), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://localhost:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def open_page(browser, url: str, **options):
    page = browser.new_context(**options).new_page()
    page.mistakes = []
    page.on("pageerror", lambda error: page.mistakes.append(str(error)))
    page.on("console", lambda line: page.mistakes.append(line.text) if line.type in ("error", "warning") else None)
    page.goto(url)
    return page


def test_a_run_that_goes_on(browser, address, run_dir):
    (run_dir / "progress.json").write_text(json.dumps(RUNNING | {"time": time.time()}))
    page = open_page(browser, f"{address}/?token=t")
    page.wait_for_selector(".badge.running")
    page.wait_for_selector("#images .pair img")
    assert "token" not in page.url and page.locator("#images .pair").count() == 4
    assert page.locator("#charts canvas").count() == page.locator("#charts figure").count() >= 3
    assert page.locator("#images img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 32
    page.locator("#step").fill("1")  # the second of the validations at 0, 3 and 10
    page.wait_for_selector("#images .pair >> text=step 3")
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 7, "data": {"critic/rewards/mean": 0.9, "timing_s/step": 9.0, "actor/kl_loss": 0.1}}\n')
    page.wait_for_selector("text=KL to the reference")
    page.click("text=Save now")
    page.wait_for_selector("text=It will be saved after this step.")
    assert (run_dir / SAVE).is_file()
    (run_dir / "progress.json").write_text(json.dumps(RUNNING | {"over": 0, "time": time.time()}))
    page.wait_for_selector(".badge.finished")
    assert page.mistakes == []


def test_videos_play_and_the_best_stands_beside_the_worst(browser, address, run_dir):
    """As mp4 files, on both pages; a browser without the codec says so by an error."""
    pytest.importorskip("av")
    folder, rows = run_dir / "training/step_3", []
    for side in ("best", "worst"):
        told = written(torch.randint(0, 256, (9, 3, 32, 48), dtype=torch.uint8), folder / f"000_{side}")
        score = float(side == "best")
        rows.append({"index": 0, "prompt": "p", "score": score, "seed": 0, "reward_extra_info": {}} | told)
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for url, place in ((address, "#preferred .pair video"), (write_report(run_dir).as_uri(), ".pair video")):
        page = open_page(browser, url)
        page.wait_for_selector(place)
        for video in page.locator(place).all():
            told = video.evaluate("async v => { v.muted = true; await v.play(); return [v.videoWidth, v.duration]; }")
            assert told == [48, pytest.approx(9 / 8)]
        assert page.locator(place).count() == 2 and page.mistakes == []


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_wider_than_the_screen(browser, address, width):
    page = open_page(browser, address, viewport={"width": width, "height": 800})
    page.wait_for_selector("#charts canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= width and page.mistakes == []
    assert page.locator("text=Save now").count() == 0  # without the token one looks


def test_a_state_of_one_of_several_runs_is_not_broken_on_a_phone(browser, run_dir, tmp_path_factory):
    several = tmp_path_factory.mktemp("several")
    (run_dir / "progress.json").write_text(json.dumps(RUNNING | {"over": 0, "time": time.time()}))
    for name in ("red", "outputs/overfit/run"):
        shutil.copytree(run_dir, several / name)
    with served(several) as address:
        page = open_page(browser, address, viewport={"width": 390, "height": 800})
        page.wait_for_selector("#charts canvas")
        lines = page.evaluate("[...document.querySelectorAll('.badge')].map(badge => badge.getClientRects().length)")
        assert lines == [1, 1, 1] and page.evaluate("document.documentElement.scrollWidth") <= 390
        page.context.close()


def test_a_zoom_stays_when_more_comes(browser, address, run_dir):
    page = open_page(browser, address)
    plot = page.wait_for_selector("#charts .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 40, steps=5)
    page.mouse.up()
    # What is under the pointer stands in the legend.
    shown = page.locator("#charts figure").first.locator(".u-legend .u-value").first
    page.mouse.move(box["x"] + 2, box["y"] + 40)
    playwright.expect(shown).not_to_be_empty()
    first = shown.inner_text()
    assert float(first) > 0
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 7, "data": {"critic/rewards/mean": 0.9, "actor/kl_loss": 0.2, "timing_s/step": 9.0}}\n')
    page.wait_for_selector("text=KL to the reference")
    page.mouse.move(box["x"] + 3, box["y"] + 41)
    playwright.expect(shown).to_have_text(first)
    assert page.mistakes == []


def test_the_report_draws_its_charts_alone(browser, run_dir):
    report = write_report(run_dir)
    page = open_page(browser, report.as_uri())
    assert page.locator("figure canvas").count() == page.locator("figure").count() >= 3
    page.locator(".smoothing input").first.fill("0.9")
    assert page.locator(".smoothing output").first.inner_text() == "0.90" and page.mistakes == []
