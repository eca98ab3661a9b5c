"""One node: the command that the user started (front), its agent, and the loop between the system and the decisions.

Decides nothing: what happens becomes events of `supervise`, whose actions are carried out here.
"""
