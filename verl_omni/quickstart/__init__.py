"""The OCR task of the Flow-GRPO paper in miniature: a small text-to-image model learns to write three-digit numbers."""
