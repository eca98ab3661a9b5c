"""`ddplaunch check`: some ranks of a large job run here, each alone, and what they ask of their process groups is compared.

`run` starts them and reads their `notes`, `compare` finds where they disagree, `show` says it.
"""
