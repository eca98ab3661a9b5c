"""A job's other nodes, as the agent's loop sees them: sockets become events, actions become messages. Decides nothing.

`link` is an agent's way to the coordinator, `coordinator` what the agent of node 0 is besides, `wire` how the facts about
workers travel.
"""
