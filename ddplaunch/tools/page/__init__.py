"""`ddplaunch report`: one HTML page, or a trace, of a run, made from the files in its folder. No job imports any of this."""
