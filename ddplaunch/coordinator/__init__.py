"""The coordinator of a job, and every agent's link to it: reports become events of `supervise.job`, its actions become orders.

Decides nothing. `link` holds the reports and orders, `local_link` is the coordinator's own agent's, `remote_link` that of an
agent elsewhere. Only `remote_link`, `agents` and `messages`, and what these use, know that reports and orders travel as messages.
"""
