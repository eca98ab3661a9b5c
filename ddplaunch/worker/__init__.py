"""What runs inside a worker: the bootstrap, started by its path, and what `import ddplaunch` offers a script.

Independent: it imports nothing of the launcher, and runs on any CPython from 3.8 on.
"""
