"""The quickstart's task in sound: melodies of four notes, and a small generator that plays them badly."""
