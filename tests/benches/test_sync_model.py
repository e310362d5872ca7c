"""The tiny LTX-2 of the benchmark `sync`: what its clips show and let be heard."""

import pytest
import torch
import transformers
from packaging.version import Version

from benchmarks import sync_model
from verl_omni.pipelines.ltx2.adapter import LTX2, Geometry
from verl_omni.rewards.scorers.audio_video_sync import compute_score_audio_video_sync, motion


@pytest.mark.skipif(Version(transformers.__version__) >= Version("5.11"), reason="it draws other random decoders")
@torch.no_grad()
def test_a_picture_moves_where_it_changes_and_the_reward_hears_what_begins_there(monkeypatch):
    size = Geometry(sync_model.LATENT_FRAMES, 1, 1, sync_model.SOUND_LATENTS)
    monkeypatch.setattr(LTX2, "geometry", lambda config: size)
    torch.manual_seed(0)
    pipeline = sync_model.untrained()
    sync_model.show_each_latent_alone(pipeline.vae.decoder)
    pictures, (silence, sound) = sync_model.two_pictures(pipeline.vae), sync_model.levels(pipeline)
    for change in range(*sync_model.CHANGES):
        video = pictures[(torch.arange(size.frames) >= change).long()]
        scores = []
        for other in range(*sync_model.CHANGES):
            heard = torch.stack([silence, sound])[(torch.arange(size.sound) >= sync_model.begin_with(other)).long()]
            frames, waves = LTX2.decode_latents(pipeline, torch.cat([video, heard])[None], None)
            moves = motion(frames[0])
            first = 2 * change - 2  # from the frame before to the first of that latent
            assert moves.argmax() == first and moves.sum() - moves[first] < 1e-4
            scores += compute_score_audio_video_sync([frames[0]], [waves[0].clamp(-1, 1)], [8000], [25.0])
        found = [one["score"] for one in scores]
        together = found.pop(change - sync_model.CHANGES[0])
        assert together > 0.5 and max(found) < together - 0.2 and sum(score < 0 for score in found) >= 2
