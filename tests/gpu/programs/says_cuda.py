"""A script that leaves the choice to whoever started it."""

from place import write_place

write_place()
