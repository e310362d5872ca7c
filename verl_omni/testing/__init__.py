"""For tests of this project and of your own extensions."""
