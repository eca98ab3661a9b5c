"""The coordinator of a job, and every agent's link to it: reports become events of its decision, actions orders.

Decides nothing. `orders` holds the orders and reports; `local_link` is the link of the coordinator's own agent, `remote_link`
that of an agent elsewhere. Only `remote_link`, `agents`, `incoming` and `messages` know that all these travel as messages.
"""
