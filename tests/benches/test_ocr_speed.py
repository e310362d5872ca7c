"""The benchmark of the OCR reward gives every reader the same scenes, in turns, and compares with what was drawn."""

from benchmarks.ocr_speed import measure, table


def test_readers_take_turns_and_are_compared_with_the_truth():
    calls = []

    def reader(name, wrong):
        def read(images):
            calls.append((name, tuple(images)))
            return [f"SALE {image}{wrong}" for image in images]

        return read

    truths = ["open", "exit", "home"]
    found = measure({"good": reader("good", ""), "bad": reader("bad", "x")}, truths, batch=2)
    assert calls[2:] == [("good", ("open", "exit")), ("bad", ("open", "exit")), ("good", ("home",)), ("bad", ("home",))]
    good, bad = table(found, truths).splitlines()[2:]
    assert good.endswith("| 1.0000 | 3 of 3 |") and bad.endswith("| 0.7500 | 0 of 3 |")
