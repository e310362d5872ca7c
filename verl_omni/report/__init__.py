"""What a run tells: metrics, the report, the live page and their charts."""
