"""DECIDE: facts about ends, and two state machines over them: `node/` for the workers of a node, `job/` for all nodes.

Pure: time comes inside the events, nothing is read, written or waited for.
"""
