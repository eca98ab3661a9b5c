"""Stands for torch where only who hosts its store, and when, is tested: importing this one takes no time."""
