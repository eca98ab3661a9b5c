"""One node at work: the front that was typed, the agent behind it, and the loop between the system and the decisions.

Decides nothing: what happens becomes events of `supervise`, whose actions are carried out here.
"""
