"""The rest, small: registries, suggestions, arrays, seeds, the CPU platform."""
