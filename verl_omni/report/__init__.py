"""What a run tells: metrics, the report and its charts."""
