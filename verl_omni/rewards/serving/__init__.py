"""Rewards behind servers: a small contract, a server of registered scorers, and the client that rewards share.

    GET  /health             {"status": "ok"}; needs no token
    GET  /v1/scorers         {"scorers": ["ocr", ...]}
    GET  /metrics            for Prometheus
    GET  /openapi.json       all this as a schema; needs no token
    POST /v1/score/{scorer}  {"samples": [{...}, ...]}  ->  {"scores": [{"score": 0.5, ...}, ...]}

A sample has one of `image` (a PNG, JPEG or WebP file in base64), `frames` (a list of such files: a video) and `tensor`
(a safetensors file in base64 with one tensor, uint8 or floats in [0, 1]: channels x height x width, or a video with
frames first). It may have `prompt`, `ground_truth` and `extra_info`. The scores are in the order of the samples.

All but 200 comes with `{"detail": "one line"}`: 401 the token, 404 the scorer, 408 a body that does not come, 413 too
large, 422 what the scorer refuses, 500 a scorer that failed, 503 with Retry-After where too many are here already. Who
is slow may be cut off without a word.
"""
