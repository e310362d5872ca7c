import torch

from verl_omni.perf.step_profile import StepProfile, gaps, kind_of, summary, totals


def test_kernels_by_kind():
    assert kind_of("triton_poi_fused__scaled_dot_product_cudnn_attention_cat") == "compiled element-wise"
    assert kind_of("cudnn_generated_fort_native_sdpa_sm90_flash_fprop") == "attention"
    assert kind_of("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN") == "matrix products"
    assert kind_of("something else") == "other"


def test_summary_adds_up():
    text = summary([("nvjet_a", 1.0, 3), ("nvjet_b", 2.0, 1), ("triton_poi", 0.5, 9)], wall=4.0)
    assert "4.000 s  the step" in text and "3.500 s  in kernels (87.5%)" in text
    assert "3.000 s   75.0%  matrix products" in text


def test_gaps_between_kernels():
    """b runs inside a, so the device is idle from 2.0 to 2.5 only; half a millisecond is none."""
    text = gaps([("a", 1.0, 2.0), ("b", 1.2, 1.5), ("c", 2.5, 3.0), ("d", 3.0005, 4.0)])
    assert "0.500 s  in 1 gaps" in text and "at    1.000 s, after a, before c" in text


def test_profile_of_real_work(tmp_path):
    profile = StepProfile(torch.device("cpu"))
    profile.start()
    torch.randn(64, 64) @ torch.randn(64, 64)
    profile.stop(tmp_path)
    text = (tmp_path / "profile.txt").read_text()
    assert "aten::mm" in text and "matrix products" in text
    assert (tmp_path / "profile.json.gz").stat().st_size > 0


def test_calls_of_one_kernel_are_added_up():
    found = totals([("a", 1.0, 2.0), ("b", 2.0, 2.25), ("a", 3.0, 3.5)])
    assert found == [("a", 1.5, 2), ("b", 0.25, 1)]
